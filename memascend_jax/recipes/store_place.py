# SPDX-License-Identifier: Apache-2.0
"""Whether a new store can go where the configuration wants it, found out before anything is written.

The store's own guards look again when it is created; these name what the user of a configuration can change.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from pathlib import Path

from memascend_jax.config import Config, store_paths
from memascend_jax.errors import BudgetError, StoreError
from memascend_jax.recipes.run_folder import nearest_existing
from memascend_jax.storage import filesystem
from memascend_jax.storage.device import block_device_bytes, existing_contents, open_member, resolve_paths
from memascend_jax.training.plan import RunPlan
from memascend_jax.units import format_bytes


def check_places(config: Config) -> None:
    """Returns when every member of a new store can be made where it should be.

    Raises:
        StoreError: a path holds something else, is in use, is not on a disk, cannot be written, or lies in a folder
            that is not there.
    """
    for path in _members(config):
        if path.exists():
            _check_present(path, config)
        else:
            _check_absent(path, config)


def check_room(config: Config, plan: RunPlan) -> None:
    """Returns when the disks have room for the store of ``plan``.

    Raises:
        BudgetError: a file system has less free, or a device is shorter, than its members need.
    """
    paths = _members(config)
    share = -(-plan.disk_bytes // len(paths))
    wanted: dict[int, list[Path]] = defaultdict(list)
    for path in paths:
        size = block_device_bytes(str(path))
        if size is None:
            wanted[nearest_existing(path).stat().st_dev].append(path)
        elif size < share:
            raise _no_room(plan, share, [path], f"the device has {format_bytes(size)}")
    for together in wanted.values():
        held = sum(path.stat().st_blocks * 512 for path in together if path.exists())
        disk = os.statvfs(nearest_existing(together[0]))
        free = disk.f_bavail * disk.f_frsize + held
        if share * len(together) > free:
            raise _no_room(plan, share * len(together), together, f"{format_bytes(free)} are free there")


def _members(config: Config) -> list[Path]:
    return [Path(path) for path in resolve_paths([str(path) for path in store_paths(config)])]


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


def _no_room(plan: RunPlan, needed: int, paths: list[Path], there: str) -> BudgetError:
    less = (
        ", or set offload.durability=checkpoint, which takes about half" if plan.durability == "step" else ""
    )
    return BudgetError(
        f"the store needs {format_bytes(needed)} at {', '.join(map(str, paths))}, but {there}; free space, choose "
        f"another offload.store{less}"
    )
