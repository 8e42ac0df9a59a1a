// SPDX-License-Identifier: Apache-2.0
#include "bindings.hpp"
#include "memascend/arena.hpp"
#include "memascend/error.hpp"
#include "memascend/version.hpp"

namespace memascend {
namespace {

// OSError picks the subclass (FileNotFoundError, PermissionError, ...) from the number.
void raise_os_error(int number, const char* text, const std::string& path) {
  py::object error = py::module_::import("builtins").attr("OSError");
  py::object instance = path.empty() ? error(number, text) : error(number, text, path);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(instance.ptr())), instance.ptr());
}

// Only for this module. Without it a std::system_error becomes RuntimeError and its errno is lost.
void translate(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const SystemError& failure) {
    raise_os_error(failure.code().value(), failure.what(), failure.path());
  } catch (const std::system_error& failure) {
    raise_os_error(failure.code().value(), failure.what(), {});
  } catch (const ArenaFull& failure) {
    PyErr_SetString(PyExc_MemoryError, failure.what());
  }
}

}  // namespace
}  // namespace memascend

PYBIND11_MODULE(_core, module) {
  module.doc() = "The native core of memascend-jax: pinned memory, asynchronous I/O, kernels.";
  module.attr("SOURCE_VERSION") = memascend::kSourceVersion;
  pybind11::register_local_exception_translator(memascend::translate);
  memascend::bind_arena(module);
  memascend::bind_io(module);
  memascend::bind_kernels(module);
  memascend::bind_optimizer(module);
}
