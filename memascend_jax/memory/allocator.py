# SPDX-License-Identifier: Apache-2.0
"""Settings of the C allocator that keep what is freed from staying resident.

glibc grows one heap per thread and raises its mmap threshold with every large block that is freed, so that XLA's
temporaries would stay resident after use. Elsewhere than on glibc these calls do nothing.
"""

from __future__ import annotations

import ctypes
from functools import cache

from memascend_jax.units import MIB

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def limit_heap_growth(kept_bytes: int = MIB) -> bool:
    """Makes blocks of ``kept_bytes`` and more mappings of their own and keeps one heap; call before threads start.

    May be called again with a larger value: smaller blocks then stay with the process when they are freed, up to four
    times ``kept_bytes`` in all, which spares the kernel from clearing their pages anew.

    Returns:
        Whether the C library took the settings.
    """
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is None:
        return False
    # A computation frees several large blocks at once: with less room the end of the heap would come and go.
    trimmed_at = kept_bytes if kept_bytes <= MIB else 4 * kept_bytes
    settings = ((_M_MMAP_THRESHOLD, kept_bytes), (_M_TRIM_THRESHOLD, trimmed_at), (_M_ARENA_MAX, 1))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def trim_heap() -> None:
    """Gives free heap pages back to the system; worth it after compilation."""
    malloc_trim = getattr(_libc(), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
