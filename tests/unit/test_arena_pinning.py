# SPDX-License-Identifier: Apache-2.0
"""The pinning ladder: what each rung takes and refuses, that nothing is lost with one refusal, and how it is undone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from stand_in import ROOT, StandIn, build_stand_in

from memascend_jax._native import _core
from memascend_jax.memory.arena import PinnedArena, Refusal
from memascend_jax.memory.huge_pages import huge_page_bytes
from memascend_jax.units import MIB

REGION = 4 * MIB

#: An arena of three regions, the last of them smaller, on the first rung that takes it.
ARENA = f"""
from memascend_jax.memory.arena import PinnedArena
arena = PinnedArena({2 * REGION + MIB}, pin='device', region_bytes={REGION})
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return build_stand_in(tmp_path_factory.mktemp("cuda"))


def _may_lock(nbytes: int) -> bool:
    return PinnedArena(nbytes).pinning == "mlock"


def test_every_region_is_registered_and_let_go_before_the_memory_is(driver: StandIn) -> None:
    out = driver.run(
        ARENA + "print(arena.describe())\nprint(arena.regions())\narena.close()\nprint(arena.pinning)"
    )
    described, regions, closed = out.splitlines()
    assert "9.00 MiB" in described
    assert described.endswith("registered by CUDA driver")
    assert closed == "pageable"
    registered = driver.calls("register")
    assert [(call.address, call.nbytes) for call in registered] == eval(regions)
    assert [call.nbytes for call in registered] == [REGION, REGION, MIB]
    undone = driver.calls("unregister")
    assert [call.address for call in undone] == [call.address for call in registered]
    # The stand-in fails an unregistration of memory that is not mapped any more.
    assert {call.result for call in [*registered, *undone]} == {0}
    assert [call.name for call in driver.calls()][-4:] == ["unregister"] * 3 + ["release"]


def test_one_refusal_costs_one_region(driver: StandIn) -> None:
    out = driver.run(
        ARENA + "print(arena.pinning)\nprint(arena.statistics())\narena.close()", refuse="piece:1"
    )
    pinning, statistics = out.splitlines()
    reason = f"cannot register {REGION:,} bytes with the CUDA driver: CUDA_ERROR_OUT_OF_MEMORY (2)"
    assert str(Refusal("device", REGION, reason)) in statistics
    lower = "mlock" if _may_lock(REGION) else "pageable"
    assert pinning == lower
    assert f"'device': {REGION + MIB}" in statistics
    assert f"'{lower}': {REGION}" in statistics
    assert len(driver.calls("unregister")) == 2


@pytest.mark.parametrize(
    ("refuse", "reason"),
    [
        ("init", "cannot initialise the CUDA driver: CUDA_ERROR_NO_DEVICE (100)"),
        ("memory", "with the CUDA driver: CUDA_ERROR_OUT_OF_MEMORY (2)"),
    ],
)
def test_without_the_device_the_next_rung_is_taken_and_the_reason_told(
    driver: StandIn, refuse: str, reason: str
) -> None:
    pinning, why, described, largest = driver.run(
        ARENA + "print(arena.pinning)\nprint(arena.pinning_reason)\nprint(arena.describe())\n"
        "print(arena.largest_free_bytes)\narena.close()",
        refuse=refuse,
    ).splitlines()
    if _may_lock(REGION):
        assert pinning == "mlock"
        assert reason in why
        assert reason in described
    else:
        assert pinning == "pageable"
    assert largest == str(2 * REGION + MIB)
    assert driver.calls("unregister") == []


def test_a_machine_without_a_driver_is_told_so(tmp_path: Path) -> None:
    code = "from memascend_jax.memory.arena import PinnedArena as A; print(A(1, pin='device').pinning_reason)"
    empty = tmp_path / "libcuda.so.1"
    empty.write_bytes(b"not a library")
    out = StandIn(tmp_path).run(code)
    assert "no CUDA driver: " in out
    assert "libcuda.so.1" in out


