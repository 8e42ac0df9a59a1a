# SPDX-License-Identifier: Apache-2.0
"""The memory limit that a container or a service manager put on this process (cgroup v1 and v2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

#: v1 writes "no limit" as the largest page-aligned signed number.
_UNLIMITED_V1 = 1 << 62
_USAGE = {1: "memory.usage_in_bytes", 2: "memory.current"}
_LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """One memory cgroup.

    Attributes:
        limit_bytes: the most its processes may use together, or use without being slowed down (``memory.high``);
            None without a limit.
        usage_bytes: what they use, page cache included.
        reclaimable_bytes: page cache in it that the kernel gives up under pressure.
    """

    limit_bytes: int | None
    usage_bytes: int
    reclaimable_bytes: int

    @property
    def available_bytes(self) -> int | None:
        """What can still be taken before the limit is hit; None without a limit."""
        if self.limit_bytes is None:
            return None
        return max(self.limit_bytes - self.usage_bytes + self.reclaimable_bytes, 0)


def usage_file(root: Path = Path("/")) -> Path | None:
    """Returns where the usage of the process's innermost memory cgroup stands, in bytes; None outside one.

    Found once it is cheap enough to be sampled. ``root`` as for ``memory_cgroups``.
    """
    for chain, version in _chains(root):
        for folder in chain:
            if (folder / _USAGE[version]).is_file():
                return folder / _USAGE[version]
    return None


def pressure_file(root: Path = Path("/")) -> Path | None:
    """Returns where the stalls of the process's memory cgroup stand; None outside one, and in version 1."""
    for chain, version in _chains(root):
        if version == 2 and (chain[0] / "memory.pressure").is_file():
            return chain[0] / "memory.pressure"
    return None


def memory_cgroups(root: Path = Path("/")) -> list[CgroupMemory]:
    """Returns the memory cgroup of this process and all its ancestors, innermost first; any may be the tight one.

    Args:
        root: where ``/proc`` and the cgroup mounts are looked for; another folder in tests.
    """
    for chain, version in _chains(root):
        found = [group for group in (_read_group(path, version) for path in chain) if group is not None]
        if found:
            return found
    return []


def _chains(root: Path) -> Iterator[tuple[list[Path], int]]:
    """Yields (this process's folder and its ancestors, version) for each hierarchy that may control memory."""
    for folder, mount_point, version in _own_folders(root):
        yield [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount_point))], version


def _own_folders(root: Path) -> Iterator[tuple[Path, Path, int]]:
    """Yields (this process's folder, mount point, version) for each hierarchy that may control memory."""
    paths = _cgroup_paths(root)
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, tail = line.partition(" - ")
        kind, _, options = (tail.split(" ") + ["", "", ""])[:3]
        mount_root, mount_point = fields.split(" ")[3:5]
        if kind == "cgroup2":
            path, version = paths.get(""), 2
        elif kind == "cgroup" and "memory" in options.split(","):
            path, version = paths.get("memory"), 1
        else:
            continue
        if path is None:
            continue
        mounted_at = root / mount_point.lstrip("/")
        # In a container the path may be told from the host's root: then only the mount point is ours.
        inside = PurePosixPath(path).is_relative_to(mount_root)
        relative = PurePosixPath(path).relative_to(mount_root) if inside else PurePosixPath()
        folder = mounted_at / relative
        yield (folder if folder.is_dir() else mounted_at), mounted_at, version


def _cgroup_paths(root: Path) -> dict[str, str]:
    """Returns the path of this process in each hierarchy, by controller; "" is the v2 hierarchy."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _read_group(folder: Path, version: int) -> CgroupMemory | None:
    usage = read_number(folder / _USAGE[version])
    if usage is None:
        return None  # the root group of v2 has no such files
    statistics = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    reclaimable = statistics.get("inactive_file" if version == 2 else "total_inactive_file", "0")
    limits = [read_number(folder / name) for name in _LIMITS[version]]
    limit = min((known for known in limits if known is not None and known < _UNLIMITED_V1), default=None)
    return CgroupMemory(limit, usage, int(reclaimable))


def read_number(path: Path) -> int | None:
    """Returns the number that a file of the kernel holds; None when it holds none, or is not there."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
