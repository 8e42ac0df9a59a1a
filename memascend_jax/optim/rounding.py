# SPDX-License-Identifier: Apache-2.0
"""Rounding of fp32 masters to the dtype that a parameter is stored in, and the first state of a parameter.

bf16 is rounded to nearest with ties away from zero, the same rule as the fused update, so that a parameter is
always the rounding of its master.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax._native import _core
from memascend_jax.dtypes import BF16, F16, to_dtype
from memascend_jax.optim.state_format import MASTER, RESIDUAL, StateFormat, itemsize


def round_master(master: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Returns ``master`` (C-contiguous fp32) rounded to ``dtype`` (``bfloat16``, ``float16`` or ``float32``), as a new
    array."""
    if dtype == "float32":
        return master.copy()
    if dtype not in ("bfloat16", "float16"):
        raise ValueError(f"parameters are stored as bfloat16, float16 or float32, not {dtype}")
    rounded = np.empty(master.shape, BF16 if dtype == "bfloat16" else F16)
    convert = _core.to_bf16 if dtype == "bfloat16" else _core.to_f16
    convert(rounded.ctypes.data, master.ctypes.data, master.size)
    return rounded


def widen(values: NDArray[Any]) -> NDArray[np.float32]:
    """Returns ``values`` (bf16, fp16 or fp32) as C-contiguous fp32, without a copy when they are that already."""
    return np.ascontiguousarray(values, dtype=to_dtype("float32"))


def split_master(
    fmt: StateFormat, master: NDArray[np.float32]
) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """Returns the parameters of ``master`` in ``fmt``, and the leaves that hold what they do not.

    What a format has no bits for is rounded to nearest: it happens once, to weights that come from elsewhere. A NaN
    stays one.
    """
    if fmt.has_master:
        return round_master(master, fmt.param_dtype), {MASTER: master}
    residual = next((leaf for leaf in fmt.leaves if leaf.suffix == RESIDUAL), None)
    if residual is None:
        return round_master(master, fmt.param_dtype), {}
    bits = master.view(np.uint32)
    spare = 16 - 8 * itemsize(residual.dtype)
    # Rounding to 24 bits first, then these to 16: the residual must tell what the second did. inf and NaN have none.
    half = (np.uint32(1) << spare) >> 1
    kept = np.where(np.isfinite(master), bits + half, bits & np.uint32(0xFFFF0000)) >> spare << spare
    param = round_master(kept.astype(np.uint32).view(np.float32), fmt.param_dtype)
    return param, {RESIDUAL: (kept >> spare).astype(residual.dtype)}


def join_master(
    fmt: StateFormat, param: NDArray[Any], residual: NDArray[Any] | None = None
) -> NDArray[np.float32]:
    """Returns the fp32 masters that ``param`` and the ``#residual`` leaf stand for: ``split_master`` undone."""
    upper = param.view(np.uint16).astype(np.uint32) << 16 if param.dtype == BF16 else None
    if residual is None or upper is None:
        return widen(param)
    signed = residual.view(f"int{8 * residual.itemsize}").astype(np.int32)
    left = signed.view(np.uint32) << (16 - 8 * residual.itemsize)
    joined: NDArray[np.float32] = (upper + left).view(np.float32)
    return joined
