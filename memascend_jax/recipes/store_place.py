# SPDX-License-Identifier: Apache-2.0
"""Whether a new store can go where the configuration wants it, found out before anything is written.

The store's own guards look again when it is created; these name what the user of a configuration can change.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from memascend_jax.config import Config, store_paths
from memascend_jax.errors import StoreError
from memascend_jax.storage import filesystem
from memascend_jax.storage.device import existing_contents, open_member, resolve_paths
from memascend_jax.storage.existing_path import nearest_existing
from memascend_jax.storage.formatting import is_member


def check_places(config: Config, *, open_stores: bool = True) -> None:
    """Returns when every member of a new store can be made where it should be; writes nothing.

    Args:
        open_stores: whether a store that is there already is opened and locked, which it cannot be while a run has it;
            else it is enough that this user may write it.

    Raises:
        StoreError: a path holds something else, is in use, is not on a disk, cannot be written, or lies in a folder
            that is not there.
    """
    for path in map(Path, resolve_paths(store_paths(config))):
        if not path.exists():
            _check_absent(path, config)
        elif open_stores or not is_member(str(path)):
            _check_present(path, config)
        else:
            _check_writable(path)


def _check_present(path: Path, config: Config) -> None:
    member = open_member(str(path), read_only=True, direct_io=config.offload.direct_io)
    try:
        found = existing_contents(member)
    finally:
        member.close()
    if found not in (None, "store"):
        way = (
            f"make an empty store of it first: memascend store create {path} --erase-foreign-data {path}"
            if member.is_block_device
            else "remove the file"
        )
        raise StoreError(
            f"cannot create the store of the run on '{path}': it holds {found}; choose another offload.store or, to "
            f"lose that for good, {way}"
        )
    _check_writable(path)


def _check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise StoreError(f"cannot write the store '{path}': this user may not; choose another offload.store")


def _check_absent(path: Path, config: Config) -> None:
    if not path.parent.is_dir() and not path.is_relative_to(config.run.dir):
        raise StoreError(
            f"cannot create the store '{path}': the folder '{path.parent}' does not exist. Is the disk mounted? "
            "Make the folder, or correct offload.store"
        )
    folder = nearest_existing(path)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreError(
            f"cannot create the store '{path}': '{folder}' is read-only, or not yours to write; choose another "
            "offload.store or run.dir"
        )
    if os.statvfs(folder).f_blocks == 0:
        raise StoreError(
            f"cannot create the store '{path}': '{folder}' is not on a disk, its file system holds no data; choose "
            "another offload.store or run.dir"
        )
    if config.offload.direct_io == "required":
        _check_disk(path, folder)


def _check_disk(path: Path, folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        kind = filesystem.file_system(descriptor)
    finally:
        os.close(descriptor)
    remedy = "choose an offload.store or run.dir on a local disk, or allow it with offload.direct_io=optional"
    if kind in filesystem.IN_MEMORY:
        raise StoreError(
            f"cannot create the store '{path}': '{folder}' is on {kind}, which is memory, not a disk; {remedy}"
        )
    if _lacks_direct_io(folder):
        raise StoreError(
            f"cannot create the store '{path}': the file system of '{folder}' ({kind}) cannot bypass the page cache "
            f"(O_DIRECT); {remedy}"
        )


def _lacks_direct_io(folder: Path) -> bool:
    """Asks with a file that has no name and is gone again at once; False where such files cannot be made."""
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    try:
        os.close(os.open(folder, flags, 0o600))
    except OSError:
        return False
    try:
        os.close(os.open(folder, flags | os.O_DIRECT, 0o600))
    except OSError as error:
        return error.errno == errno.EINVAL
    return False
