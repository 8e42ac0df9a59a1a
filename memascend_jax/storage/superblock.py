# SPDX-License-Identifier: Apache-2.0
"""The superblock: who a member is and how the store is laid out; and the session mark: did the last writer
close. Pure: bytes in, records out. Nothing read from disk is trusted before it is checked.

The superblock is written at ``create`` and never changes after; two copies lie 64 KiB apart. See
docs/store_format.md for the fields.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from memascend_jax.errors import StoreError
from memascend_jax.storage.layout import MAX_CATALOG_BYTES, MAX_MEMBERS, Geometry, plan_geometry

MAGIC = b"MEMASCND"
SESSION_MAGIC = b"MEMASESS"
FORMAT_VERSION = 1
#: Superblock and session mark fill this much of their block, the smallest block there is.
RECORD_BYTES = 512

Durability = Literal["step", "checkpoint"]
_DURABILITY: tuple[Durability, ...] = ("step", "checkpoint")
_CREATING, _READY = 1, 2

_FIELDS = struct.Struct(f"<8sIIII16sHHIQQQQQQQd{MAX_MEMBERS}H")
_SESSION = struct.Struct("<8sI16sQI")
_CRC = struct.Struct("<I")

Checksum = Callable[[bytes], int]


@dataclass(frozen=True, slots=True)
class Superblock:
    """One member's identity. ``ready`` is False until ``create`` has finished."""

    store_id: bytes
    member: int
    geometry: Geometry
    durability: Durability
    created_s: float
    ready: bool

    def encode(self, crc32c: Checksum) -> bytes:
        """Returns the superblock's bytes, one block long."""
        geometry = self.geometry
        weights = geometry.weights + (0,) * (MAX_MEMBERS - len(geometry.weights))
        fields = _FIELDS.pack(
            MAGIC,
            FORMAT_VERSION,
            _READY if self.ready else _CREATING,
            _DURABILITY.index(self.durability),
            geometry.block_bytes,
            self.store_id,
            self.member,
            len(geometry.weights),
            0,
            geometry.stripe_bytes,
            geometry.capacity_bytes,
            geometry.scratch_bytes,
            geometry.catalog_bytes,
            geometry.data_offset,
            geometry.member_bytes(self.member),
            0,
            self.created_s,
            *weights,
        )
        return _sealed(fields, geometry.block_bytes, crc32c)


def decode_superblock(raw: bytes, path: str, crc32c: Checksum) -> Superblock | None:
    """Returns the superblock in ``raw``, or None when ``raw`` is not one or its checksum fails.

    Raises:
        StoreError: a valid superblock of another format version, or one whose fields contradict each other.
    """
    if len(raw) < RECORD_BYTES or not raw.startswith(MAGIC) or not _is_sealed(raw, crc32c):
        return None
    (
        _,
        version,
        state,
        durability,
        block_bytes,
        store_id,
        member,
        members,
        _,
        stripe_bytes,
        capacity_bytes,
        scratch_bytes,
        catalog_bytes,
        data_offset,
        member_bytes,
        _,
        created_s,
        *weights,
    ) = _FIELDS.unpack_from(raw)
    if version != FORMAT_VERSION:
        raise StoreError(
            f"cannot open '{path}': its store format is version {version}, this program reads version "
            f"{FORMAT_VERSION}; use the release of memascend-jax that wrote it"
        )
    plausible = 1 <= members <= MAX_MEMBERS and member < members and catalog_bytes <= MAX_CATALOG_BYTES
    if not plausible or durability >= len(_DURABILITY) or state not in (_CREATING, _READY):
        raise _contradiction(path)
    try:
        planned = plan_geometry(
            capacity_bytes=capacity_bytes,
            scratch_bytes=scratch_bytes,
            catalog_bytes=catalog_bytes,
            block_bytes=block_bytes,
            weights=weights[:members],
        )
    except StoreError as error:
        raise _contradiction(path) from error
    found = (stripe_bytes, capacity_bytes, scratch_bytes, catalog_bytes, data_offset, member_bytes)
    expected = (
        planned.stripe_bytes,
        planned.capacity_bytes,
        planned.scratch_bytes,
        planned.catalog_bytes,
        planned.data_offset,
        planned.member_bytes(member),
    )
    if found != expected:
        raise _contradiction(path)
    return Superblock(store_id, member, planned, _DURABILITY[durability], created_s, state == _READY)


def encode_session(store_id: bytes, session: int, closed: bool, block_bytes: int, crc32c: Checksum) -> bytes:
    """Returns the session mark: whether the writer of ``session`` closed the store."""
    fields = _SESSION.pack(SESSION_MAGIC, FORMAT_VERSION, store_id, session, int(closed))
    return _sealed(fields, block_bytes, crc32c)


def decode_session(raw: bytes, store_id: bytes, crc32c: Checksum) -> tuple[int, bool]:
    """Returns (session, whether it was closed); an unreadable mark counts as session 0, not closed."""
    if len(raw) < RECORD_BYTES or not _is_sealed(raw, crc32c):
        return 0, False
    magic, _, owner, session, closed = _SESSION.unpack_from(raw)
    if magic != SESSION_MAGIC or owner != store_id:
        return 0, False
    return session, closed == 1


def _sealed(fields: bytes, block_bytes: int, crc32c: Checksum) -> bytes:
    body = fields.ljust(RECORD_BYTES - _CRC.size, b"\0")
    return (body + _CRC.pack(crc32c(body))).ljust(block_bytes, b"\0")


def _is_sealed(raw: bytes, crc32c: Checksum) -> bool:
    body = bytes(raw[: RECORD_BYTES - _CRC.size])
    return bool(_CRC.unpack_from(raw, len(body))[0] == crc32c(body))


def _contradiction(path: str) -> StoreError:
    return StoreError(
        f"cannot open '{path}': its superblock has a valid checksum but sizes that contradict each other; "
        "it was not written by this program"
    )
