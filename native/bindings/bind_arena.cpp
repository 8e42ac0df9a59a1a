// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

#include "bindings.hpp"
#include "docstrings.hpp"
#include "memascend/arena.hpp"
#include "memascend/dlpack.hpp"

namespace memascend {
namespace {

using SlotPointer = std::shared_ptr<Slot>;

PinMode pin_mode_named(const std::string& name) {
  if (name == "auto") return PinMode::kAuto;
  if (name == "device") return PinMode::kDevice;
  if (name == "mlock") return PinMode::kMlock;
  if (name == "none") return PinMode::kNone;
  throw py::value_error("pin must be auto, device, mlock or none, got '" + name + "'");
}

// A numpy array over part of a slot. Its base holds the slot, so it may outlive every other handle.
py::array_t<std::uint8_t> view(const SlotPointer& slot, std::uint64_t offset,
                               std::uint64_t nbytes) {
  std::byte* begin = slot->at(offset, nbytes);
  py::capsule base(new SlotPointer(slot),
                   [](void* held) { delete static_cast<SlotPointer*>(held); });
  return py::array_t<std::uint8_t>(static_cast<py::ssize_t>(nbytes),
                                   reinterpret_cast<std::uint8_t*>(begin), base);
}

// The capsule owns the tensor until a consumer renames it ("used_...").
template <typename Managed>
py::object capsule_of(Managed* managed, const char* name) {
  PyObject* capsule = PyCapsule_New(managed, name, [](PyObject* self) {
    const char* current = PyCapsule_GetName(self);
    if (current == nullptr || std::string(current).rfind("used_", 0) == 0) return;
    auto* owned = static_cast<Managed*>(PyCapsule_GetPointer(self, current));
    owned->deleter(owned);
  });
  if (capsule == nullptr) {
    managed->deleter(managed);
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(capsule);
}

py::object dlpack(const SlotExport& self, const py::kwargs& options) {
  const auto option = [&](const char* name) {
    return options.contains(name) ? py::object(options[name]) : py::object(py::none());
  };
  if (!option("copy").is_none() && option("copy").cast<bool>())
    throw py::buffer_error("a slot is exported in place, never copied");
  const py::object version = option("max_version");
  if (version.is_none() || version.cast<std::pair<int, int>>().first < 1)
    return capsule_of(self.managed(), "dltensor");
  return capsule_of(self.managed_versioned(), "dltensor_versioned");
}

void bind_slot(py::module_& module) {
  py::class_<Slot, SlotPointer>(module, "Slot", py::buffer_protocol(), docs::kSlotDoc)
      .def_property_readonly(
          "address", [](const Slot& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
      .def_property_readonly("nbytes", &Slot::nbytes)
      .def_property_readonly("label", &Slot::label)
      .def_property_readonly("released", &Slot::released)
      .def_property_readonly("readers", &Slot::readers)
      .def("release", &Slot::release, docs::kSlotReleaseDoc)
      .def("view", &view, py::arg("offset"), py::arg("nbytes"), docs::kViewDoc)
      .def(
          "dlpack",
          [](const SlotPointer& self, const std::string& dtype, std::vector<std::int64_t> shape,
             std::uint64_t offset, std::optional<int> cuda_ordinal) {
            const dl::Device device =
                cuda_ordinal ? dl::Device{dl::kCudaHost, *cuda_ordinal} : dl::Device{dl::kCpu, 0};
            return std::make_unique<SlotExport>(self, dtype, std::move(shape), offset, device);
          },
          py::arg("dtype"), py::arg("shape"), py::arg("offset_bytes") = 0,
          py::arg("cuda_ordinal") = py::none(), docs::kDlpackDoc)
      .def(
          "wait_no_readers",
          [](const Slot& self, double timeout_s) {
            const py::gil_scoped_release without_gil;
            return self.wait_no_readers(duration_of(timeout_s));
          },
          py::arg("timeout_s"), "Waits until no reader is left; False when the time ran out first.")
      .def_buffer([](Slot& self) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(self.data()),
                               static_cast<py::ssize_t>(self.nbytes()));
      });
  py::class_<SlotExport>(module, "SlotExport")
      .def("__dlpack__", &dlpack)
      .def("__dlpack_device__", [](const SlotExport& self) {
        return py::make_tuple(self.device().device_type, self.device().device_id);
      });
}

void bind_driver(py::module_& module) {
  py::class_<CudaDriver, std::shared_ptr<CudaDriver>>(module, "CudaDriver", docs::kCudaDriverDoc)
      .def(py::init([](int ordinal) {
             const py::gil_scoped_release without_gil;
             return CudaDriver::open(ordinal);
           }),
           py::arg("ordinal"))
      .def(
          "copy_to_host",
          [](const CudaDriver& self, std::uintptr_t dst, std::uintptr_t src, std::uint64_t nbytes) {
            auto* to = pointer<std::byte>(dst, "dst_address");
            const py::gil_scoped_release without_gil;
            self.copy_to_host(to, src, nbytes);
          },
          py::arg("dst_address"), py::arg("src_device_address"), py::arg("nbytes"),
          docs::kCopyToHostDoc);
}

py::dict described(const PinnedRegion& region) {
  py::list refusals;
  for (const Refusal& refusal : region.refusals)
    refusals.append(py::make_tuple(name_of(refusal.rung), refusal.nbytes, refusal.reason));
  py::dict facts;
  facts["address"] = reinterpret_cast<std::uintptr_t>(region.begin);
  facts["nbytes"] = region.nbytes;
  facts["rung"] = name_of(region.rung());
  facts["locked_bytes"] = region.locked_bytes;
  facts["registered_by"] = region.registered_by;
  facts["refusals"] = refusals;
  return facts;
}

void bind_pinning(py::class_<PinnedArena, std::shared_ptr<PinnedArena>>& arena) {
  arena
      .def_property_readonly("pinning",
                             [](const PinnedArena& self) { return name_of(self.rung()); })
      .def_property_readonly("pinning_reason", &PinnedArena::pinning_reason)
      .def_property_readonly("huge_pages", &PinnedArena::huge_pages)
      .def_property_readonly("page_bytes", &PinnedArena::page_bytes)
      .def(
          "pinned_regions",
          [](const PinnedArena& self) {
            py::list regions;
            for (const PinnedRegion& region : self.pinned_regions())
              regions.append(described(region));
            return regions;
          },
          docs::kPinnedRegionsDoc)
      .def("register_with", &PinnedArena::register_with, py::arg("driver"),
           py::call_guard<py::gil_scoped_release>(), docs::kRegisterWithDoc)
      .def("note_registered", &PinnedArena::note_registered, py::arg("region"), py::arg("by"),
           docs::kNoteRegisteredDoc)
      .def("note_unregistered", &PinnedArena::note_unregistered, py::arg("region"),
           "Says that what note_registered told has been undone.")
      .def("note_refused", &PinnedArena::note_refused, py::arg("region"), py::arg("reason"),
           "Keeps the reason why somebody else could not register a region.");
}

}  // namespace

void bind_arena(py::module_& module) {
  bind_slot(module);
  bind_driver(module);
  module.attr("REGION_BYTES") = kRegionBytes;
  module.def("page_bytes", &page_bytes, "Returns the size of the system's pages.");
  py::class_<PinnedArena, std::shared_ptr<PinnedArena>> arena(module, "PinnedArena",
                                                              docs::kArenaDoc);
  bind_pinning(arena);
  arena
      .def(py::init([](std::uint64_t capacity, const std::string& pin, bool huge_pages,
                       std::optional<std::uint64_t> lockable_bytes, std::uint64_t region_bytes,
                       std::uint64_t page, int cuda_ordinal) {
             MappingOptions options;
             options.pin.mode = pin_mode_named(pin);
             if (lockable_bytes) options.pin.lockable_bytes = *lockable_bytes;
             options.pin.region_bytes = region_bytes;
             options.pin.cuda_ordinal = cuda_ordinal;
             options.huge_pages = huge_pages;
             options.page_bytes = page;
             const py::gil_scoped_release without_gil;  // pinning touches every page
             return PinnedArena::create(capacity, options);
           }),
           py::arg("capacity_bytes"), py::kw_only(), py::arg("pin") = "auto",
           py::arg("huge_pages") = true, py::arg("lockable_bytes") = py::none(),
           py::arg("region_bytes") = kRegionBytes, py::arg("page_bytes") = 0,
           py::arg("cuda_ordinal") = 0)
      .def("allocate", &PinnedArena::allocate, py::arg("nbytes"), py::arg("label") = "",
           docs::kAllocateDoc)
      .def("close", &PinnedArena::close, docs::kCloseDoc)
      .def_property_readonly("capacity_bytes", &PinnedArena::capacity_bytes)
      .def_property_readonly("in_use_bytes", &PinnedArena::in_use_bytes)
      .def_property_readonly("high_water_bytes", &PinnedArena::high_water_bytes)
      .def_property_readonly("largest_free_bytes", &PinnedArena::largest_free_bytes)
      .def("regions",
           [](const PinnedArena& self) {
             std::vector<std::pair<std::uintptr_t, std::uint64_t>> regions;
             for (const auto& [begin, nbytes] : self.regions())
               regions.emplace_back(reinterpret_cast<std::uintptr_t>(begin), nbytes);
             return regions;
           })
      .def_property_readonly("epoch", &PinnedArena::epoch)
      .def("advance_epoch", &PinnedArena::advance_epoch, "Wakes whoever is in wait_epoch.")
      .def(
          "wait_epoch",
          [](const PinnedArena& self, std::uint64_t seen, double timeout_s) {
            const py::gil_scoped_release without_gil;
            return self.wait_epoch(seen, duration_of(timeout_s));
          },
          py::arg("seen"), py::arg("timeout_s"),
          "Waits until the epoch is not `seen` any more or the time is out; returns the epoch.");
}

}  // namespace memascend
