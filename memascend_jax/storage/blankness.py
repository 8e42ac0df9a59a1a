# SPDX-License-Identifier: Apache-2.0
"""Whether anything but zeros is on a device or in a file: the whole of a small one, samples of a large one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from memascend_jax.storage.engine import aligned_buffer
from memascend_jax.storage.store_errors import StoreIOError
from memascend_jax.units import GIB, KIB, MIB

#: Up to this size every byte is read: about a second on an SSD.
WHOLE_BYTES = GIB
END_BYTES = 16 * MIB
SAMPLE_BYTES = 64 * KIB
SAMPLES = 2048
_READ_BYTES = 4 * MIB
#: Direct reads begin at a multiple of it, whatever the sector.
_ALIGNMENT = 4 * KIB


def extents_looked_at(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields what is read of ``nbytes``, as (begin, end) in ascending order; beginnings are multiples of 4 KiB."""
    if nbytes <= WHOLE_BYTES:
        yield 0, nbytes
        return
    yield 0, END_BYTES
    tail = (nbytes - END_BYTES) // _ALIGNMENT * _ALIGNMENT
    room = tail - END_BYTES - SAMPLE_BYTES
    for sample in range(SAMPLES):
        begin = END_BYTES + room * sample // (SAMPLES - 1) // _ALIGNMENT * _ALIGNMENT
        yield begin, begin + SAMPLE_BYTES
    yield tail, nbytes


def looked_at(nbytes: int) -> str:
    """Returns in words what ``extents_looked_at`` covers."""
    if nbytes <= WHOLE_BYTES:
        return "all of it"
    return f"its first and last {END_BYTES // MIB} MiB and {SAMPLES:,} samples of {SAMPLE_BYTES // KIB} KiB"


def first_nonzero(path: str, fd: int, nbytes: int) -> int | None:
    """Returns the offset of the first byte that is not zero where it is looked, or None when all are.

    Reads ``fd`` past the page cache when it was opened so; else the pages are dropped again.

    Raises:
        StoreIOError: a read fails.
    """
    into = aligned_buffer(_READ_BYTES)
    for begin, end in extents_looked_at(nbytes):
        for offset in range(begin, end, _READ_BYTES):
            got = _read(path, fd, into, offset, min(end - offset, _READ_BYTES))
            if into[:got].any():
                return offset + int(np.flatnonzero(into[:got])[0])
    return None


def _read(path: str, fd: int, into: npt.NDArray[np.uint8], offset: int, wanted: int) -> int:
    """Returns how many of the ``wanted`` bytes at ``offset`` were read: fewer only at the end."""
    # A length that is no multiple of a sector ends a file, whose rest reads as nothing.
    room = -(-wanted // _ALIGNMENT) * _ALIGNMENT
    got = 0
    try:
        while got < wanted:
            more = os.preadv(fd, [into[got:room].data], offset + got)
            step = more if got + more >= wanted else more // _ALIGNMENT * _ALIGNMENT
            if step == 0:
                break
            got += step
        os.posix_fadvise(fd, offset, room, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise StoreIOError.of("read", path, error, "check the device") from error
    return min(got, wanted)
