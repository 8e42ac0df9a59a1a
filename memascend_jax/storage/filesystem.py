# SPDX-License-Identifier: Apache-2.0
"""The Linux calls about files and block devices that Python's ``os`` lacks, each with its errno kept."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

_FILE_SYSTEMS = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xCA451A4E: "bcachefs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlay",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x65735546: "fuse",
    0x01021997: "9p",
    0x73717368: "squashfs",
}
#: File systems whose files are memory: a store there would fill the memory it is meant to save.
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
#: File systems that write every change to a new place: reserving space does not reserve overwrites.
COPY_ON_WRITE = frozenset({"btrfs", "bcachefs", "zfs"})

_FS_IOC_GETFLAGS = 0x80086601
_FS_IOC_SETFLAGS = 0x40086602
_FS_NOCOW_FL = 0x00800000
_BLKROGET = 0x125E
_BLKSSZGET = 0x1268
_BLKDISCARD = 0x1277
_KEEP_SIZE, _PUNCH_HOLE, _ZERO_RANGE = 1, 2, 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]


def file_system(fd: int) -> str:
    """Returns the name of the file system that ``fd`` is on: ``"ext4"``, or its magic number in hex."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.fstatfs(fd, buffer) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # f_type is the first member, a word wide; the magic numbers are 32 bits.
    magic = struct.unpack_from("<I", buffer)[0]
    return _FILE_SYSTEMS.get(magic, f"0x{magic:x}")


def reserve(fd: int, nbytes: int) -> None:
    """Reserves bytes ``[0, nbytes)`` of a regular file, so that a full disk is found now.

    ``posix_fallocate`` is not used: where the file system cannot reserve, it writes every block instead.

    Raises:
        OSError: ENOSPC, EOPNOTSUPP, …; the file may have grown.
    """
    while _libc.fallocate(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code != 4:  # EINTR
            raise OSError(code, os.strerror(code))


def set_no_copy_on_write(fd: int) -> bool:
    """Asks that overwrites of an empty file stay in place (btrfs); returns whether they will."""
    try:
        flags = bytearray(8)
        fcntl.ioctl(fd, _FS_IOC_GETFLAGS, flags)
        value = struct.unpack("<q", flags)[0] | _FS_NOCOW_FL
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("<q", value))
    except OSError:
        return False
    return True


def sector_bytes(fd: int) -> int:
    """Returns the logical sector of a block device in bytes."""
    value = bytearray(4)
    fcntl.ioctl(fd, _BLKSSZGET, value)
    return int(struct.unpack("<i", value)[0])


def is_read_only(fd: int) -> bool:
    """Returns whether the kernel refuses writes to a block device (``blockdev --setro``, a write-protected drive)."""
    value = bytearray(4)
    fcntl.ioctl(fd, _BLKROGET, value)
    return bool(struct.unpack("<i", value)[0])


def discard(fd: int, begin: int, end: int) -> bool:
    """Tells a block device that ``[begin, end)`` holds nothing; returns whether it took the hint."""
    try:
        fcntl.ioctl(fd, _BLKDISCARD, struct.pack("<QQ", begin, end - begin))
    except OSError:
        return False
    return True


def is_mounted(path: str) -> bool:
    """Returns whether the block device at ``path`` is mounted, as far as this process sees mounts."""
    number = os.stat(path).st_rdev  # noqa: PTH116 - one call, no object
    mine = f"{os.major(number)}:{os.minor(number)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8") as mounts:
            return any(line.split()[2] == mine for line in mounts)
    except OSError:
        return False


def punch(fd: int, nbytes: int) -> bool:
    """Gives the disk space of bytes ``[0, nbytes)`` of a file back; returns whether the file system can.

    A file system mounted with ``discard`` passes it on to the SSD. The bytes read as zeros afterwards.
    """
    return bool(_libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, 0, nbytes) == 0)


def zero(fd: int, begin: int, end: int) -> bool:
    """Makes bytes ``[begin, end)`` of a file read as zeros while they stay reserved; returns whether that was done.

    Not a write: the file system marks the extents as holding nothing.
    """
    return bool(_libc.fallocate(fd, _ZERO_RANGE | _KEEP_SIZE, begin, end - begin) == 0)


def lock_holder(fd: int) -> int | None:
    """Returns the process that holds a ``flock`` on the file behind ``fd``, if the kernel tells."""
    status = os.fstat(fd)
    key = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        with open("/proc/locks", encoding="ascii") as locks:
            for line in locks:
                fields = line.split()
                if "FLOCK" in fields and key in fields and "->" not in fields:
                    return int(fields[4])
    except (OSError, ValueError, IndexError):
        return None
    return None
