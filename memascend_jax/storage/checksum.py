# SPDX-License-Identifier: Apache-2.0
"""CRC32C of bytes, arrays and many pieces of memory, by the native core."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memascend_jax._native import _core
from memascend_jax.storage.engine import address_of


def crc32c_bytes(data: bytes) -> int:
    """Returns the CRC32C of ``data``."""
    return int(_core.crc32c(data))


def crc32c_array(array: npt.NDArray[Any], seed: int = 0) -> int:
    """Returns the CRC32C of the bytes of a C-contiguous ``array``, continuing ``seed``."""
    return int(_core.crc32c(address_of(array), array.nbytes, seed)) if array.nbytes else seed


def crc32c_many(
    addresses: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64], one_thread: bool = False
) -> npt.NDArray[np.uint32]:
    """Returns the CRC32C of each ``nbytes[i]`` bytes at ``addresses[i]``, which must be live memory."""
    return _core.crc32c_many(addresses, nbytes, one_thread)


def unit_pieces(
    address: int, nbytes: int, unit_bytes: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns (addresses, lengths) of the units that ``nbytes`` at ``address`` fall into, the last one shorter."""
    offsets = np.arange(0, nbytes, unit_bytes, dtype=np.int64)
    return address + offsets, np.minimum(unit_bytes, nbytes - offsets)
