# SPDX-License-Identifier: Apache-2.0
"""Opens what a path names, a block device or a regular file, behind the guards that keep a user's data safe.

What is refused here, before a byte is written: mounted or claimed devices, foreign data, files of another kind,
file systems without O_DIRECT or made of memory, a second process, short devices, full disks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from memascend_jax.errors import StoreError
from memascend_jax.storage import blankness, filesystem, signatures
from memascend_jax.storage.layout import CATALOG_OFFSET, SUPERBLOCK_OFFSETS
from memascend_jax.storage.store_errors import DamagedStoreError, StoreIOError
from memascend_jax.storage.superblock import MAGIC
from memascend_jax.storage.whole_number import listed
from memascend_jax.units import format_bytes

DirectIo = Literal["required", "optional", "off"]
PathLike = str | os.PathLike[str]
DEFAULT_FILE_NAME = "memascend.store"
#: A killed process keeps its lock until the kernel has finished its I/O in flight.
LOCK_TIMEOUT_S = 3.0


@dataclass(slots=True)
class Member:
    """One open member. ``created``: the file did not exist before; ``notes``: what the user should know."""

    path: str
    fd: int
    is_block_device: bool
    nbytes: int
    direct: bool
    file_system: str
    created: bool = False
    notes: list[str] = field(default_factory=list)

    def close(self) -> None:
        """Closes the descriptor, which releases the lock."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def resolve_paths(paths: PathLike | Sequence[PathLike]) -> list[str]:
    """Returns the member paths that ``paths`` name; a directory stands for ``memascend.store`` in it.

    Raises:
        StoreError: no path, something that is none, or two that name the same file.
    """
    given: Iterable[PathLike]
    if isinstance(paths, (str, os.PathLike)):
        given = [paths]
    else:
        given = listed(paths, "a store's paths", "a path or a sequence of paths")
    resolved = []
    for path in given:
        text = _path_text(path)
        resolved.append(str(Path(text) / DEFAULT_FILE_NAME) if _is_directory(text) else text)
    if not resolved:
        raise StoreError("a store needs at least one path: a directory, a file or a block device")
    seen: dict[str, str] = {}
    for path in resolved:
        real = os.path.realpath(path)
        if real in seen:
            raise StoreError(f"'{path}' and '{seen[real]}' are the same file; each member needs its own")
        seen[real] = path
    return resolved


def _path_text(path: PathLike) -> str:
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise StoreError(
            f"a member's path must be a str or os.PathLike, not empty, no NUL; got {path!r} ({type(path).__name__})"
        )
    return text


def open_member(path: str, *, read_only: bool, direct_io: DirectIo) -> Member:
    """Opens an existing member and locks it.

    Raises:
        StoreError: the path is missing, neither file nor device, in use, mounted, or cannot do what
            ``direct_io`` asks.
    """
    status = _stat(path)
    if status is None:
        raise StoreError(
            f"cannot open store '{path}': no such file; check the path, or create the store there first"
        )
    return _open_checked(path, status, os.O_RDONLY if read_only else os.O_RDWR, direct_io)


def block_device_bytes(path: str) -> int | None:
    """Returns the size of the block device at ``path``, or None when it is something else or not there yet."""
    status = _stat(path)
    if status is None or not stat.S_ISBLK(status.st_mode):
        return None
    fd = _open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    finally:
        os.close(fd)


def create_member(path: str, *, direct_io: DirectIo) -> Member:
    """Opens ``path`` to become a member: an existing file or device as it is, else a new empty file (0600).

    Nothing is written yet; ``existing_contents`` tells what is there.
    """
    status = _stat(path)
    if status is not None:
        return _open_checked(path, status, os.O_RDWR, direct_io)
    parent = Path(path).parent
    if path.endswith("/") or not _is_directory(parent):
        missing = path if path.endswith("/") else parent
        raise StoreError(
            f"cannot create a store at '{path}': the directory '{missing}' does not exist; create it, or mount "
            "the disk that it should be on"
        )
    member = _open_checked(path, None, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct_io)
    if member.file_system in filesystem.COPY_ON_WRITE and not filesystem.set_no_copy_on_write(member.fd):
        member.notes.append(
            f"'{path}' is on {member.file_system}, which writes changes to new places: the reserved space does "
            "not protect against a disk that fills up later"
        )
    return member


