# SPDX-License-Identifier: Apache-2.0
"""Byte sizes, durations and counts as people write and read them."""

from __future__ import annotations

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_SCALE = {
    "": 1,
    "B": 1,
    "K": KIB,
    "KIB": KIB,
    "KB": 10**3,
    "M": MIB,
    "MIB": MIB,
    "MB": 10**6,
    "G": GIB,
    "GIB": GIB,
    "GB": 10**9,
    "T": 1 << 40,
    "TIB": 1 << 40,
    "TB": 10**12,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")

_QUANTITY = re.compile(
    r"((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]*?)(?:/s|FLOPS?|FLOP/s)?"
)
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


def parse_bytes(text: str | int) -> int:
    """Returns the bytes that ``text`` stands for: ``"1.2GiB"``, ``"800 MB"``, ``"4G"`` (binary), ``4096``.

    Raises:
        ValueError: ``text`` is not a number with a known unit, or is negative.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"a size cannot be negative, got {text}")
        return text
    match = _SIZE.fullmatch(str(text))
    if match is None or match.group(2).upper() not in _SCALE:
        raise ValueError(f"expected a size such as 1.2GiB, 800MB or 4096, got {text!r}")
    return round(float(match.group(1)) * _SCALE[match.group(2).upper()])


def parse_quantity(text: str) -> float:
    """Returns the number that ``text`` stands for: ``"7GB/s"``, ``"2 GiB/s"``, ``"1e12"``, ``"150T"``, ``"8 GFLOPS"``.

    Single letters are decimal here: 150T is 150e12.

    Raises:
        ValueError: ``text`` is not a positive number with a known unit.
    """
    match = _QUANTITY.fullmatch(text.strip())
    unit = match.group(2).upper() if match else ""
    scale = _DECIMAL.get(unit, _SCALE.get(unit))
    if match is None or scale is None or not float(match.group(1)) > 0:
        raise ValueError(f"expected a positive number such as 7GB/s, 150e12 or 150T, got {text!r}")
    return float(match.group(1)) * scale


def format_bytes(count: float) -> str:
    """Returns ``count`` bytes in the largest binary unit that keeps it at or above one: ``"1.20 GiB"``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_duration(seconds: float) -> str:
    """Returns ``seconds`` as ``"41 s"``, ``"3 min 05 s"`` or ``"2 h 07 min"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def counted(count: int, one: str, more: str) -> str:
    """Returns ``count`` with the words that fit it: ``"1 line is"``, ``"1,200 lines are"``."""
    return f"{count:,} {one if count == 1 else more}"


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple
