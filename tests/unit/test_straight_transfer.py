# SPDX-License-Identifier: Apache-2.0
"""The arena registered with a device: which copies go straight, which are staged, and in which order all is undone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from stand_in import StandIn, build_stand_in

from memascend_jax.memory.arena import PinnedArena
from memascend_jax.transfer import registration
from memascend_jax.transfer.registration import BY_RUNTIME, Registration

PAGE = 65536

#: A pool of one slot in each of two regions, and a transfer to the CPU as if it had memory of its own.
SETUP = f"""
import logging
logging.basicConfig(format="%(message)s")
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import SingleDeviceSharding
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.memory.pool import SizeClass, SlotPool
from memascend_jax.transfer.device import DeviceTransfer
arena = PinnedArena({2 * PAGE}, pin="none", region_bytes={PAGE})
pool = SlotPool(arena, {{"w": SizeClass({PAGE}, 2)}})
device = jax.devices()[0]
"""

OUT = """
transfer = DeviceTransfer(device, arena)
lease = pool.lease("w")
transfer.copy_out(jnp.arange(1000, dtype=jnp.float32), lease.address, offset_bytes=400, nbytes=800)
assert (lease.view(np.float32, (200,)) == np.arange(100, 300)).all()
lease.view(np.float32, (200,))[:] = 7
assert float(transfer.to_device(lease, "float32", (200,)).sum()) == 1400
print(transfer.straight_in, transfer.straight_out, arena.pinning, lease.address)
lease.release()
"""

END = """
pool.close()
transfer.close()
arena.close()
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return build_stand_in(tmp_path_factory.mktemp("cuda"))


def test_arrays_land_in_registered_slots_past_the_runtime(driver: StandIn) -> None:
    straight_in, straight_out, pinning, address = driver.run(SETUP + OUT + END).split()
    # This jax has no CUDA, so it cannot import pinned memory: the way in was tried, and is staged.
    assert (straight_in, straight_out, pinning) == ("False", "True", "device")
    copies = [(call.address, call.nbytes) for call in driver.calls("copy")]
    assert copies[-1] == (int(address), 800)
    registered, undone = driver.calls("register"), driver.calls("unregister")
    assert sorted(call.address for call in registered) == sorted(call.address for call in undone)
    assert {call.result for call in [*registered, *undone]} == {0}


@pytest.mark.parametrize(
    ("refuse", "pinning", "copies"),
    [("init", "pageable", 0), ("memory", "pageable", 0), ("copy", "device", 1)],
)
def test_what_does_not_work_is_staged(driver: StandIn, refuse: str, pinning: str, copies: int) -> None:
    _, straight_out, reached, _ = driver.run(SETUP + OUT + END, refuse=refuse).split()
    assert (straight_out, reached) == ("False", pinning)
    # The one that was refused is the trial.
    assert len(driver.calls("copy")) == copies


def test_slots_in_regions_that_were_refused_are_staged(driver: StandIn) -> None:
    code = """
transfer = DeviceTransfer(device, arena)
for lease in (pool.lease("w"), pool.lease("w")):
    transfer.copy_out(jnp.arange(8, dtype=jnp.int32), lease.address)
    assert (lease.view(np.int32, (8,)) == np.arange(8)).all()
    lease.release()
"""
    driver.run(SETUP + code + END, refuse="piece:0")
    refused, held = driver.calls("register")[:2]
    assert (refused.result, held.result) == (2, 0)
    assert [call.address for call in driver.calls("copy") if call.nbytes == 32] == [held.address]


def test_the_slot_is_offered_as_pinned_memory_and_read_until_the_copy_ends(driver: StandIn) -> None:
    code = """
kept = []
def import_pinned(export):
    assert export.__dlpack_device__() == (3, 0)
    if current.class_name == "w":
        kept.append(export)
    source = np.array(np.from_dlpack(current.slot.dlpack("float32", (1024,))))
    return jax.device_put(source, SingleDeviceSharding(device, memory_kind="pinned_host"))
class Probe(SlotPool):
    def lease(self, *args, **kwargs):
        global current
        current = super().lease(*args, **kwargs)
        return current
import memascend_jax.transfer.straight as straight
straight.SlotPool, jax.dlpack.from_dlpack = Probe, import_pinned
transfer = DeviceTransfer(device, arena)
current = pool.lease("w")
current.view(np.float32, (1024,))[:] = np.arange(1024)
array = transfer.to_device(current, "float32", (1024,))
assert (np.asarray(array) == np.arange(1024)).all()
assert array.sharding.memory_kind == "device"
current.release()
print(transfer.straight_in, len(kept), pool.free_count("w"))
kept.clear()
print(pool.free_count("w"))
"""
    assert driver.run(SETUP + code + END).split() == ["True", "1", "1", "2"]


class _Client:
    """A runtime that maps memory for DMA, all but the region numbered ``refused``."""

    def __init__(self, refused: int | None = None) -> None:
        self.refused = refused
        self.calls: list[tuple[str, int]] = []

    def dma_map(self, address: int, nbytes: int) -> None:
        if self.refused == len(self.calls):
            self.calls.append(("refuse", address))
            raise RuntimeError("RESOURCE_EXHAUSTED: no")
        self.calls.append(("map", address))

    def dma_unmap(self, address: int) -> None:
        self.calls.append(("unmap", address))


def _register(arena: PinnedArena, client: _Client, monkeypatch: pytest.MonkeyPatch) -> Registration:
    def no_driver(ordinal: int) -> None:
        raise RuntimeError(f"no driver for device {ordinal}")

    monkeypatch.setattr(registration, "_core", SimpleNamespace(CudaDriver=no_driver))
    return Registration(arena, SimpleNamespace(client=client, local_hardware_id=3))


def test_the_runtime_maps_region_by_region_and_unmaps_before_the_arena_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = _Client(refused=1)
    arena = PinnedArena(3 * PAGE, pin="none", region_bytes=PAGE)
    held = _register(arena, client, monkeypatch)
    addresses = [address for address, _ in arena.regions()]
    assert client.calls == list(zip(("map", "refuse", "map"), addresses, strict=True))
    found = arena.statistics()
    assert found.rung_bytes == {"device": 2 * PAGE, "mlock": 0, "pageable": PAGE}
    assert found.registered_by == (BY_RUNTIME,)
    reasons = [refusal.reason for refusal in found.refusals if refusal.rung == "device"]
    assert reasons == ["the runtime maps no memory for DMA: RESOURCE_EXHAUSTED: no", "no driver for device 3"]
    assert held.holds(addresses[0], PAGE)
    assert not held.holds(addresses[0], PAGE + 1)
    assert not held.holds(addresses[1], 1)
    assert not held.holds(addresses[2], 0)
    with pytest.raises(RuntimeError, match="undo that first"):
        arena.close()
    held.close()
    held.close()
    assert client.calls[3:] == [("unmap", addresses[0]), ("unmap", addresses[2])]
    assert not held.holds(addresses[0], 1)
    arena.close()


def test_a_registration_that_is_dropped_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _Client()
    arena = PinnedArena(PAGE, pin="none")
    held = _register(arena, client, monkeypatch)
    address = arena.regions()[0][0]
    del held
    assert client.calls == [("map", address), ("unmap", address)]
    arena.close()