def existing_contents(member: Member) -> str | None:
    """Returns None when the member is empty or blank, ``"store"`` for a (damaged or unfinished) store of this
    program, else what foreign data was found. Of devices ``blankness.looked_at`` is read."""
    if member.nbytes == 0:
        return None
    try:
        with open(member.path, "rb", buffering=0) as raw:
            head = raw.read(signatures.HEAD_BYTES)
            raw.seek(max(member.nbytes - signatures.TAIL_BYTES, 0))
            tail = raw.read(signatures.TAIL_BYTES)
    except OSError as error:
        raise StoreIOError.of("read", member.path, error, "check the device") from error
    if any(head.startswith(MAGIC, offset) for offset in SUPERBLOCK_OFFSETS):
        return "store"
    # A regular file is the user's, whatever is in it; a device is judged by what it shows.
    found = signatures.foreign_signature(head, tail)
    if found is None and member.nbytes <= CATALOG_OFFSET:
        # What a crash leaves of a file before its first superblock is on disk; all of it was looked at.
        return None
    if not member.is_block_device:
        return found or "a file of zeros"
    if found not in (None, signatures.UNKNOWN):
        return found
    where = blankness.first_nonzero(member.path, member.fd, member.nbytes)
    if where is None:
        return found
    return (
        f"{signatures.UNKNOWN} (byte {where:,} is not zero; looked at: {blankness.looked_at(member.nbytes)})"
    )


def reserve_space(member: Member, needed: int) -> None:
    """Makes sure that the member holds ``needed`` bytes.

    Raises:
        StoreError: the device is too short, the disk is full, or the file system cannot reserve.
    """
    if member.is_block_device:
        check_length(member, needed)
        return
    free = os.fstatvfs(member.fd)
    available = free.f_bavail * free.f_frsize
    held = os.fstat(member.fd).st_blocks * 512
    if needed - min(held, needed) > available:
        raise _full(member, needed, available, None)
    try:
        filesystem.reserve(member.fd, needed)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _full(member, needed, available, error) from error
        remedy = (
            f"the file system ({member.file_system}) cannot reserve space; use ext4, xfs or a block device"
        )
        raise StoreIOError.of(f"reserve {needed:,} bytes for", member.path, error, remedy) from error
    member.nbytes = os.fstat(member.fd).st_size


def reserve_again(member: Member, needed: int) -> None:
    """Makes sure that a store that exists is still reserved: copies often have holes where nothing was written yet.

    Raises:
        StoreError: the disk is too full for what is missing.
    """
    if member.is_block_device or os.fstat(member.fd).st_blocks * 512 >= needed:
        return
    try:
        reserve_space(member, needed)
    except StoreIOError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def cut_to(member: Member, nbytes: int) -> None:
    """Gives back what a regular file has beyond ``nbytes``."""
    if not member.is_block_device and os.fstat(member.fd).st_size > nbytes:
        os.ftruncate(member.fd, nbytes)
        member.nbytes = nbytes


def check_length(member: Member, needed: int) -> None:
    """Raises ``StoreError`` when the member is shorter than the ``needed`` bytes of its store."""
    if member.nbytes < needed:
        kind = "device" if member.is_block_device else "file"
        raise DamagedStoreError(
            f"'{member.path}' has {member.nbytes:,} bytes, the store needs {needed:,} "
            f"({format_bytes(needed - member.nbytes)} more); the {kind} is too small or was truncated"
        )


def _open_checked(path: str, status: os.stat_result | None, flags: int, direct_io: DirectIo) -> Member:
    is_block = status is not None and stat.S_ISBLK(status.st_mode)
    if status is not None and not is_block and not stat.S_ISREG(status.st_mode):
        raise StoreError(f"'{path}' is neither a regular file nor a block device; give one of these")
    if is_block and flags & os.O_ACCMODE != os.O_RDONLY:
        _check_writable(path)
    # Without O_CREAT, O_EXCL asks the kernel for a device that nobody has mounted or claimed.
    flags |= os.O_CLOEXEC | (os.O_EXCL if is_block else 0)
    fd, direct, notes = _open_direct(path, flags, direct_io)
    created = bool(flags & os.O_CREAT)
    try:
        member = Member(
            path, fd, is_block, os.lseek(fd, 0, os.SEEK_END), direct, "block device", created, notes
        )
        if not is_block:
            member.file_system = filesystem.file_system(fd)
            _check_not_memory(member, direct_io)
        _lock(member, shared=flags & os.O_ACCMODE == os.O_RDONLY)
        _check_still_there(member)
    except BaseException:
        os.close(fd)
        if created:
            Path(path).unlink(missing_ok=True)
        raise
    return member


