# SPDX-License-Identifier: Apache-2.0
"""What tests of the store share: memory fit for direct I/O, engines to run over, and loop devices."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memascend_jax._native import _core
from memascend_jax.dtypes import to_dtype
from memascend_jax.storage.engine import address_of, aligned_buffer
from memascend_jax.storage.options import IoArguments
from memascend_jax.storage.tensor_store import TensorStore

#: ``optional``: where the temporary folder is a tmpfs, tests run through the page cache.
ANY_DISK: IoArguments = {"direct_io": "optional"}


def backend_arguments(name: str) -> IoArguments:
    """Returns the I/O arguments for backend ``name``; skips the test where the kernel forbids it."""
    if name == "io_uring":
        try:
            engine = _core.IoEngine([os.open("/dev/null", os.O_RDONLY)], backend="io_uring")
        except (OSError, RuntimeError) as error:
            pytest.skip(f"io_uring is not available here: {error}")
        engine.close()
    return {"direct_io": "optional", "io_backend": name}  # type: ignore[typeddict-item]


def slot(values: np.ndarray | int, block_bytes: int = 4096) -> np.ndarray:
    """Returns aligned memory that holds ``values`` (or as many zero bytes), with room up to the block."""
    raw = np.zeros(values, np.uint8) if isinstance(values, int) else np.ascontiguousarray(values).reshape(-1)
    data = raw.view(np.uint8)
    memory = aligned_buffer(max(-(-len(data) // block_bytes), 1) * block_bytes)
    memory[: len(data)] = data
    return memory


def write(store: TensorStore, name: str, tile: int, values: np.ndarray) -> None:
    """Writes one tile through a batch and waits."""
    memory = slot(values, store.block_bytes)
    batch = store.batch()
    batch.write_tile(name, tile, address_of(memory))
    batch.submit(memory).wait()


def read(store: TensorStore, name: str, start: int = 0, count: int | None = None) -> np.ndarray:
    """Reads elements through a batch and returns them."""
    spec = store.spec(name)
    elements = int(np.prod(spec.shape)) - start if count is None else count
    memory = aligned_buffer(max(store.slot_bytes(elements, spec.dtype), 1))
    batch = store.batch()
    batch.read(name, address_of(memory), start, count)
    batch.submit(memory).wait()
    dtype = to_dtype(spec.dtype)
    return memory[: elements * dtype.itemsize].view(dtype)


def abandon(store: TensorStore) -> None:
    """Leaves ``store`` as a killed process would: nothing more is written, the locks are gone."""
    store._volume.close()


@contextlib.contextmanager
def loop_device(image: Path, nbytes: int, *, sector: int = 512) -> Iterator[str]:
    """Yields a block device over a new file, without partitions; skips the test without root or loop devices."""
    if os.geteuid() != 0 or shutil.which("losetup") is None:
        pytest.skip("loop devices need root and losetup")
    with image.open("wb") as file:
        file.truncate(nbytes)
    command = ["losetup", "-f", "--show", "--direct-io=on", "-b", str(sector), str(image)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no loop device: {done.stderr.strip()}")
    device = done.stdout.strip()
    held = os.open(device, os.O_RDONLY)
    try:
        # The kernel detaches it at the last close, even when this process is killed.
        subprocess.run(["losetup", "-d", device], check=True)
        _drop_partitions(device)
        yield device
    finally:
        os.close(held)


def _drop_partitions(device: str) -> None:
    """Removes what a killed session left: the kernel keeps the partitions of a detached device."""
    name = Path(device).name
    for left in Path("/sys/block", name).glob(f"{name}p*/partition"):
        subprocess.run(["delpart", device, left.read_text().strip()], check=True)


@contextlib.contextmanager
def mounted(device: str, folder: Path, *options: str) -> Iterator[Path]:
    """Yields ``folder`` with ``device`` mounted on it; skips the test where that is not allowed."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", *options, device, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    # It unmounts when the pipe closes, even when this process is killed: a mount would keep its device for ever.
    unmount = 'read -r _; umount "$0" || umount -l "$0"'
    with subprocess.Popen(
        ["sh", "-c", unmount, str(folder)], stdin=subprocess.PIPE, start_new_session=True
    ) as guard:
        assert guard.stdin is not None
        try:
            yield folder
        finally:
            guard.stdin.close()
            guard.wait()
