# SPDX-License-Identifier: Apache-2.0
"""Turns paths into the members of a new store, and finds the members of an existing one."""

from __future__ import annotations

import dataclasses
import os
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memascend_jax.errors import StoreError
from memascend_jax.storage import blankness, device, filesystem, signatures
from memascend_jax.storage.checksum import crc32c_bytes
from memascend_jax.storage.device import DirectIo, Member
from memascend_jax.storage.engine import EngineFactory, aligned_buffer
from memascend_jax.storage.layout import (
    CATALOG_OFFSET,
    MAX_BLOCK_BYTES,
    SESSION_OFFSET,
    SUPERBLOCK_OFFSETS,
    Geometry,
)
from memascend_jax.storage.store_errors import DamagedStoreError, StoreIOError
from memascend_jax.storage.superblock import (
    MAGIC,
    RECORD_BYTES,
    Durability,
    Superblock,
    decode_session,
    decode_superblock,
)
from memascend_jax.storage.volume import Volume


def create_volume(
    paths: Sequence[str],
    plan: Callable[[Sequence[Member]], Geometry],
    durability: Durability,
    *,
    block_bytes: int,
    discard: bool,
    whole_devices: bool,
    direct_io: DirectIo,
    make_engine: EngineFactory,
    overwrite: bool,
    erase_foreign_data: bool | Collection[str],
    store_id: bytes | None = None,
) -> Volume:
    """Returns a volume whose space is reserved and whose superblocks say *being created*.

    Every path is checked before the first byte is written to any. On failure, files that did not exist before
    are removed and the others are closed.

    Args:
        plan: returns the geometry; called when the members may be formatted, and may look at them.
        discard: tell devices and file systems that what was on the members is no longer needed, as far as this
            store and one that it replaces reach.
        whole_devices: the store takes all of its devices: discard what its geometry cannot use, too.
        store_id: identity of the store, 16 bytes; None: a new one.

    Raises:
        StoreError: a path that must not or cannot become a member; the message says which and why.
    """
    members: list[Member] = []
    volume: Volume | None = None
    try:
        for path in paths:
            members.append(device.create_member(path, direct_io=direct_io))
            _check_sector(members[-1], block_bytes)
        contents = [device.existing_contents(member) for member in members]
        _check_may_format(members, contents, overwrite, erase_foreign_data)
        superblock = Superblock(
            store_id or uuid.uuid4().bytes, 0, plan(members), durability, time.time(), ready=False
        )
        volume = Volume(members, superblock, make_engine)
        replaced = [_store_bytes(member) if discard else 0 for member in members]
        _reserve(volume)
        _erase(volume, contents, discard, whole_devices, replaced)
        volume.write_superblocks(superblock)
        volume.flush()
        _check_reads_back(volume)
    except BaseException:
        abandon(members, volume)
        raise
    return volume


def abandon(members: Sequence[Member], volume: Volume | None) -> None:
    """Closes what a failed create has opened, and removes the files that it made."""
    if volume is not None:
        volume.engine.close()
    for member in members:
        if member.created:
            Path(member.path).unlink(missing_ok=True)
        member.close()


def open_volume(
    paths: Sequence[str], *, read_only: bool, direct_io: DirectIo, make_engine: EngineFactory
) -> Volume:
    """Returns the volume of an existing store, its members in the order of their index whatever that of ``paths``.

    Raises:
        StoreError: not a store, an unfinished one, members missing, repeated, foreign or too short; or, to be
            written, a copy with holes on a disk that has no room for them.
    """
    members: list[Member] = []
    try:
        found = []
        for path in paths:
            members.append(device.open_member(path, read_only=read_only, direct_io=direct_io))
            found.append(_read_superblock(members[-1]))
        _check_set(members, found)
        order = sorted(range(len(members)), key=lambda index: found[index].member)
        members = [members[index] for index in order]
        geometry = found[0].geometry
        for index, member in enumerate(members):
            device.check_length(member, geometry.member_bytes(index))
            _check_sector(member, geometry.block_bytes)
            if not read_only:
                device.reserve_again(member, geometry.member_bytes(index))
        return Volume(members, found[order[0]], make_engine)
    except BaseException:
        for member in members:
            member.close()
        raise


def superblocks_intact(volume: Volume) -> bool:
    """Returns whether every copy of every superblock is whole."""
    return all(len(decoded_copies(member)) == len(SUPERBLOCK_OFFSETS) for member in volume.members)


def read_session(volume: Volume) -> tuple[int, bool]:
    """Returns (the last session, whether its writer closed every member)."""
    marks = [
        decode_session(
            volume.read_metadata(member, SESSION_OFFSET, volume.geometry.block_bytes).tobytes(),
            volume.superblock.store_id,
            crc32c_bytes,
        )
        for member in range(len(volume.members))
    ]
    sessions = {session for session, _ in marks}
    return max(sessions), len(sessions) == 1 and all(closed for _, closed in marks)


