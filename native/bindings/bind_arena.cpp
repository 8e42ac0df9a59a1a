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
  if (name == "mlock") return PinMode::kMlock;
  if (name == "none") return PinMode::kNone;
  throw py::value_error("pin must be auto, mlock or none, got '" + name + "'");
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
             std::uint64_t offset) {
            return std::make_unique<SlotExport>(self, dtype, std::move(shape), offset);
          },
          py::arg("dtype"), py::arg("shape"), py::arg("offset_bytes") = 0, docs::kDlpackDoc)
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
      .def("__dlpack_device__", [](const SlotExport&) { return py::make_tuple(int{dl::kCpu}, 0); });
}

}  // namespace

void bind_arena(py::module_& module) {
  bind_slot(module);
  py::class_<PinnedArena, std::shared_ptr<PinnedArena>>(module, "PinnedArena", docs::kArenaDoc)
      .def(py::init([](std::uint64_t capacity, const std::string& pin, bool huge_pages) {
             const PinMode mode = pin_mode_named(pin);
             const py::gil_scoped_release without_gil;  // mlock touches every page
             return PinnedArena::create(capacity, mode, huge_pages);
           }),
           py::arg("capacity_bytes"), py::kw_only(), py::arg("pin") = "auto",
           py::arg("huge_pages") = true)
      .def("allocate", &PinnedArena::allocate, py::arg("nbytes"), py::arg("label") = "",
           docs::kAllocateDoc)
      .def("close", &PinnedArena::close, docs::kCloseDoc)
      .def_property_readonly("capacity_bytes", &PinnedArena::capacity_bytes)
      .def_property_readonly("in_use_bytes", &PinnedArena::in_use_bytes)
      .def_property_readonly("high_water_bytes", &PinnedArena::high_water_bytes)
      .def_property_readonly("largest_free_bytes", &PinnedArena::largest_free_bytes)
      .def_property_readonly(
          "pinning", [](const PinnedArena& self) { return self.pinned() ? "mlock" : "pageable"; })
      .def_property_readonly("pinning_reason", &PinnedArena::pinning_reason)
      .def_property_readonly("huge_pages", &PinnedArena::huge_pages)
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
