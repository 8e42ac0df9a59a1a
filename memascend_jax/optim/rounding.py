# SPDX-License-Identifier: Apache-2.0
"""Rounding of fp32 masters to the dtype that a parameter is stored in.

bf16 is rounded to nearest with ties away from zero, the same rule as the fused update, so that a parameter is
always the rounding of its master.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax._native import _core
from memascend_jax.dtypes import BF16, to_dtype


def round_master(master: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Returns ``master`` (C-contiguous fp32) rounded to ``dtype`` (``bfloat16`` or ``float32``), as a new array."""
    if dtype == "float32":
        return master.copy()
    if dtype != "bfloat16":
        raise ValueError(f"parameters are stored as bfloat16 or float32, not {dtype}")
    rounded = np.empty(master.shape, BF16)
    _core.to_bf16(rounded.ctypes.data, master.ctypes.data, master.size)
    return rounded


def widen(values: NDArray[Any]) -> NDArray[np.float32]:
    """Returns ``values`` (bf16, fp16 or fp32) as C-contiguous fp32, without a copy when they are that already."""
    return np.ascontiguousarray(values, dtype=to_dtype("float32"))
