# SPDX-License-Identifier: Apache-2.0
"""The range check that every way out of a device shares."""

from __future__ import annotations


def checked_nbytes(total_bytes: int, offset_bytes: int, nbytes: int | None) -> int:
    """Returns how many bytes to copy of an array of ``total_bytes``, from ``offset_bytes``.

    Raises:
        ValueError: the range leaves the array.
    """
    wanted = total_bytes - offset_bytes if nbytes is None else nbytes
    if offset_bytes < 0 or wanted < 0 or offset_bytes + wanted > total_bytes:
        raise ValueError(
            f"cannot copy {wanted:,} bytes from offset {offset_bytes:,} of an array of {total_bytes:,} bytes"
        )
    return wanted
