# SPDX-License-Identifier: Apache-2.0
"""The arena and its slots as Python and jax see them; the core itself is tested in native/tests."""

from __future__ import annotations

import gc
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from memascend_jax.memory.arena import PinnedArena

PAGE = 4096


@pytest.fixture
def arena() -> PinnedArena:
    return PinnedArena(64 * PAGE, pin="none")


def test_a_full_arena_raises_memory_error_with_the_numbers(arena: PinnedArena) -> None:
    with pytest.raises(MemoryError, match=r"slot 'big' of 262,145 bytes: the arena of 262,144 bytes"):
        arena.allocate(64 * PAGE + 1, "big")


def test_the_pinning_reached_is_reported() -> None:
    assert (PinnedArena(PAGE, pin="none").pinning, PinnedArena(PAGE, pin="none").pinning_reason) == (
        "pageable",
        "not asked for",
    )
    automatic = PinnedArena(PAGE)
    assert automatic.pinning == "mlock" or "cannot lock" in automatic.pinning_reason
    with pytest.raises(ValueError, match="auto, device, mlock or none"):
        PinnedArena(PAGE, pin="cuda")


def test_the_buffer_of_a_slot_is_its_memory(arena: PinnedArena) -> None:
    slot = arena.allocate(100)
    memoryview(slot)[99] = 7
    assert np.frombuffer(slot, np.uint8)[99] == 7
    assert slot.view(99, 1)[0] == 7
    assert slot.view(0, 100).ctypes.data == slot.address
    with pytest.raises(IndexError, match="leaves slot"):
        slot.view(99, 2)


def test_a_view_keeps_the_slot_allocated_and_outlives_the_arena(arena: PinnedArena) -> None:
    view = arena.allocate(PAGE).view(0, PAGE)
    assert arena.in_use_bytes == PAGE
    view[:] = 3
    del arena
    gc.collect()
    assert int(view.sum()) == 3 * PAGE


def test_a_released_slot_says_so(arena: PinnedArena) -> None:
    slot = arena.allocate(PAGE, "old")
    slot.release()
    with pytest.raises(RuntimeError, match="slot 'old' is released"):
        slot.view(0, 1)


def test_jax_reads_bfloat16_in_place_and_is_counted(arena: PinnedArena) -> None:
    slot = arena.allocate(4 * PAGE, "w")
    values = slot.view(PAGE, 2 * 512).view(ml_dtypes.bfloat16)
    values[:] = np.arange(512)
    array = jax.dlpack.from_dlpack(slot.dlpack("bfloat16", (16, 32), PAGE))
    assert array.dtype == jnp.bfloat16
    assert array.unsafe_buffer_pointer() == slot.address + PAGE
    assert slot.readers == 1
    with pytest.raises(RuntimeError, match=r"1 reader\(s\)"):
        slot.release()
    np.testing.assert_array_equal(np.asarray(array, np.float32).ravel(), np.asarray(values, np.float32))
    del array
    assert slot.wait_no_readers(10.0)
    slot.release()


def test_a_computation_in_flight_keeps_the_reader_after_its_input_is_dropped(arena: PinnedArena) -> None:
    slot = arena.allocate(16 * PAGE)
    slot.view(0, slot.nbytes).view(np.float32)[:] = 1.0
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 3000, lambda _, y: jnp.tanh(y @ x), x))
    array = jax.dlpack.from_dlpack(slot.dlpack("float32", (128, 128)))
    slow(array).block_until_ready()
    result = slow(array)
    del array
    readers_while_running = slot.readers
    result.block_until_ready()
    assert slot.wait_no_readers(10.0)
    assert readers_while_running in (0, 1)  # 0 when the loop was faster than we looked


def test_numpy_takes_the_versioned_capsule(arena: PinnedArena) -> None:
    slot = arena.allocate(PAGE)
    export = slot.dlpack("int32", (8,))
    array = np.from_dlpack(export)
    assert (array.ctypes.data, array.shape) == (slot.address, (8,))
    assert export.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError, match="never copied"):
        export.__dlpack__(copy=True)


def test_an_unused_capsule_leaves_no_reader(arena: PinnedArena) -> None:
    slot = arena.allocate(PAGE)
    capsule = slot.dlpack("uint8", (1,)).__dlpack__()
    assert slot.readers == 1
    del capsule
    assert slot.readers == 0


def test_arrays_that_live_until_exit_do_not_crash_it() -> None:
    code = (
        "import jax, jax.numpy as jnp\n"
        "from memascend_jax.memory.arena import PinnedArena\n"
        "slot = PinnedArena(1 << 20, pin='none').allocate(1 << 20)\n"
        "kept = jax.dlpack.from_dlpack(slot.dlpack('float32', (256, 256)))\n"
        "pending = jax.jit(lambda x: x @ x @ x)(kept)\n"
        "print('done')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr
