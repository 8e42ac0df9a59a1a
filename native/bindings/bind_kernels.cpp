// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

#include "bindings.hpp"
#include "docstrings.hpp"
#include "memascend/checksum.hpp"
#include "memascend/isa.hpp"
#include "memascend/kernels.hpp"
#include "memascend/thread_pool.hpp"

namespace memascend {
namespace {

using Column = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;

std::uint32_t checksum_of(const py::object& source, std::optional<std::uint64_t> nbytes,
                          std::uint32_t seed) {
  if (py::isinstance<py::int_>(source)) {
    if (!nbytes) throw py::type_error("crc32c of an address needs nbytes");
    if (*nbytes == 0) return seed;
    const auto* data = pointer<std::byte>(source.cast<std::uintptr_t>(), "the data");
    const py::gil_scoped_release without_gil;
    return crc32c_parallel(data, *nbytes, seed);
  }
  Py_buffer buffer;
  if (PyObject_GetBuffer(source.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  const auto length = static_cast<std::uint64_t>(buffer.len);
  const bool fits = !nbytes || *nbytes <= length;
  std::uint32_t crc = seed;
  if (fits) {
    const py::gil_scoped_release without_gil;
    crc = crc32c_parallel(static_cast<const std::byte*>(buffer.buf), nbytes.value_or(length), seed);
  }
  PyBuffer_Release(&buffer);
  if (!fits) throw py::value_error("nbytes is larger than the buffer");
  return crc;
}

py::array_t<std::uint32_t> checksums_of(const Column& addresses, const Column& lengths,
                                        bool one_thread) {
  if (addresses.ndim() != 1 || lengths.ndim() != 1 || addresses.size() != lengths.size())
    throw py::value_error("addresses and nbytes must be one-dimensional and of one length");
  const auto count = static_cast<std::size_t>(addresses.size());
  std::vector<const std::byte*> data(count);
  std::vector<std::uint64_t> nbytes(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t length = lengths.data()[i];
    if (length < 0) throw py::value_error("nbytes cannot be negative");
    nbytes[i] = static_cast<std::uint64_t>(length);
    data[i] = reinterpret_cast<const std::byte*>(addresses.data()[i]);
    if (length > 0 && data[i] == nullptr) throw py::value_error("the data is address 0");
  }
  py::array_t<std::uint32_t> out(static_cast<py::ssize_t>(count));
  std::uint32_t* values = out.mutable_data();
  const py::gil_scoped_release without_gil;
  crc32c_many(data.data(), nbytes.data(), values, count, one_thread);
  return out;
}

py::tuple norm_of(std::uintptr_t address, std::uint64_t n, const std::string& dtype) {
  const FloatType type = float_type_named(dtype);
  SquareSum result{0, false};
  if (n > 0) {
    const void* data = typed_pointer(address, type, "the data");
    const py::gil_scoped_release without_gil;
    result = norm_squared(data, type, n);
  }
  return py::make_tuple(result.sum, result.nonfinite);
}

}  // namespace

void bind_kernels(py::module_& module) {
  module.def(
      "cpu_isa", [] { return isa_name(current_isa()); },
      "The instruction set that the kernels use: avx512, avx2 or scalar.");
  module.def("use_isa", &use_isa, py::arg("name"),
             "Makes the kernels use a lesser instruction set; results do not change.");
  module.def(
      "threads", [] { return kernel_pool().threads(); },
      "The number of kernel threads, the caller included.");
  module.def(
      "set_threads", [](int n) { kernel_pool().resize(n); }, py::arg("n"),
      py::call_guard<py::gil_scoped_release>(),
      "Changes the number of kernel threads; results do not depend on it.");

  module.def(
      "crc32c", &checksum_of, py::arg("source"), py::arg("nbytes") = py::none(),
      py::arg("seed") = 0,
      "CRC-32C of a buffer, or of nbytes at an address, appended to bytes whose CRC is seed.");
  module.def("crc32c_many", &checksums_of, py::arg("addresses"), py::arg("nbytes"),
             py::arg("one_thread") = false,
             "CRC-32C of each range, as uint32, on the kernel threads or on the caller's alone.");

  module.def(
      "copy",
      [](std::uintptr_t dst, std::uintptr_t src, std::uint64_t nbytes) {
        if (nbytes == 0) return;
        auto* to = pointer<std::byte>(dst, "the destination");
        const auto* from = pointer<std::byte>(src, "the source");
        const py::gil_scoped_release without_gil;
        copy_bytes(to, from, nbytes);
      },
      py::arg("dst_address"), py::arg("src_address"), py::arg("nbytes"),
      "Copies between addresses that do not overlap, on the kernel threads.");

  module.def(
      "norm_squared", &norm_of, py::arg("address"), py::arg("n"), py::arg("dtype"),
      "(sum of squares in double precision, whether any element is inf or nan), in one pass.");

  module.def(
      "read_words",
      [](std::uintptr_t address, std::uint64_t nbytes) {
        if (nbytes == 0) return std::uint64_t{0};
        const auto* data = pointer<std::uint64_t>(address, "the data");
        const py::gil_scoped_release without_gil;
        return read_words(data, nbytes);
      },
      py::arg("address"), py::arg("nbytes"),
      "The exclusive or of all 8-byte words: what reading alone takes, to measure others against.");

  const auto round_to_half = [](auto convert) {
    return [convert](std::uintptr_t dst, std::uintptr_t src, std::uint64_t n) {
      if (n == 0) return;
      auto* to = pointer<std::uint16_t>(dst, "the destination");
      const auto* from = pointer<float>(src, "the source");
      const py::gil_scoped_release without_gil;
      convert(to, from, n);
    };
  };
  module.def("to_bf16", round_to_half(to_bfloat16), py::arg("dst"), py::arg("src"), py::arg("n"),
             "Rounds n float32 to bfloat16: nearest, ties away from zero, NaN stays NaN.");
  module.def("to_f16", round_to_half(to_float16), py::arg("dst"), py::arg("src"), py::arg("n"),
             "Rounds n float32 to float16: nearest, ties to even, NaN stays NaN.");
  module.def(
      "to_f32",
      [](std::uintptr_t dst, std::uintptr_t src, std::uint64_t n, const std::string& src_dtype) {
        const FloatType type = float_type_named(src_dtype);
        if (n == 0) return;
        auto* to = pointer<float>(dst, "the destination");
        const void* from = typed_pointer(src, type, "the source");
        const py::gil_scoped_release without_gil;
        to_float32(to, from, type, n);
      },
      py::arg("dst"), py::arg("src"), py::arg("n"), py::arg("src_dtype"),
      "Widens n elements to float32, exactly.");
}

}  // namespace memascend
