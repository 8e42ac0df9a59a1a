# SPDX-License-Identifier: Apache-2.0
"""What checksums cost a loop that does nothing but read and write: the part of its time spent computing them."""

from __future__ import annotations

from typing import Any

import numpy as np

from memascend_jax.bench.sample import timed
from memascend_jax.bench.store_contender import StoreContender
from memascend_jax.storage.checksum import crc32c_many
from memascend_jax.units import GIB, MIB

_ROUNDS = 3


def checksum_cost(store: StoreContender) -> dict[str, Any]:
    """Returns seconds and processor seconds per GiB of CRC32C over tiles of 4 MiB in the store's own memory."""
    address, room = store.source
    nbytes = room // (4 * MIB) * (4 * MIB)
    starts = address + np.arange(0, nbytes, 4 * MIB, dtype=np.int64)
    lengths = np.full(len(starts), 4 * MIB, np.int64)
    samples = [timed(lambda: crc32c_many(starts, lengths)) for _ in range(_ROUNDS)]
    best = min(samples, key=lambda sample: sample.seconds)
    return {"s_per_gib": best.seconds * GIB / nbytes, "cpu_s_per_gib": best.cpu_s * GIB / nbytes}
