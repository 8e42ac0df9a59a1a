# SPDX-License-Identifier: Apache-2.0
"""The element types that tensors are stored and computed in, and their names in each format.

jax-free: numpy with ``ml_dtypes`` for bfloat16.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
F16: np.dtype[Any] = np.dtype(np.float16)
F32: np.dtype[Any] = np.dtype(np.float32)

#: Our names, which are numpy's: used in the catalog, the config and messages.
BY_NAME: dict[str, np.dtype[Any]] = {
    "bfloat16": BF16,
    "float16": F16,
    "float32": F32,
    "float64": np.dtype(np.float64),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "int16": np.dtype(np.int16),
    "uint16": np.dtype(np.uint16),
    "int32": np.dtype(np.int32),
    "uint32": np.dtype(np.uint32),
    "int64": np.dtype(np.int64),
    "uint64": np.dtype(np.uint64),
    "bool": np.dtype(np.bool_),
}

#: Names of the safetensors format, by ours.
SAFETENSORS_NAME: dict[str, str] = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "bool": "BOOL",
}


def dtype_name(dtype: np.dtype[Any] | type[Any] | str) -> str:
    """Returns our name of ``dtype``; raises ``ValueError`` for a type that no tensor is stored in."""
    resolved = BY_NAME.get(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    if resolved is not None and BY_NAME.get(resolved.name) == resolved:
        return str(resolved.name)
    raise ValueError(f"unknown dtype {dtype!r}; known are {', '.join(BY_NAME)}")


def to_dtype(name: str) -> np.dtype[Any]:
    """Returns the numpy dtype of our ``name``; raises ``ValueError`` naming the known ones."""
    return BY_NAME[dtype_name(name)]