def _check_writable(path: str) -> None:
    """Refuses a read-only device: the kernel may open it for writing, and only the first write would fail."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # Opening it for writing tells why.
        return
    try:
        read_only = filesystem.is_read_only(fd)
    finally:
        os.close(fd)
    if read_only:
        raise StoreIOError(
            f"cannot open store '{path}' for writing: the device is read-only [EROFS]; make it writable (blockdev "
            f"--setrw {path}, or the drive's write protection), give another device, or open the store read-only",
            errno.EROFS,
            path,
        )


def _open_direct(path: str, flags: int, direct_io: DirectIo) -> tuple[int, bool, list[str]]:
    if direct_io == "off":
        return _open(path, flags), False, []
    try:
        return _open(path, flags | os.O_DIRECT), True, []
    except StoreIOError as error:
        if error.errno != errno.EINVAL:
            raise
        if flags & os.O_CREAT:
            # The kernel creates the file before it finds that it cannot open it so.
            Path(path).unlink(missing_ok=True)
        if direct_io == "required":
            raise StoreIOError(
                f"cannot open '{path}' with O_DIRECT: {error.strerror} [EINVAL]; its file system cannot bypass "
                "the page cache: use a local disk (ext4, xfs, btrfs) or a block device, or allow buffered I/O "
                "with direct_io=optional",
                errno.EINVAL,
                path,
            ) from error
    return (
        _open(path, flags),
        False,
        [f"'{path}' cannot do O_DIRECT: reads and writes go through the page cache"],
    )


def _open(path: str, flags: int) -> int:
    try:
        return _open_when_free(path, flags)
    except OSError as error:
        remedies = {
            errno.EBUSY: "it is mounted, or in use by RAID, LVM, swap or another program: release it, or give "
            "another device",
            errno.EACCES: "give a path that this user may write, or open the store read-only",
            errno.EPERM: "give a path that this user may write, or open the store read-only",
            errno.EROFS: "the file system is read-only: give another path, or open the store read-only",
            errno.ENOSPC: "the disk is full: free space or give another path",
        }
        remedy = remedies.get(error.errno or 0, "check the path")
        raise StoreIOError.of("open store", path, error, remedy) from error


def _open_when_free(path: str, flags: int) -> int:
    """Opens ``path``. A killed process holds its device until the kernel has finished its I/O: wait for that."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno != errno.EBUSY or filesystem.is_mounted(path) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _check_not_memory(member: Member, direct_io: DirectIo) -> None:
    if member.file_system in filesystem.IN_MEMORY and direct_io == "required":
        raise StoreError(
            f"'{member.path}' is on {member.file_system}, which is memory, not a disk; give a path on an SSD, or "
            "allow it with direct_io=optional"
        )
    if member.file_system in filesystem.IN_MEMORY:
        member.direct = False
        member.notes.append(f"'{member.path}' is on {member.file_system}: the store takes memory, not disk")


def _lock(member: Member, shared: bool) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(member.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = filesystem.lock_holder(member.fd)
            alive = holder is not None and Path(f"/proc/{holder}/exe").exists()
            if alive or time.monotonic() > deadline:
                who = f"process {holder}" if holder else "another process"
                raise StoreError(
                    f"store '{member.path}' is in use by {who}; close it there first, one process per store"
                ) from None
            time.sleep(0.02)
        except OSError as error:
            raise StoreIOError.of("lock store", member.path, error, "its file system cannot lock") from error


def _check_still_there(member: Member) -> None:
    """Refuses a file that was replaced or removed while we waited for its lock: what is written to it is lost."""
    if not member.is_block_device and os.fstat(member.fd).st_nlink == 0:
        raise StoreError(f"store '{member.path}' was replaced or removed a moment ago; try again")


def _is_directory(path: PathLike) -> bool:
    try:
        return Path(path).is_dir()
    except OSError:
        # Not ours to see; opening it tells why.
        return False


def _stat(path: str) -> os.stat_result | None:
    try:
        return Path(path).stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreIOError.of("open store", path, error, "check the path and its permissions") from error


def _full(member: Member, needed: int, available: int, error: OSError | None) -> StoreIOError:
    code = errno.ENOSPC if error is None or error.errno is None else error.errno
    return StoreIOError(
        f"cannot reserve {needed:,} bytes ({format_bytes(needed)}) for store '{member.path}': {available:,} bytes "
        f"({format_bytes(available)}) are free; free space, give another path, or make the store smaller",
        code,
        member.path,
    )
