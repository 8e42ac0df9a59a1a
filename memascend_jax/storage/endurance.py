# SPDX-License-Identifier: Apache-2.0
"""How much of its drives' rated writes a store has used, and how long they last at its pace. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from memascend_jax.errors import StoreError

_TERABYTE = 1e12
_DAY_S = 86_400.0


def expected_life(
    facts: Mapping[str, Any], rated_tbw: Sequence[float], now_s: float | None = None
) -> list[dict[str, Any]]:
    """Returns for each member what it has written, the part of its rating, and the days left at this pace.

    What other programs and earlier stores wrote to a drive is not known here. A member's share of the store's
    writes is taken by its weight. The pace is that since the store was created; no days are given in its first hour.

    Args:
        facts: as ``TensorStore.inspect`` returns them.
        rated_tbw: terabytes (10^12 bytes) that the maker promises, one for all members or one for each.

    Raises:
        StoreError: another count of ratings, or one that is not positive.
    """
    members = facts["members"]
    ratings = list(rated_tbw) * len(members) if len(rated_tbw) == 1 else list(rated_tbw)
    if len(ratings) != len(members) or not all(0 < rating < float("inf") for rating in ratings):
        raise StoreError(
            f"rated TBW must be one positive number, or one for each of the {len(members)} members, got "
            f"{list(rated_tbw)}"
        )
    age_s = (time.time() if now_s is None else now_s) - facts["created_s"]
    shares = sum(member["weight"] for member in members)
    found = []
    for member, rating in zip(members, ratings, strict=True):
        written = facts["bytes_written"] * member["weight"] / shares
        left = max(rating * _TERABYTE - written, 0.0)
        known = age_s >= 3600 and written > 0
        found.append(
            {
                "path": member["path"],
                "bytes_written": round(written),
                "rated_bytes": rating * _TERABYTE,
                "used": written / (rating * _TERABYTE),
                "bytes_per_day": written / age_s * _DAY_S if known else None,
                "days_left": left / written * age_s / _DAY_S if known else None,
            }
        )
    return found
