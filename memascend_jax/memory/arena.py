# SPDX-License-Identifier: Apache-2.0
"""The only owner of pinned memory. The lender is ``memory.pool``; the code is native (``PinnedArena`` in native/)."""

from __future__ import annotations

from memascend_jax._native._core import PinnedArena, Slot

__all__ = ["PinnedArena", "Slot"]
