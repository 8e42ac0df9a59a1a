# SPDX-License-Identifier: Apache-2.0
"""The arena and a GPU: registration, copies both ways by DMA and staged, and a tiny run. A minute or two in all.

``JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu -s tests/gpu`` on a machine with a GPU and jax for it; ``-s`` shows the
bandwidths.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memascend_jax.memory.arena import PinnedArena
from memascend_jax.memory.pool import SizeClass, SlotPool
from memascend_jax.observe.metrics import read_lines
from memascend_jax.transfer.device import DeviceTransfer

pytestmark = pytest.mark.gpu

NBYTES = 4 << 20
#: Large enough for a bandwidth.
LARGE = 128 << 20

Setup = tuple[DeviceTransfer, SlotPool, PinnedArena]


@pytest.fixture(scope="module")
def device() -> jax.Device:
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"no GPU: {error}")


@pytest.fixture(params=["registered", "staged"])
def setup(device: jax.Device, request: pytest.FixtureRequest) -> Iterator[Setup]:
    """A pool, and a transfer that the arena is registered with, or is not."""
    arena = PinnedArena(2 * NBYTES + 2 * LARGE)
    pool = SlotPool(arena, {"w": SizeClass(NBYTES, 2), "large": SizeClass(LARGE, 2)})
    transfer = DeviceTransfer(device, arena if request.param == "registered" else None)
    yield transfer, pool, arena
    pool.close()
    transfer.close()
    arena.close()


def test_the_whole_arena_is_registered_and_both_ways_are_straight(
    device: jax.Device, caplog: pytest.LogCaptureFixture
) -> None:
    arena = PinnedArena((1 << 30) + NBYTES)
    transfer = DeviceTransfer(device, arena)
    found = arena.statistics()
    print(f"\n{arena.describe()}")
    assert found.rung_bytes["device"] == arena.capacity_bytes, found.refusals
    assert (transfer.straight_in, transfer.straight_out) == (True, True), caplog.text
    transfer.close()
    arena.close()


def test_the_cuda_driver_alone_registers_and_lets_go(device: jax.Device) -> None:
    for _ in range(3):
        arena = PinnedArena(64 << 20, pin="device", cuda_ordinal=device.local_hardware_id)
        assert arena.pinning == "device", arena.pinning_reason
        arena.close()


def test_a_slot_reused_at_once_never_disturbs_the_copy_before(device: jax.Device, setup: Setup) -> None:
    transfer, pool, _ = setup
    arrays = []
    for step in range(20):
        lease = pool.lease("w", timeout_s=30.0)
        lease.view(np.float32, (NBYTES // 4,))[:] = step
        arrays.append(transfer.to_device(lease, "float32", (1024, 1024)))
        lease.release()
    for step, array in enumerate(arrays):
        assert array.devices() == {device}
        assert array.sharding.memory_kind == "device"
        assert bool(jnp.all(array == step))


def test_copies_overlap_computation_without_changing_it(setup: Setup) -> None:
    transfer, pool, _ = setup
    product = jax.jit(lambda x: (x @ x).sum())
    results = []
    for step in range(10):
        lease = pool.lease("w", timeout_s=30.0)
        lease.view(np.float32, (1024, 1024))[:] = step
        results.append(product(transfer.to_device(lease, "float32", (1024, 1024))))
        lease.release()
    # A slot of another step would be off by 20 % and more; the order of the sum is the device's.
    expected = [1024.0**3 * step**2 for step in range(10)]
    np.testing.assert_allclose([float(result) for result in results], expected, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32", "uint8"])
def test_every_type_arrives_and_returns(setup: Setup, dtype: str) -> None:
    transfer, pool, _ = setup
    values = np.arange(120).astype(jnp.dtype(dtype)).reshape(4, 30)
    with pool.lease("w") as lease, pool.lease("w") as back:
        lease.view(values.dtype, values.shape, offset=64)[:] = values
        array = transfer.to_device(lease, dtype, values.shape, 64)
        np.testing.assert_array_equal(np.asarray(array), values)
        transfer.copy_out(array, back.address)
        np.testing.assert_array_equal(back.view(values.dtype, values.shape), values)


def test_copy_out_brings_any_range_back(device: jax.Device, setup: Setup) -> None:
    transfer, pool, _ = setup
    array = jax.device_put(jnp.arange(1000, dtype=jnp.bfloat16), device)
    with pool.lease("w") as lease:
        lease.view(np.uint8, (NBYTES,))[:] = 255
        transfer.copy_out(array, lease.address, offset_bytes=20, nbytes=40)
        expected = np.asarray(array)[10:30].view(np.uint16)
        np.testing.assert_array_equal(lease.view(np.uint16, (20,)), expected)
        assert lease.view(np.uint8, (1,), offset=40)[0] == 255


def test_large_copies_are_exact_and_their_bandwidth_is_shown(setup: Setup) -> None:
    transfer, pool, arena = setup
    with pool.lease("large") as lease, pool.lease("large") as back:
        numbers = lease.view(np.uint32, (LARGE // 4,))
        numbers[:] = np.arange(LARGE // 4, dtype=np.uint32)
        way_in = _fastest(lambda: transfer.to_device(lease, "uint32", (LARGE // 4,)).block_until_ready())
        array = transfer.to_device(lease, "uint32", (LARGE // 4,)) + jnp.uint32(1)
        array.block_until_ready()
        way_out = _fastest(lambda: transfer.copy_out(array, back.address))
        assert (back.view(np.uint32, (LARGE // 4,)) == numbers + np.uint32(1)).all()
        print(
            f"\n{arena.pinning}: to the device {LARGE / way_in / 1e9:.1f} GB/s, from it {LARGE / way_out / 1e9:.1f}"
        )


def _fastest(copy: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of five copies. A staged way out is kept by jax, and then nearly free."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        copy()
        times.append(time.perf_counter() - began)
    return min(times)


def test_a_tiny_run_trains_on_the_gpu_as_on_the_cpu(device: jax.Device, tmp_path: Path) -> None:
    losses = {}
    for platform in ("cuda", "cpu"):
        folder = tmp_path / platform
        command = [
            *(sys.executable, "-m", "memascend_jax.recipes.llama_finetune", "--config", "tiny_random"),
            *(f"run.dir={folder}", "offload.direct_io=optional", "train.steps=8"),
        ]
        # This process has taken most of the device's memory already.
        environment = os.environ | {"JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, done.stderr
        print(*(line for line in done.stdout.splitlines() if line.startswith("arena:")), sep="\n")
        losses[platform] = [line["loss"] for line in read_lines(folder / "metrics.jsonl")]
    assert len(losses["cuda"]) == 8
    # Matrix products in bf16 are summed in another order.
    np.testing.assert_allclose(losses["cuda"], losses["cpu"], rtol=0.02)
