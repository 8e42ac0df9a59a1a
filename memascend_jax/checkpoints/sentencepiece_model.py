# SPDX-License-Identifier: Apache-2.0
"""Reads a sentencepiece model (``tokenizer.model``): its pieces and the settings that decide how a text is cut.

The file is one protocol buffer; only the fields used here are read, the others are skipped.

Source: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

#: Types of pieces, which GGUF's are too.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_IDS = {40: "unk", 41: "bos", 42: "eos", 43: "pad"}


@dataclass(slots=True)
class SentencePieceModel:
    """What a model file says; the defaults are those of its format.

    Attributes:
        pieces: texts in order of their ids, ``scores`` and ``types`` likewise.
        kind: ``UNIGRAM`` or ``BPE``.
        ids: of ``unk``, ``bos``, ``eos`` and ``pad``; negative where there is none.
    """

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    kind: int = UNIGRAM
    byte_fallback: bool = False
    space_is_suffix: bool = False
    add_prefix: bool = True
    remove_extra_spaces: bool = True
    escape_spaces: bool = True
    has_character_map: bool = False
    ids: dict[str, int] = field(default_factory=lambda: {"unk": 0, "bos": 1, "eos": 2, "pad": -1})


def read_sentencepiece(data: bytes) -> SentencePieceModel:
    """Returns the model in the bytes of a ``tokenizer.model``.

    Raises:
        ValueError: it is none, or cut off.
    """
    model = SentencePieceModel()
    for number, value in _fields(data):
        if number == _PIECE:
            _add_piece(model, _message(value))
        elif number == _TRAINER:
            _read_trainer(model, _message(value))
        elif number == _NORMALIZER:
            _read_normalizer(model, _message(value))
    if not model.pieces:
        raise ValueError("it has no pieces")
    return model


def _add_piece(model: SentencePieceModel, data: bytes) -> None:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = _message(value).decode("utf-8")
        elif number == 2 and isinstance(value, bytes) and len(value) == 4:
            score = struct.unpack("<f", value)[0]
        elif number == 3:
            kind = _whole(value)
    model.pieces.append(text)
    model.scores.append(score)
    model.types.append(kind)


def _read_trainer(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 3:
            model.kind = _whole(value)
        elif number == 24:
            model.space_is_suffix = bool(_whole(value))
        elif number == 35:
            model.byte_fallback = bool(_whole(value))
        elif number in _IDS:
            model.ids[_IDS[number]] = _whole(value)


def _read_normalizer(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 2:
            model.has_character_map = bool(_message(value))
        elif number == 3:
            model.add_prefix = bool(_whole(value))
        elif number == 4:
            model.remove_extra_spaces = bool(_whole(value))
        elif number == 5:
            model.escape_spaces = bool(_whole(value))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the fields of a message in order: whole numbers as such, everything else as its bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire == 2:
            nbytes, position = _varint(data, position)
        elif wire in (1, 5):
            nbytes = 8 if wire == 1 else 4
        else:
            raise ValueError(f"byte {position:,} begins no field")
        if not number or position + nbytes > len(data):
            raise ValueError(f"the field at byte {position:,} would have {nbytes:,} bytes")
        yield number, data[position : position + nbytes]
        position += nbytes


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise ValueError("it is cut off")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"the number before byte {position:,} is too long")


def _whole(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError("a number is none")
    signed = value & (1 << 64) - 1
    return signed - (1 << 64) if signed >> 63 else signed


def _message(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a message is none")
    return value
