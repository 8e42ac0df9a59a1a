// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <chrono>
#include <unordered_map>

#include "bindings.hpp"
#include "docstrings.hpp"
#include "memascend/io_engine.hpp"

namespace memascend {
namespace {

using Rows = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;

std::vector<Segment> segments_of(const Rows& rows) {
  if (rows.ndim() != 2 || rows.shape(1) != 4)
    throw py::value_error(
        "segments must have shape [n, 4]: member, offset, address, nbytes per row");
  const auto cell = rows.unchecked<2>();
  std::vector<Segment> segments(static_cast<std::size_t>(rows.shape(0)));
  for (py::ssize_t i = 0; i < rows.shape(0); ++i) {
    if (cell(i, 0) < 0 || cell(i, 1) < 0 || cell(i, 3) < 0)
      throw py::value_error("segment " + std::to_string(i) + " has a negative number");
    segments[static_cast<std::size_t>(i)] = {
        static_cast<std::uint32_t>(cell(i, 0)), static_cast<std::uint64_t>(cell(i, 1)),
        reinterpret_cast<std::byte*>(cell(i, 2)), static_cast<std::uint64_t>(cell(i, 3))};
  }
  return segments;
}

// The objects that batches in flight read from or write to. The engine's thread has no GIL and so
// cannot drop them: each goes when its ticket is waited for, or at the next call after its end.
class Keepalives {
 public:
  void add(const std::shared_ptr<Ticket>& ticket, py::object object) {
    sweep();
    if (!object.is_none()) held_.emplace(ticket.get(), std::make_pair(ticket, std::move(object)));
  }
  void drop(const Ticket* ticket) {
    const auto at = held_.find(ticket);
    if (at == held_.end()) return;
    const py::object object = std::move(at->second.second);
    held_.erase(at);  // first: dropping the object may run Python code that comes back here
  }
  void sweep() {
    std::vector<py::object> ended;
    for (auto at = held_.begin(); at != held_.end();) {
      if (at->second.first->done()) {
        ended.push_back(std::move(at->second.second));
        at = held_.erase(at);
      } else {
        ++at;
      }
    }
  }

 private:
  std::unordered_map<const Ticket*, std::pair<std::shared_ptr<Ticket>, py::object>> held_;
};

struct PyTicket {
  std::shared_ptr<Ticket> ticket;
  std::shared_ptr<Keepalives> keepalives;

  // Wakes up now and then to let a signal handler (Ctrl-C) raise; the I/O goes on regardless, and
  // its memory stays alive.
  void wait() const {
    constexpr std::chrono::milliseconds kSignalCheck{200};
    for (;;) {
      {
        const py::gil_scoped_release without_gil;
        if (ticket->wait_for(kSignalCheck)) break;
      }
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
    keepalives->drop(ticket.get());
    ticket->wait();
  }

  bool wait_for(double timeout_s) const {
    const py::gil_scoped_release without_gil;
    return ticket->wait_for(duration_of(timeout_s));
  }
};

class PyEngine {
 public:
  explicit PyEngine(const IoOptions& options) : engine_(std::make_unique<IoEngine>(options)) {}
  ~PyEngine() {
    const py::gil_scoped_release without_gil;
    engine_.reset();  // drains
  }
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  PyTicket submit(Direction direction, const Rows& rows, py::object keepalive,
                  Priority priority = Priority::kNormal) {
    const std::vector<Segment> segments = segments_of(rows);
    std::shared_ptr<Ticket> ticket;
    {
      const py::gil_scoped_release without_gil;
      ticket = engine_->submit(direction, segments, priority);
    }
    keepalives_->add(ticket, std::move(keepalive));
    return {std::move(ticket), keepalives_};
  }

  void close(bool cancel) {
    {
      const py::gil_scoped_release without_gil;
      engine_->close(cancel);
    }
    keepalives_->sweep();
  }

  IoEngine& engine() const { return *engine_; }

 private:
  std::unique_ptr<IoEngine> engine_;
  std::shared_ptr<Keepalives> keepalives_ = std::make_shared<Keepalives>();
};

IoOptions options_of(std::vector<int> fds, std::string backend, std::uint32_t queue_depth,
                     std::uint64_t request_bytes, std::uint32_t threads,
                     const std::vector<std::pair<std::uintptr_t, std::uint64_t>>& regions) {
  IoOptions options;
  options.fds = std::move(fds);
  options.backend = std::move(backend);
  options.queue_depth = queue_depth;
  options.request_bytes = request_bytes;
  options.threads = threads;
  for (const auto& [address, nbytes] : regions)
    options.regions.emplace_back(reinterpret_cast<std::byte*>(address), nbytes);
  return options;
}

py::dict counters_of(const PyEngine& self) {
  const IoCounters counters = self.engine().counters();
  py::dict values;
  values["read_bytes"] = counters.read_bytes;
  values["write_bytes"] = counters.write_bytes;
  values["read_requests"] = counters.read_requests;
  values["write_requests"] = counters.write_requests;
  values["short_transfers"] = counters.short_transfers;
  values["retries"] = counters.retries;
  values["failures"] = counters.failures;
  values["flushes"] = counters.flushes;
  values["busy_seconds"] = counters.busy_seconds;
  return values;
}

std::int64_t nanoseconds_of(MemberSpan::Time time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

py::list spans_of(const PyTicket& self) {
  py::list all;
  if (!self.ticket->done()) return all;
  const char* direction = self.ticket->direction() == Direction::kRead ? "read" : "write";
  const auto& spans = self.ticket->spans();
  for (std::size_t member = 0; member < spans.size(); ++member)
    if (spans[member].nbytes > 0)
      all.append(py::make_tuple(
          member, direction, spans[member].nbytes, nanoseconds_of(self.ticket->submitted()),
          nanoseconds_of(spans[member].begun), nanoseconds_of(spans[member].ended)));
  return all;
}

py::list list_of(const LatencyHistogram& histogram) {
  py::list values;
  for (const std::uint64_t count : histogram) values.append(count);
  return values;
}

py::list statistics_of(const PyEngine& self) {
  py::list all;
  for (std::size_t index = 0; index < self.engine().members(); ++index) {
    const Lane& lane = self.engine().member(index);
    const MemberStatistics counts = lane.statistics();
    py::dict values;
    values["path"] = lane.path();
    values["read_bytes"] = counts.read.bytes;
    values["write_bytes"] = counts.write.bytes;
    values["read_requests"] = counts.read.requests;
    values["write_requests"] = counts.write.requests;
    values["read_latency"] = list_of(counts.read.latency);
    values["write_latency"] = list_of(counts.write.latency);
    values["queue_depth"] = counts.queue_depth;
    values["queue_depth_max"] = counts.queue_depth_max;
    values["urgent_requests"] = counts.urgent_requests;
    values["short_transfers"] = counts.short_transfers;
    values["retries"] = counts.retries;
    values["failures"] = counts.failures;
    values["cancelled_bytes"] = counts.cancelled_bytes;
    values["busy_seconds"] = counts.busy_seconds;
    values["request_bytes"] = lane.request_bytes();
    values["device_command_bytes"] = lane.limits().command_bytes;
    values["device_segments"] = lane.limits().segments;
    all.append(values);
  }
  return all;
}

}  // namespace

void bind_io(py::module_& module) {
  py::class_<PyTicket>(module, "Ticket", "The end of a batch of reads or writes.")
      .def("wait", &PyTicket::wait, docs::kWaitDoc)
      .def("wait_for", &PyTicket::wait_for, py::arg("timeout_s"),
           "Whether the batch has ended within the time; does not raise its failure.")
      .def("done", [](const PyTicket& self) { return self.ticket->done(); })
      .def("spans", &spans_of, docs::kSpansDoc)
      .def_property_readonly("nbytes", [](const PyTicket& self) { return self.ticket->nbytes(); });

  py::class_<PyEngine>(module, "IoEngine", docs::kEngineDoc)
      .def(py::init([](std::vector<int> fds, std::string backend, std::uint32_t queue_depth,
                       std::uint64_t request_bytes, std::uint32_t threads,
                       const std::vector<std::pair<std::uintptr_t, std::uint64_t>>& regions) {
             return std::make_unique<PyEngine>(options_of(
                 std::move(fds), std::move(backend), queue_depth, request_bytes, threads, regions));
           }),
           py::arg("fds"), py::kw_only(), py::arg("backend") = "auto", py::arg("queue_depth") = 8,
           py::arg("request_bytes") = 4U << 20, py::arg("threads") = 4,
           py::arg("regions") = std::vector<std::pair<std::uintptr_t, std::uint64_t>>{})
      .def(
          "submit_read",
          [](PyEngine& self, const Rows& segments, py::object keepalive, bool urgent) {
            return self.submit(Direction::kRead, segments, std::move(keepalive),
                               urgent ? Priority::kUrgent : Priority::kNormal);
          },
          py::arg("segments"), py::arg("keepalive") = py::none(), py::arg("urgent") = false,
          docs::kSubmitReadDoc)
      .def(
          "submit_write",
          [](PyEngine& self, const Rows& segments, py::object keepalive) {
            return self.submit(Direction::kWrite, segments, std::move(keepalive));
          },
          py::arg("segments"), py::arg("keepalive") = py::none(), docs::kSubmitDoc)
      .def(
          "flush",
          [](const PyEngine& self) {
            const py::gil_scoped_release without_gil;
            self.engine().flush();
          },
          docs::kFlushDoc)
      .def("counters", &counters_of)
      .def("statistics", &statistics_of, docs::kStatisticsDoc)
      .def("close", &PyEngine::close, py::arg("cancel") = false, docs::kEngineCloseDoc)
      .def_property_readonly("backend",
                             [](const PyEngine& self) { return self.engine().backend(); })
      .def_property_readonly("backend_reason",
                             [](const PyEngine& self) { return self.engine().backend_reason(); })
      .def_property_readonly(
          "uses_registered_buffers",
          [](const PyEngine& self) { return self.engine().uses_registered_buffers(); })
      .def_property_readonly(
          "uses_registered_files",
          [](const PyEngine& self) { return self.engine().uses_registered_files(); })
      .def_property_readonly("registration_reason", [](const PyEngine& self) {
        return self.engine().registration_reason();
      });
}

}  // namespace memascend
