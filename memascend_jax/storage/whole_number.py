# SPDX-License-Identifier: Apache-2.0
"""Whole numbers from a caller: exact, within what the format can keep, and named when they are neither."""

from __future__ import annotations

import operator

from memascend_jax.errors import StoreError

#: The format keeps sizes as signed 64-bit integers.
MAX_WHOLE_NUMBER = (1 << 63) - 1


def whole_number(value: object, what: str, least: int = 0, most: int = MAX_WHOLE_NUMBER) -> int:
    """Returns ``value`` as an int, whatever integer type (NumPy's too) it has.

    Raises:
        StoreError: not an integer (1024.0 is not one), or outside ``[least, most]``; ``what`` begins the message.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise StoreError(f"{what} must be a whole number, got {value!r} ({type(value).__name__})") from None
    if not least <= number <= most:
        raise StoreError(f"{what} must be from {least:,} to {most:,}, got {number:,}")
    return number
