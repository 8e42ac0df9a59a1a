# SPDX-License-Identifier: Apache-2.0
"""A store that takes long to fill: it has its name when it is whole, else it is gone. jax-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from memascend_jax.errors import StoreError
from memascend_jax.observe.screen import Screen
from memascend_jax.recipes.planning import disk_free_bytes
from memascend_jax.storage.capacity import bytes_needed
from memascend_jax.storage.device import block_device_bytes
from memascend_jax.storage.formatting import has_superblock
from memascend_jax.storage.partial import partial_path, remove, remove_leftovers, sync_folder
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore
from memascend_jax.units import format_bytes


@contextmanager
def new_store(
    specs: Sequence[TensorSpec],
    paths: Sequence[str],
    screen: Screen,
    *,
    scratch_bytes: int = 0,
    weights: Sequence[int] | None = None,
    like: TensorStore | None = None,
    replaces: bool = False,
) -> Iterator[tuple[TensorStore, int]]:
    """Yields a new store for ``specs`` and its bytes on disk; the block fills and commits it.

    Files are made under a hidden name and renamed when the block has ended; killed before, they are removed by the
    next attempt. A block device holds a store without any generation until then.

    Args:
        paths: of the members, as ``resolve_paths`` returns them.
        like: a store whose identity, durability and blocks this one has.
        replaces: what is at the path is replaced, which must be one file.

    Raises:
        StoreError: there is something at a path, or no room; told before the first byte, with how much it takes.
    """
    shares, final = list(weights or [1] * len(paths)), [Path(path) for path in paths]
    files = [path for path in final if block_device_bytes(str(path)) is None]
    for path in files:
        if path.exists() and not replaces:
            what = "a store" if has_superblock(str(path)) else "something"
            raise StoreError(
                f"cannot make a store at '{path}': there is {what} already; nothing was changed. Choose another place, "
                "or move it away"
            )
        if path.parent.is_dir():
            remove_leftovers(path)
    made = [partial_path(path) if path in files else path for path in final]
    durability, block_bytes = (like.durability, like.block_bytes) if like else ("step", 4096)
    nbytes = bytes_needed(specs, scratch_bytes, durability, block_bytes=block_bytes, weights=shares)
    _check_room(paths, nbytes, disk_free_bytes(made), screen, replaces)
    store = TensorStore.create(
        [str(path) for path in made],
        specs=specs,
        scratch_bytes=scratch_bytes,
        durability=durability,
        block_bytes=block_bytes,
        weights=shares,
        direct_io="optional",
        continues=like,
    )
    try:
        yield store, nbytes
        store.close()
        for source, path in zip(made, final, strict=True):
            if source != path:
                source.rename(path)
                sync_folder(path.parent)
    except BaseException:
        store.close()
        for path in made:
            if path not in final:
                remove(path)
        raise


def _check_room(paths: Sequence[str], nbytes: int, free: int | None, screen: Screen, replaces: bool) -> None:
    screen.say(
        f"the new store takes {format_bytes(nbytes)}"
        + ("" if free is None else f", {format_bytes(free)} are free")
        + ("; the old one goes when it is whole" if replaces else "")
    )
    if free is not None and nbytes > free:
        raise StoreError(
            f"cannot make the store '{', '.join(paths)}': it takes {nbytes:,} bytes ({format_bytes(nbytes)}), "
            f"{free:,} ({format_bytes(free)}) are free; nothing was changed. Free space, or choose another place"
        )
