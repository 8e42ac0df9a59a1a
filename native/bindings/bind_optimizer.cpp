// SPDX-License-Identifier: Apache-2.0
#include "bindings.hpp"
#include "docstrings.hpp"
#include "memascend/optimizer.hpp"

namespace memascend {
namespace {

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

}  // namespace

void bind_optimizer(py::module_& module) {
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
}

}  // namespace memascend
