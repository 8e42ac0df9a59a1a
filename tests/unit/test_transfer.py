# SPDX-License-Identifier: Apache-2.0
"""Slots and jax arrays meet without a copy inward, with one outward, and the pool sees the readers."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from memascend_jax.errors import RunError
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.memory.pool import SizeClass, SlotPool
from memascend_jax.transfer import Transfer, make_transfer
from memascend_jax.transfer.device import DeviceTransfer

NBYTES = 1 << 20


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    made = SlotPool(PinnedArena(2 * NBYTES, pin="none"), {"w": SizeClass(NBYTES, 2)})
    yield made
    made.close()


@pytest.fixture
def transfer() -> Transfer:
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        pytest.skip("the default device is not the CPU")
    return make_transfer(device)


def test_arrays_alias_the_slot_and_hold_it_until_dropped(pool: SlotPool, transfer: Transfer) -> None:
    lease = pool.lease("w")
    lease.view(ml_dtypes.bfloat16, (64, 32), offset=128)[:] = 1.5
    array = transfer.to_device(lease, "bfloat16", (64, 32), 128)
    assert array.unsafe_buffer_pointer() == lease.address + 128
    lease.release()
    assert pool.free_count("w") == 1
    assert float(jnp.sum(array.astype(jnp.float32))) == 1.5 * 64 * 32
    del array
    assert pool.free_count("w") == 2


def test_a_slot_reused_at_once_never_disturbs_the_computation_before(
    pool: SlotPool, transfer: Transfer
) -> None:
    total = jax.jit(lambda x: jnp.tanh(x @ x).sum() + x[0, 0])
    results = []
    for step in range(40):
        lease = pool.lease("w", timeout_s=30.0)
        lease.view(np.float32, (512, 512))[:] = step
        results.append((step, total(transfer.to_device(lease, "float32", (512, 512)))))
        lease.release()
    for step, result in results:
        assert float(result) == pytest.approx(step + (512 * 512 if step else 0), rel=1e-5)


def test_copy_out_takes_any_range_of_an_array(pool: SlotPool, transfer: Transfer) -> None:
    with pool.lease("w") as lease:
        array = jnp.arange(1000, dtype=jnp.float32).reshape(10, 100)
        transfer.copy_out(array, lease.address)
        np.testing.assert_array_equal(lease.view(np.float32, (10, 100)), np.asarray(array))
        transfer.copy_out(array, lease.address, offset_bytes=400, nbytes=40)
        np.testing.assert_array_equal(lease.view(np.float32, (10,)), np.arange(100, 110))
        transfer.copy_out(array, lease.address, offset_bytes=4000, nbytes=0)
        for offset, nbytes in ((0, 4001), (3999, 2), (-4, 4)):
            with pytest.raises(ValueError, match="array of 4,000 bytes"):
                transfer.copy_out(array, lease.address, offset, nbytes)


def test_a_type_that_jax_would_convert_is_refused_not_copied(pool: SlotPool, transfer: Transfer) -> None:
    with pool.lease("w") as lease, pytest.raises(RunError, match="jax copied 'w'"):
        transfer.to_device(lease, "int64", (4,))


def test_the_way_out_of_other_devices_copies_the_same_ranges(pool: SlotPool) -> None:
    other = DeviceTransfer(jax.local_devices()[0])
    array = jnp.arange(100, dtype=jnp.bfloat16)
    with pool.lease("w") as lease:
        other.copy_out(array, lease.address, offset_bytes=20, nbytes=20)
        np.testing.assert_array_equal(
            lease.view(ml_dtypes.bfloat16, (10,)), np.arange(10, 20).astype(ml_dtypes.bfloat16)
        )
