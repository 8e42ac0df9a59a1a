# SPDX-License-Identifier: Apache-2.0
"""Recognises what is already on a device, so that nothing of the user's is overwritten. Pure.

Offsets and magic numbers are those of util-linux's libblkid. What is not recognised but not blank counts too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Signature:
    """Bytes that identify a format; a negative offset counts from the end of the device."""

    name: str
    offset: int
    magic: bytes


HEAD_BYTES = 256 * 1024
TAIL_BYTES = 128 * 1024

SIGNATURES = (
    Signature("an ext2/3/4 file system", 1080, b"\x53\xef"),
    Signature("an XFS file system", 0, b"XFSB"),
    Signature("a btrfs file system", 65536 + 64, b"_BHRfS_M"),
    Signature("an F2FS file system", 1024, b"\x10\x20\xf5\xf2"),
    Signature("a bcachefs file system", 4096 + 24, bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81")),
    Signature("a bcache device", 4096 + 24, bytes.fromhex("c68573f66e1a45ca8265f57f48ba6d81")),
    Signature("an NTFS file system", 3, b"NTFS    "),
    Signature("an exFAT file system", 3, b"EXFAT   "),
    Signature("a FAT32 file system", 82, b"FAT32   "),
    Signature("a FAT16 file system", 54, b"FAT16   "),
    Signature("a FAT12 file system", 54, b"FAT12   "),
    Signature("a SquashFS file system", 0, b"hsqs"),
    Signature("an EROFS file system", 1024, b"\xe2\xe1\xf5\xe0"),
    Signature("a JFS file system", 32768, b"JFS1"),
    Signature("a ReiserFS file system", 65536 + 52, b"ReIsEr"),
    Signature("an ISO 9660 image", 32769, b"CD001"),
    Signature("a LUKS container", 0, b"LUKS\xba\xbe"),
    Signature("an LVM physical volume", 512 + 24, b"LVM2 001"),
    Signature("an LVM physical volume", 24, b"LVM2 001"),
    Signature("a Linux RAID member", 4096, b"\xfc\x4e\x2b\xa9"),
    Signature("a Linux RAID member", 0, b"\xfc\x4e\x2b\xa9"),
    Signature("a Linux RAID member", -8192, b"\xfc\x4e\x2b\xa9"),
    Signature("a Linux RAID member", -65536, b"\xfc\x4e\x2b\xa9"),
    Signature("swap space", 4096 - 10, b"SWAPSPACE2"),
    Signature("swap space", 8192 - 10, b"SWAPSPACE2"),
    Signature("swap space", 16384 - 10, b"SWAPSPACE2"),
    Signature("swap space", 65536 - 10, b"SWAPSPACE2"),
    Signature("a ZFS pool", 128 * 1024, b"\x0c\xb1\xba\x00\x00\x00\x00\x00"),
    Signature("a Ceph BlueStore device", 0, b"bluestore block device"),
    Signature("a GPT partition table", 512, b"EFI PART"),
    Signature("a GPT partition table", 4096, b"EFI PART"),
    Signature("a GPT partition table", -512, b"EFI PART"),
    Signature("a GPT partition table", -4096, b"EFI PART"),
    Signature("an MBR partition table or boot sector", 510, b"\x55\xaa"),
)


#: What is not blank and not recognised.
UNKNOWN = "data of an unknown kind"


def foreign_signature(head: bytes, tail: bytes) -> str | None:
    """Returns what the first ``HEAD_BYTES`` and last ``TAIL_BYTES`` show, or None when they are blank.

    A ZFS label repeats its uberblock at many offsets; the first is enough to look at, for a device whose first
    256 KiB are not blank is refused anyway.
    """
    for signature in SIGNATURES:
        if signature.offset >= 0:
            found = head[signature.offset : signature.offset + len(signature.magic)]
        else:
            start = len(tail) + signature.offset
            found = tail[start : start + len(signature.magic)] if start >= 0 else b""
        if found == signature.magic:
            return signature.name
    if any(head) or any(tail):
        return UNKNOWN
    return None