def test_memory_stays_registered_until_the_last_reader_is_gone(driver: StandIn) -> None:
    out = driver.run(
        ARENA
        + """
import os, numpy as np
def undone():
    with open(os.environ["CUDA_STAND_IN_LOG"]) as log:
        return log.read().count("unregister")
slot = arena.allocate(100)
read = np.from_dlpack(slot.dlpack("uint8", (100,)))
try:
    arena.close()
except RuntimeError as error:
    print("outstanding" in str(error), undone())
del arena, slot
print(undone())
read.sum()
del read
print(undone())
"""
    )
    assert out.split() == ["True", "0", "0", "3"]


def test_copies_from_the_device_land_in_the_slot_and_failures_are_named(driver: StandIn) -> None:
    code = (
        ARENA
        + """
import numpy as np
from memascend_jax._native import _core
cuda = _core.CudaDriver(0)
slot = arena.allocate(1000)
source = np.arange(1000, dtype=np.uint8)
try:
    cuda.copy_to_host(slot.address + 100, source.ctypes.data + 10, 500)
    print((slot.view(100, 500) == source[10:510]).all(), slot.view(99, 1)[0], slot.view(600, 1)[0])
except RuntimeError as error:
    print(error)
"""
    )
    assert driver.run(code).split() == ["True", "0", "0"]
    assert "cannot copy 500 bytes from the CUDA device: CUDA_ERROR_INVALID_VALUE (1)" in driver.run(
        code, refuse="copy"
    )


def test_a_region_registered_by_somebody_else_must_be_let_go_by_them() -> None:
    arena = PinnedArena(2 * REGION, pin="none", region_bytes=REGION)
    arena.note_registered(1, "the runtime")
    assert arena.statistics().rung_bytes == {"device": REGION, "mlock": 0, "pageable": REGION}
    with pytest.raises(RuntimeError, match="registered with a device; undo that first"):
        arena.close()
    with pytest.raises(RuntimeError, match="region 1 is registered by the runtime already"):
        arena.note_registered(1, "another")
    with pytest.raises(RuntimeError, match="region 0 is not registered elsewhere"):
        arena.note_unregistered(0)
    with pytest.raises(IndexError):
        arena.note_registered(2, "the runtime")
    arena.note_unregistered(1)
    arena.close()


def test_no_more_is_locked_than_there_is_room_for() -> None:
    if not _may_lock(64 * MIB):
        pytest.skip("64 MiB may not be locked here")
    arena = PinnedArena(160 * MIB, region_bytes=128 * MIB, lockable_bytes=100 * MIB)
    found = arena.statistics()
    # 64 MiB fit, the next 64 do not, the last 32 do again.
    assert found.rung_bytes == {"device": 0, "mlock": 96 * MIB, "pageable": 64 * MIB}
    assert [(refusal.rung, refusal.nbytes) for refusal in found.refusals] == [("mlock", 64 * MIB)]
    assert f"has room for {36 * MIB:,} bytes" in found.refusals[0].reason
    assert arena.pinning == "pageable"
    assert "96.00 MiB mlock, 64.00 MiB pageable (cannot lock" in arena.describe()


_UNPRIVILEGED = """
import os, resource
from memascend_jax.memory.arena import PinnedArena
import numpy  # and what else is loaded late: it may not be readable for the other user
PinnedArena({region}).describe()
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit}, {limit}))
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
arena = PinnedArena({nbytes}, region_bytes={region})
found = arena.statistics()
print(found.rung_bytes["mlock"], found.rung_bytes["pageable"])
print(arena.describe())
arena.allocate({nbytes}).view(0, {nbytes})[:] = 1
"""


