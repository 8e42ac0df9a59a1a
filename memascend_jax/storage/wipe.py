# SPDX-License-Identifier: Apache-2.0
"""Ends a store: its members hold nothing of it afterwards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from memascend_jax.errors import StoreError
from memascend_jax.storage import device, filesystem, formatting
from memascend_jax.storage.device import Member, PathLike
from memascend_jax.storage.engine import aligned_buffer
from memascend_jax.storage.layout import CATALOG_OFFSET, MAX_BLOCK_BYTES
from memascend_jax.storage.store_errors import StoreIOError


def wipe(paths: PathLike | Sequence[PathLike], *, incomplete: bool = False) -> list[str]:
    """Removes the store from ``paths`` and returns them: files are deleted, devices are blanked and discarded.

    Works on damaged and unfinished stores. Every path is checked before the first is touched.

    Args:
        incomplete: remove what is there although members of its store are not given, which makes those useless,
            and pass over paths that are missing; the paths that were removed are returned.

    Raises:
        StoreError: a path is missing, in use, or holds no store of this program, or members are not given.
    """
    resolved = device.resolve_paths(paths)
    if incomplete:
        # When none is left, opening the first says so.
        resolved = [path for path in resolved if os.path.lexists(path)] or resolved
    members: list[Member] = []
    try:
        for path in resolved:
            members.append(device.open_member(path, read_only=False, direct_io="optional"))
            if not formatting.has_superblock(path):
                raise StoreError(f"cannot wipe '{path}': {formatting.no_store_in(members[-1])}")
        if not incomplete:
            _check_complete(members)
        for member in members:
            _wipe_member(member)
    finally:
        for member in members:
            member.close()
    return resolved


def _check_complete(members: Sequence[Member]) -> None:
    """Raises ``StoreError`` when members are not given whose store would be lost with the given ones.

    An unfinished store holds nothing that could be lost; a member whose superblocks are damaged may be any.
    """
    given: dict[bytes, dict[int, str]] = {}
    counts: dict[bytes, int] = {}
    unknown = 0
    for member in members:
        copies = formatting.decoded_copies(member)
        unknown += not copies
        if copies and all(copy.ready for copy in copies):
            given.setdefault(copies[0].store_id, {})[copies[0].member] = member.path
            counts[copies[0].store_id] = len(copies[0].geometry.weights)
    for store_id, paths in given.items():
        count = counts[store_id]
        missing = [str(index) for index in range(count) if index not in paths]
        if len(missing) > unknown:
            raise StoreError(
                f"cannot wipe '{next(iter(paths.values()))}': its store has {count} members, {len(paths)} of them "
                f"given, and the others are useless without; missing: member {', '.join(missing)}; give the paths of "
                f"all {count}, or remove only what is given with incomplete=True (--incomplete)"
            )


def _wipe_member(member: Member) -> None:
    if not member.is_block_device:
        # Another name of the file, or a program that still has it open, must not keep the data.
        filesystem.punch(member.fd, member.nbytes)
        Path(member.path).unlink()
        return
    known = formatting.decoded_copies(member)
    slots = [known[0].geometry.catalog_slot(slot) for slot in (0, 1)] if known else []
    # What lies behind the store is not its own; where nothing tells how far it went, it had the device.
    taken = max((copy.geometry.member_bytes(copy.member) for copy in known), default=member.nbytes)
    end = min(taken, member.nbytes)
    zeros = aligned_buffer(CATALOG_OFFSET)
    try:
        for offset in slots:
            os.pwritev(member.fd, [zeros[:MAX_BLOCK_BYTES].data], offset)
        os.pwritev(member.fd, [zeros.data], 0)
        os.fsync(member.fd)
    except OSError as error:
        raise StoreIOError.of("wipe store", member.path, error, "check the device") from error
    filesystem.discard(member.fd, 0, end - end % MAX_BLOCK_BYTES)
