# SPDX-License-Identifier: Apache-2.0
"""Slots and a device with memory of its own: what arrives is what the slot held, and the slot waits for the copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memascend_jax.memory.arena import PinnedArena
from memascend_jax.memory.pool import SizeClass, SlotPool
from memascend_jax.transfer import make_transfer

pytestmark = pytest.mark.gpu

NBYTES = 4 << 20


@pytest.fixture
def device() -> jax.Device:
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"no GPU: {error}")


def test_a_slot_reused_at_once_never_disturbs_the_copy_before(device: jax.Device) -> None:
    pool = SlotPool(PinnedArena(2 * NBYTES), {"w": SizeClass(NBYTES, 2)})
    transfer = make_transfer(device)
    arrays = []
    for step in range(20):
        lease = pool.lease("w", timeout_s=30.0)
        lease.view(np.float32, (NBYTES // 4,))[:] = step
        arrays.append(transfer.to_device(lease, "float32", (1024, 1024)))
        lease.release()
    for step, array in enumerate(arrays):
        assert array.devices() == {device}
        assert bool(jnp.all(array == step))
    pool.close()


def test_copy_out_brings_any_range_back(device: jax.Device) -> None:
    pool = SlotPool(PinnedArena(NBYTES), {"w": SizeClass(NBYTES, 1)})
    array = jax.device_put(jnp.arange(1000, dtype=jnp.bfloat16), device)
    with pool.lease("w") as lease:
        make_transfer(device).copy_out(array, lease.address, offset_bytes=20, nbytes=40)
        expected = np.asarray(array)[10:30].view(np.uint16)
        np.testing.assert_array_equal(lease.view(np.uint16, (20,)), expected)
