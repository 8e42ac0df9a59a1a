# SPDX-License-Identifier: Apache-2.0
"""How fast this machine is, found in a second or two: its disks by the store's engine, its optimizer by the kernel."""

from __future__ import annotations

import time
from functools import partial

from memascend_jax.config import Config, store_paths
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.optim.adamw import AdamW, Draws, TileMemory, UpdateScale, update_tile
from memascend_jax.optim.state_format import MASTER, MU, NU, state_format
from memascend_jax.storage.device import resolve_paths
from memascend_jax.storage.engine import native_engine
from memascend_jax.storage.speed import probe_path

#: Tiles of a million elements, more together than a processor's caches hold.
_TILE_ELEMENTS, _TILES, _ROUNDS = 1 << 20, 8, 4


def measure_bandwidth(config: Config) -> tuple[float, float]:
    """Returns the bytes per second that the run's store would read and write, all members together.

    Members hold equal shares, so the slowest one sets the pace of all. Nothing stays on the disks.

    Raises:
        StoreError: a path cannot hold a store, is in use, or refuses a read or a write.
    """
    offload = config.offload
    make_engine = partial(native_engine, backend=offload.io_backend)
    paths = resolve_paths([str(path) for path in store_paths(config)])
    rates = [probe_path(path, offload.direct_io, make_engine) for path in paths]
    return min(rate.read for rate in rates) * len(rates), min(rate.write for rate in rates) * len(rates)


def measure_update_rate() -> float:
    """Returns the parameters per second of AdamW with fp32 state, bf16 gradients and bf16 parameters."""
    n = _TILE_ELEMENTS
    arena = PinnedArena(16 * n * _TILES, pin="none")
    slot = arena.allocate(16 * n * _TILES, label="update rate")
    slot.view(0, slot.nbytes)[:] = 0
    tiles = [_tile(slot.address + 16 * n * index, n) for index in range(_TILES)]
    update = partial(
        update_tile,
        state_format("fp32", "bfloat16"),
        hyper=AdamW(),
        scale=UpdateScale(1, 1e-4, 1.0),
        draws=Draws(0),
        weight_decay=0.0,
    )
    seconds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for tile in tiles:
            update(tile)
        seconds.append(time.perf_counter() - began)
    slot.release()
    arena.close()
    return n * _TILES / min(seconds)


def _tile(address: int, n: int) -> TileMemory:
    """Three fp32 arrays and two bf16 ones, one after the other."""
    leaves = {MASTER: address, MU: address + 4 * n, NU: address + 8 * n}
    return TileMemory(param=address + 14 * n, grad=address + 12 * n, leaves=leaves, n_elements=n)
