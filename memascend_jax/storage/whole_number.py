# SPDX-License-Identifier: Apache-2.0
"""Whole numbers from a caller: exact, within what the format can keep, and named when they are neither."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TypeVar

from memascend_jax.errors import StoreError

#: The format keeps sizes as signed 64-bit integers.
MAX_WHOLE_NUMBER = (1 << 63) - 1
#: The least, where what may be is checked by those who know what it is.
ANY_SIZE = -MAX_WHOLE_NUMBER

_Item = TypeVar("_Item")


def whole_number(value: object, what: str, least: int = 0, most: int = MAX_WHOLE_NUMBER) -> int:
    """Returns ``value`` as an int, whatever integer type (NumPy's too) it has.

    Raises:
        StoreError: not an integer (1024.0 is not one), or outside ``[least, most]``; ``what`` begins the message.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise StoreError(f"{what} must be a whole number, got {value!r} ({type(value).__name__})") from None
    if not least <= number <= most:
        raise StoreError(f"{what} must be from {least:,} to {most:,}, got {number:,}")
    return number


def listed(values: Iterable[_Item], what: str, wanted: str) -> list[_Item]:
    """Returns ``values`` as a list; raises ``StoreError`` when they are no sequence: ``what`` must be ``wanted``."""
    if not isinstance(values, (str, bytes)):
        try:
            return list(values)
        except TypeError:
            pass
    raise StoreError(f"{what} must be {wanted}, got {values!r} ({type(values).__name__})")
