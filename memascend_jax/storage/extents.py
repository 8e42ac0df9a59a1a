# SPDX-License-Identifier: Apache-2.0
"""The free space of a store's address space: first fit with coalescing, so that what is declared in order lies
in order and freed space is used again."""

from __future__ import annotations

from bisect import bisect_right, insort

from memascend_jax.errors import StoreError


class ExtentAllocator:
    """Hands out extents of ``[begin, end)`` in multiples of ``block_bytes``, the lowest address first."""

    def __init__(self, begin: int, end: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._free: list[tuple[int, int]] = [(begin, end)] if end > begin else []

    @property
    def free_bytes(self) -> int:
        """The bytes not handed out."""
        return sum(end - begin for begin, end in self._free)

    @property
    def largest_free_bytes(self) -> int:
        """The largest extent that can be had."""
        return max((end - begin for begin, end in self._free), default=0)

    def allocate(self, nbytes: int) -> int | None:
        """Returns the address of ``nbytes`` (a multiple of the block), or None when no free extent holds them."""
        if nbytes == 0:
            return 0
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                if end - begin == nbytes:
                    del self._free[index]
                else:
                    self._free[index] = (begin + nbytes, end)
                return begin
        return None

    def reserve(self, address: int, nbytes: int) -> None:
        """Takes exactly ``[address, address + nbytes)``, as recorded on disk.

        Raises:
            StoreError: the extent is not block aligned, outside the space, or overlaps one already taken.
        """
        if nbytes == 0:
            return
        index = bisect_right(self._free, (address, 1 << 63)) - 1
        begin, end = self._free[index] if index >= 0 else (0, 0)
        aligned = address % self._block_bytes == 0 and nbytes % self._block_bytes == 0
        if not aligned or not (begin <= address and address + nbytes <= end):
            raise StoreError(
                f"extent [{address:,}, {address + nbytes:,}) is misaligned, outside the store or overlaps another"
            )
        rest = [(b, e) for b, e in ((begin, address), (address + nbytes, end)) if e > b]
        self._free[index : index + 1] = rest

    def release(self, address: int, nbytes: int) -> None:
        """Gives ``[address, address + nbytes)`` back and joins it with its free neighbours."""
        if nbytes == 0:
            return
        begin, end = address, address + nbytes
        index = bisect_right(self._free, (begin, 1 << 63))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == begin:
            begin = self._free.pop(index - 1)[0]
        insort(self._free, (begin, end))