# Small, since limits can be lowered everywhere and raised by few: systems without a setting start at 64 KiB to 8 MiB.
@pytest.mark.parametrize(("limit", "locked_regions"), [(1000, 0), (20_000, 1), (60_000, 3)])
def test_an_ordinary_user_locks_what_the_limit_allows_and_reads_the_remedy(
    limit: int, locked_regions: int
) -> None:
    page = _core.page_bytes()
    if page > 4096:
        pytest.skip(f"the limits of this test are of pages of 4,096 bytes, here they have {page:,}")
    region, nbytes = 4 * page, 12 * page
    done = subprocess.run(
        [sys.executable, "-c", _UNPRIVILEGED.format(limit=limit, nbytes=nbytes, region=region)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    amounts, described = done.stdout.splitlines()
    assert amounts == f"{locked_regions * region} {nbytes - locked_regions * region}"
    if locked_regions < 3:
        assert f"the limit of locked memory is {limit:,} bytes" in described
        for remedy in ("ulimit -l", "LimitMEMLOCK=", "--ulimit memlock=-1"):
            assert remedy in described
    else:
        assert described == "arena: 48.00 KiB, mlock"


def test_huge_pages_are_counted_inside_the_range_only(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "1000-400000 rw-p 00000000 00:00 0 \nSize: 4092 kB\nAnonHugePages:      2048 kB\nVmFlags: rd wr hg\n"
        "400000-c00000 rw-p 00000000 00:00 0 [heap]\nAnonHugePages:      6144 kB\n"
        "7f0000000000-7f0000200000 r--p 00000000 08:01 42 /lib/x\nAnonHugePages:         0 kB\n"
    )
    assert huge_page_bytes(0x400000, 0x800000, smaps) == 6 * MIB
    assert huge_page_bytes(0x400000, 0x200000, smaps) == 2 * MIB
    assert huge_page_bytes(0x1000, 0xBFF000, smaps) == 8 * MIB
    assert huge_page_bytes(0x7F0000000000, 0x200000, smaps) == 0
    assert huge_page_bytes(0, 1, tmp_path / "absent") is None


def test_touched_memory_lies_in_huge_pages_where_the_kernel_gives_them() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("the kernel gives no huge pages")
    arena = PinnedArena(8 * MIB, pin="none")
    assert arena.statistics().huge_bytes == 0
    assert "huge" not in arena.describe()
    arena.allocate(8 * MIB).view(0, 8 * MIB)[:] = 1
    if not arena.statistics().huge_bytes:
        pytest.skip("the kernel has no huge page free")
    small = PinnedArena(8 * MIB, pin="none", huge_pages=False)
    small.allocate(8 * MIB).view(0, 8 * MIB)[:] = 1
    if "[always]" not in enabled.read_text():
        assert small.statistics().huge_bytes == 0
    assert "huge pages" in arena.describe()


@pytest.mark.parametrize("page", [4096, 16384, 65536])
def test_sizes_are_whole_pages_whatever_a_page_is(page: int) -> None:
    if page % _core.page_bytes():
        pytest.skip(f"the system's pages are larger: {_core.page_bytes():,} bytes")
    arena = PinnedArena(9 * page + 1, pin="none", page_bytes=page)
    assert (arena.capacity_bytes, arena.page_bytes) == (10 * page, page)
    slots = [arena.allocate(nbytes) for nbytes in (1, page, page + 1)]
    assert [(slot.address - slots[0].address) // page for slot in slots] == [0, 1, 2]
    assert arena.in_use_bytes == 4 * page
    slots[1].release()
    assert arena.statistics().fragmentation == pytest.approx(1 / 7)


@pytest.mark.parametrize("page", [3 * 4096, 4096 - 512, 4 * MIB])
def test_an_odd_page_size_is_refused(page: int) -> None:
    with pytest.raises(ValueError, match="page_bytes must be a power of two"):
        PinnedArena(MIB, page_bytes=page)


@pytest.mark.parametrize("region", [0, 1000, 2 << 30])
def test_regions_are_whole_pages_of_at_most_one_gib(region: int) -> None:
    with pytest.raises(ValueError, match="region_bytes must be whole pages"):
        PinnedArena(MIB, region_bytes=region)
