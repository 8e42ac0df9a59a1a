# SPDX-License-Identifier: Apache-2.0
"""What is mapped for what is asked: exact pages as the arena does, and the two ways that it replaces. Pure.

Source: MemAscend (arXiv 2505.23254), which finds pinned memory rounded to powers of two, and a pool whose every buffer
is as large as the largest tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

PAGE_BYTES = 4096


def exact_bytes(sizes: Sequence[int], page_bytes: int = PAGE_BYTES) -> int:
    """Returns what an arena maps for one slot of each of ``sizes``: whole pages."""
    return sum(-(-size // page_bytes) * page_bytes for size in sizes)


def power_of_two_bytes(sizes: Sequence[int]) -> int:
    """Returns what an allocator maps that rounds each of ``sizes`` to a power of two, as caching host allocators do."""
    return sum(1 << (size - 1).bit_length() for size in sizes)


def one_size_bytes(sizes: Sequence[int]) -> int:
    """Returns what a pool maps whose buffers all hold the largest of ``sizes``."""
    return len(sizes) * max(sizes)
