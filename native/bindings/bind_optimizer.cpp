// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

#include "bindings.hpp"
#include "docstrings.hpp"
#include "memascend/optimizer.hpp"

namespace memascend {
namespace {

using Positions = py::array_t<std::int64_t, py::array::c_style>;

void fused_update_of(const std::string& kernel, std::uintptr_t param, std::uintptr_t mu,
                     std::uintptr_t nu, std::uintptr_t grad, std::uint64_t n,
                     const std::string& grad_dtype, std::uintptr_t rounded,
                     const std::string& rounded_dtype, const UpdateNumbers& numbers) {
  const UpdateRule rule = update_rule_named(kernel);
  if (n == 0) return;
  FusedTile tile{};
  tile.n = n;
  tile.param = pointer<float>(param, "param");
  if (moments_of(rule) > 0) tile.mu = pointer<float>(mu, "mu");
  if (moments_of(rule) > 1) tile.nu = pointer<float>(nu, "nu");
  tile.grad_type = float_type_named(grad_dtype);
  tile.grad = typed_pointer(grad, tile.grad_type, "grad");
  if (rounded != 0) {
    tile.rounded_type = float_type_named(rounded_dtype);
    tile.rounded = typed_pointer(rounded, tile.rounded_type, "rounded");
  }
  const py::gil_scoped_release without_gil;
  fused_update(rule, tile, numbers);
}

// Sets the arrays of `tile` that `format` has.
void set_arrays(CompactTile& tile, CompactFormat format, std::uintptr_t param,
                std::uintptr_t residual, std::uintptr_t mu, std::uintptr_t nu,
                std::uintptr_t scales) {
  tile.param = pointer<std::uint16_t>(param, "param");
  switch (format) {
    case CompactFormat::kSplit:
      tile.residual = pointer<std::uint16_t>(residual, "residual");
      tile.mu = pointer<float>(mu, "mu");
      tile.nu = pointer<float>(nu, "nu");
      return;
    case CompactFormat::kSplitBf16:
      tile.residual = pointer<std::uint16_t>(residual, "residual");
      [[fallthrough]];
    case CompactFormat::kBf16:
      tile.mu = pointer<std::uint16_t>(mu, "mu");
      tile.nu = pointer<std::uint16_t>(nu, "nu");
      return;
    case CompactFormat::kInt8:
      tile.residual = pointer<std::uint8_t>(residual, "residual");
      tile.mu = pointer<std::uint8_t>(mu, "mu");
      tile.nu = pointer<std::uint8_t>(nu, "nu");
      tile.scales = pointer<float>(scales, "scales");
      return;
  }
}

void set_rows(CompactTile& tile, const Positions& starts, std::uint64_t row_blocks) {
  if (starts.ndim() != 1 || starts.size() == 0)
    throw py::value_error("row_starts must be one-dimensional and not empty");
  const auto rows = static_cast<std::uint64_t>(starts.size());
  if (tile.n % rows != 0) throw py::value_error("n is not a multiple of the number of rows");
  tile.row_starts = starts.data();
  tile.row_elements = tile.n / rows;
  tile.row_blocks = row_blocks;
  if (tile.scales == nullptr) return;
  for (std::uint64_t row = 0; row < rows; ++row) {
    const auto phase = static_cast<std::uint64_t>(tile.row_starts[row]) % kBlockElements;
    if ((phase + tile.row_elements + kBlockElements - 1) / kBlockElements > row_blocks)
      throw py::value_error("row_blocks is fewer than the blocks that a row lies in");
  }
}

void compact_update_of(const std::string& name, std::uintptr_t param, std::uintptr_t residual,
                       std::uintptr_t mu, std::uintptr_t nu, std::uintptr_t scales,
                       std::uintptr_t grad, std::uint64_t n, const std::string& grad_dtype,
                       std::uint64_t first_element, std::uint64_t random_key,
                       const std::optional<Positions>& row_starts, std::uint64_t row_blocks,
                       const UpdateNumbers& numbers) {
  const CompactFormat format = compact_format_named(name);
  if (n == 0) return;
  CompactTile tile{};
  tile.n = n;
  set_arrays(tile, format, param, residual, mu, nu, scales);
  tile.grad_type = float_type_named(grad_dtype);
  tile.grad = typed_pointer(grad, tile.grad_type, "grad");
  tile.first_element = first_element;
  tile.random_key = random_key;
  if (row_starts) {
    set_rows(tile, *row_starts, row_blocks);
  } else if (format == CompactFormat::kInt8 && first_element % kBlockElements != 0) {
    throw py::value_error("first_element is not a multiple of the block");
  }
  const py::gil_scoped_release without_gil;
  compact_update(format, tile, numbers);
}

}  // namespace

void bind_optimizer(py::module_& module) {
  module.attr("BLOCK_ELEMENTS") = kBlockElements;
  module.def(
      "fused_update",
      [](const std::string& kernel, std::uintptr_t param, std::uintptr_t mu, std::uintptr_t nu,
         std::uintptr_t grad, std::uint64_t n, const std::string& grad_dtype,
         std::uintptr_t rounded, const std::string& rounded_dtype, double lr, double b1, double b2,
         double eps, double eps_root, double weight_decay, double bias1, double bias1_next,
         double bias2, double grad_scale) {
        fused_update_of(
            kernel, param, mu, nu, grad, n, grad_dtype, rounded, rounded_dtype,
            {lr, b1, b2, eps, eps_root, weight_decay, bias1, bias1_next, bias2, grad_scale});
      },
      py::kw_only(), py::arg("kernel"), py::arg("param"), py::arg("mu") = 0, py::arg("nu") = 0,
      py::arg("grad"), py::arg("n"), py::arg("grad_dtype"), py::arg("rounded") = 0,
      py::arg("rounded_dtype") = "", py::arg("lr"), py::arg("b1") = 0.0, py::arg("b2") = 0.0,
      py::arg("eps") = 0.0, py::arg("eps_root") = 0.0, py::arg("weight_decay") = 0.0,
      py::arg("bias1") = 1.0, py::arg("bias1_next") = 1.0, py::arg("bias2") = 1.0,
      py::arg("grad_scale") = 1.0, docs::kFusedUpdateDoc);
  module.def(
      "compact_update",
      [](const std::string& format, std::uintptr_t param, std::uintptr_t residual,
         std::uintptr_t mu, std::uintptr_t nu, std::uintptr_t scales, std::uintptr_t grad,
         std::uint64_t n, const std::string& grad_dtype, std::uint64_t first_element,
         std::uint64_t random_key, const std::optional<Positions>& row_starts,
         std::uint64_t row_blocks, double lr, double b1, double b2, double eps, double weight_decay,
         double bias1, double bias2, double grad_scale) {
        compact_update_of(format, param, residual, mu, nu, scales, grad, n, grad_dtype,
                          first_element, random_key, row_starts, row_blocks,
                          {lr, b1, b2, eps, 0.0, weight_decay, bias1, 1.0, bias2, grad_scale});
      },
      py::kw_only(), py::arg("state_format"), py::arg("param"), py::arg("residual") = 0,
      py::arg("mu"), py::arg("nu"), py::arg("scales") = 0, py::arg("grad"), py::arg("n"),
      py::arg("grad_dtype"), py::arg("first_element"), py::arg("random_key"),
      py::arg("row_starts") = py::none(), py::arg("row_blocks") = 0, py::arg("lr"), py::arg("b1"),
      py::arg("b2"), py::arg("eps"), py::arg("weight_decay"), py::arg("bias1"), py::arg("bias2"),
      py::arg("grad_scale") = 1.0, docs::kCompactUpdateDoc);
  module.def(
      "to_bf16_stochastic",
      [](std::uintptr_t dst, std::uintptr_t src, std::uint64_t n, std::uint64_t first_element,
         std::uint64_t random_key) {
        if (n == 0) return;
        auto* to = pointer<std::uint16_t>(dst, "the destination");
        const auto* from = pointer<float>(src, "the source");
        const py::gil_scoped_release without_gil;
        to_bfloat16_stochastic(to, from, n, first_element, random_key);
      },
      py::arg("dst"), py::arg("src"), py::arg("n"), py::arg("first_element"), py::arg("random_key"),
      "Rounds n float32 to bfloat16 stochastically, as the bf16 format rounds its parameters.");
}

}  // namespace memascend