def is_member(path: str) -> bool:
    """Returns whether ``path`` holds a member of a store, damaged or not, that is not merely half created."""
    copies = _peek_superblocks(path)
    decoded = [decode_superblock(raw, path, crc32c_bytes) for raw in copies]
    return bool(copies) and all(superblock is None or superblock.ready for superblock in decoded)


def has_superblock(path: str) -> bool:
    """Returns whether anything at ``path`` was written by this program: a member, damaged or half created."""
    return bool(_peek_superblocks(path))


def no_store_in(member: Member) -> str:
    """Returns why there is no store in ``member``, which has no superblock, with the remedy.

    A process that is killed early in ``create`` leaves an empty file, or a device or file of zeros.
    """
    if member.nbytes == 0:
        what = "it is empty"
    elif blankness.first_nonzero(member.path, member.fd, member.nbytes) is None:
        what = f"it holds nothing but zeros (looked at: {blankness.looked_at(member.nbytes)})"
    else:
        return "it is not a memascend store; check the path"
    return (
        f"{what}: the creation of a store was interrupted before its first write, or was never begun; "
        "check the path, or create the store again"
    )


def _peek_superblocks(path: str) -> list[bytes]:
    """Returns the records at ``path`` that begin like a superblock."""
    try:
        with open(path, "rb", buffering=0) as raw:
            found = [os.pread(raw.fileno(), RECORD_BYTES, offset) for offset in SUPERBLOCK_OFFSETS]
    except OSError:
        return []
    return [record for record in found if record.startswith(MAGIC)]


def _check_may_format(
    members: Sequence[Member],
    contents: Sequence[str | None],
    overwrite: bool,
    erase: bool | Collection[str],
) -> None:
    stores = {
        member.path: decoded_copies(member)
        for member, found in zip(members, contents, strict=True)
        if found == "store"
    }
    # What an interrupted create left on any member makes the others of the same store worthless too.
    unfinished = {copy.store_id for copies in stores.values() for copy in copies if not copy.ready}
    for member, found in zip(members, contents, strict=True):
        if found is None:
            continue
        if found != "store":
            if erase is True or (erase is not False and member.path in erase):
                continue
            raise StoreError(
                f"cannot create a store on '{member.path}': it holds {found}; give another path, or erase it "
                "for good with erase_foreign_data (--erase-foreign-data) naming it"
            )
        copies = stores[member.path]
        worthless = bool(copies) and all(copy.store_id in unfinished for copy in copies)
        if not overwrite and not worthless:
            raise StoreError(
                f"cannot create a store at '{member.path}': there is one already; open it, give another path, "
                "or replace it for good with overwrite=True (--overwrite)"
            )


def _check_sector(member: Member, block_bytes: int) -> None:
    if not member.is_block_device:
        return
    sector = filesystem.sector_bytes(member.fd)
    if block_bytes % sector:
        raise StoreError(
            f"'{member.path}' has sectors of {sector:,} bytes, the store's blocks are {block_bytes:,} bytes; "
            f"create the store with block_bytes={sector} (--block-bytes {sector}) or a multiple"
        )


def _reserve(volume: Volume) -> None:
    """Makes every member as long as it must be, before anything in an existing one is overwritten.

    A new file says first that it is being created: a file of zeros would look like somebody's data after a crash.
    """
    before = [(member, member.nbytes) for member in volume.members]
    try:
        for index, member in enumerate(volume.members):
            if not member.is_block_device and member.nbytes == 0:
                volume.write_superblocks(volume.superblock, [index])
                volume.flush()
            device.reserve_space(member, volume.geometry.member_bytes(index))
    except BaseException:
        for member, nbytes in before:
            device.cut_to(member, nbytes)
        raise
    for index, member in enumerate(volume.members):
        device.cut_to(member, volume.geometry.member_bytes(index))


def _erase(
    volume: Volume,
    contents: Sequence[str | None],
    discard: bool,
    whole_devices: bool,
    replaced: Sequence[int],
) -> None:
    """Removes every trace of what was there: a later probe must see this store and nothing else.

    The space has been reserved and all refusals are behind us. Of a device no more is discarded than this store takes
    or the one it replaces took (``replaced``, bytes per member): what lies behind them is not ours.
    """
    geometry = volume.geometry
    zeros = aligned_buffer(signatures.TAIL_BYTES)
    for index, member in enumerate(volume.members):
        if contents[index] is not None:
            # First of all, so that a crash from here on leaves an interrupted creation and not somebody's data.
            volume.write_metadata([(index, 0, _blank_head(volume, index))])
            volume.flush()
        if discard and member.is_block_device:
            taken = max(geometry.member_bytes(index), replaced[index])
            end = member.nbytes if whole_devices else min(taken, member.nbytes)
            filesystem.discard(member.fd, CATALOG_OFFSET, end - end % MAX_BLOCK_BYTES)
        elif discard and contents[index] is not None:
            filesystem.zero(member.fd, CATALOG_OFFSET, member.nbytes)
        if contents[index] is not None:
            tail = member.nbytes // MAX_BLOCK_BYTES * MAX_BLOCK_BYTES - signatures.TAIL_BYTES
            if member.is_block_device and tail > 0:
                volume.write_metadata([(index, tail, zeros)])
        blank = zeros[: geometry.block_bytes]
        volume.write_metadata([(index, geometry.catalog_slot(slot), blank) for slot in (0, 1)])


def _blank_head(volume: Volume, index: int) -> npt.NDArray[np.uint8]:
    """Returns what lies before the catalogs of member ``index``: both copies of its superblock, else zeros."""
    head = aligned_buffer(CATALOG_OFFSET)
    block = np.frombuffer(volume.superblock_of(volume.superblock, index).encode(crc32c_bytes), np.uint8)
    for offset in SUPERBLOCK_OFFSETS:
        head[offset : offset + len(block)] = block
    return head


def _check_reads_back(volume: Volume) -> None:
    """The real aligned write and read: what a file system merely claims is found out here."""
    for index, member in enumerate(volume.members):
        raw = volume.read_metadata(index, 0, volume.geometry.block_bytes).tobytes()
        expected = volume.superblock_of(volume.superblock, index)
        if decode_superblock(raw, member.path, crc32c_bytes) != expected:
            raise StoreError(
                f"'{member.path}' did not return what was just written to it; the device or file system is faulty"
            )


def _superblock_copies(member: Member) -> list[bytes]:
    """Returns what lies where the two superblocks are, short at the end of the member."""
    copies = []
    for offset in SUPERBLOCK_OFFSETS:
        into = aligned_buffer(MAX_BLOCK_BYTES)
        try:
            got = os.preadv(member.fd, [into.data], offset)
        except OSError as error:
            remedy = "check the disk, or allow buffered I/O with direct_io=optional"
            raise StoreIOError.of("read the superblock of", member.path, error, remedy) from error
        copies.append(into[:got].tobytes())
    return copies


def _store_bytes(member: Member) -> int:
    """Returns how much of ``member`` the store on it takes, 0 when that is not known."""
    return max((copy.geometry.member_bytes(copy.member) for copy in decoded_copies(member)), default=0)


def decoded_copies(member: Member) -> list[Superblock]:
    """Returns the copies of the superblock that are whole, none to two."""
    decoded = (decode_superblock(raw, member.path, crc32c_bytes) for raw in _superblock_copies(member))
    return [superblock for superblock in decoded if superblock is not None]


def _read_superblock(member: Member) -> Superblock:
    valid = decoded_copies(member)
    if not valid:
        if has_superblock(member.path):
            raise DamagedStoreError(
                f"cannot open '{member.path}': both copies of its superblock are damaged; the store is lost, "
                "make a new one"
            )
        raise StoreError(f"cannot open '{member.path}': {no_store_in(member)}")
    if not all(superblock.ready for superblock in valid):
        raise StoreError(
            f"cannot open '{member.path}': its creation was interrupted and it holds nothing; create the store again"
        )
    if any(superblock != valid[0] for superblock in valid):
        raise StoreError(
            f"cannot open '{member.path}': the two copies of its superblock differ; it was written by two stores, "
            "and neither is whole; make a new one"
        )
    return valid[0]


def _check_set(members: Sequence[Member], found: Sequence[Superblock]) -> None:
    first = found[0]
    for member, superblock in zip(members, found, strict=True):
        if superblock.store_id != first.store_id:
            raise StoreError(
                f"'{member.path}' belongs to another store ({superblock.store_id.hex()}) than '{members[0].path}' "
                f"({first.store_id.hex()}); give the members of one store"
            )
        if dataclasses.replace(superblock, member=first.member) != first:
            raise StoreError(
                f"the superblocks of '{member.path}' and '{members[0].path}' contradict each other"
            )
    count = len(first.geometry.weights)
    present = [superblock.member for superblock in found]
    missing = sorted(set(range(count)) - set(present))
    if missing or len(present) != count:
        raise StoreError(
            f"the store of '{members[0].path}' has {count} members, {len(set(present))} of them were given; missing: "
            f"member {', '.join(map(str, missing)) or 'none, one is given twice'}; give the path of each member"
        )
