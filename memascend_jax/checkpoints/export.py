# SPDX-License-Identifier: Apache-2.0
"""Writes a Hugging Face folder from tensors that are read one piece at a time."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.model_files import CONFIG
from memascend_jax.checkpoints.safetensors_file import header_bytes
from memascend_jax.checkpoints.source import PIECE_BYTES
from memascend_jax.checkpoints.stream_file import StreamFile
from memascend_jax.dtypes import dtype_name, to_dtype
from memascend_jax.errors import ConfigError, DataError
from memascend_jax.models.shapes import LlamaConfig, TensorShape
from memascend_jax.observe.failure import is_disk_full
from memascend_jax.storage.ahead import ahead
from memascend_jax.storage.partial import partial_path, remove, remove_leftovers, sync_folder
from memascend_jax.units import format_bytes

#: Returns ``n`` elements of a tensor from a flat start: ``read(name, start, n)``.
Read = Callable[[str, int, int], NDArray[Any]]
#: Hugging Face's own default.
MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor to write; ``dtype`` is our name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int

    @property
    def nbytes(self) -> int:
        return self.elements * to_dtype(self.dtype).itemsize


def export_huggingface(
    read: Read,
    shapes: Sequence[TensorShape],
    dtype: str | Mapping[str, str],
    config: LlamaConfig,
    files: Mapping[str, bytes],
    out_dir: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> int:
    """Leaves a folder ``out_dir`` that transformers loads, or, when it fails, nothing; returns its bytes.

    The folder is written under a temporary name beside ``out_dir`` and renamed when all of it is on disk.

    Args:
        read: the source of the elements, in ``dtype``; at most 8 MiB are asked for at a time, from one thread.
        shapes: the tensors, in the order in which they are written.
        dtype: our name of the weights' dtype, or of each tensor's.
        config: the model's shape, used where ``files`` has no ``config.json``.
        files: what lies beside the weights, from ``Checkpoint.export_files``.
        out_dir: must not exist.
        max_shard_bytes: a shard is at most this large, but holds at least one tensor.
        on_tensor: called after each tensor, for progress.

    Raises:
        ConfigError: ``out_dir`` exists, or cannot be made.
        DataError: ``read`` returns another dtype or count than asked for.
        OSError: the disk has no room for all of it, which is found before the first byte, is full or fails, with the
            path.
    """
    types = dict.fromkeys((shape.name for shape in shapes), dtype) if isinstance(dtype, str) else dtype
    entries = [_Entry(shape.name, types[shape.name], shape.shape, shape.elements) for shape in shapes]
    # What a mixture is called by: the type of most of it.
    texts = _with_config(files, config, dtype if isinstance(dtype, str) else _main_dtype(entries))
    nbytes = sum(entry.nbytes for entry in entries) + sum(map(len, texts.values()))
    partial = partial_path(out_dir)
    try:
        if out_dir.exists() or out_dir.is_symlink():
            raise ConfigError(
                f"cannot export to '{out_dir}': it exists already. Move it away, or choose another place."
            )
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(out_dir)
        _check_room(out_dir, nbytes)
        partial.mkdir()
    except OSError as error:
        if is_disk_full(error):
            raise
        raise ConfigError(
            f"cannot export to '{out_dir}': {error.strerror}. Choose a place you may write to."
        ) from error
    try:
        _write_weights(read, entries, partial, max_shard_bytes, on_tensor)
        for name, content in texts.items():
            _write_bytes(partial / name, content)
        sync_folder(partial)
        partial.rename(out_dir)
    except BaseException:
        remove(partial)
        raise
    sync_folder(out_dir.parent)
    return nbytes


def _check_room(out_dir: Path, nbytes: int) -> None:
    space = os.statvfs(out_dir.parent)
    free = space.f_bavail * space.f_frsize
    if nbytes > free:
        why = (
            f"cannot export {nbytes:,} bytes ({format_bytes(nbytes)}): there is no room; nothing was written"
        )
        raise OSError(errno.ENOSPC, why, str(out_dir))


def _main_dtype(entries: Iterable[_Entry]) -> str:
    held: dict[str, int] = {}
    for entry in entries:
        held[entry.dtype] = held.get(entry.dtype, 0) + entry.elements
    return max(held, key=lambda name: held[name])


def _with_config(files: Mapping[str, bytes], config: LlamaConfig, dtype: str) -> dict[str, bytes]:
    """``files`` with a ``config.json`` that names the weights' dtype, by its older key and its newer one."""
    base = json.loads(files[CONFIG]) if CONFIG in files else config.to_hf()
    text = json.dumps(base | {"dtype": dtype, "torch_dtype": dtype}, indent=2, sort_keys=True) + "\n"
    return {**files, CONFIG: text.encode()}


def _write_weights(
    read: Read,
    entries: Sequence[_Entry],
    folder: Path,
    max_shard_bytes: int,
    on_tensor: Callable[[str], None],
) -> None:
    shards = _shards(entries, max_shard_bytes)
    if len(shards) == 1:
        _write_shard(read, shards[0], folder / "model.safetensors", on_tensor)
        return
    home: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(read, shard, folder / name, on_tensor)
        home |= {entry.name: name for entry in shard}
    total = sum(entry.nbytes for entry in entries)
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": home}, indent=2) + "\n"
    _write_bytes(folder / "model.safetensors.index.json", index.encode())


def _shards(entries: Sequence[_Entry], max_shard_bytes: int) -> list[list[_Entry]]:
    shards: list[list[_Entry]] = [[]]
    room = max_shard_bytes
    for entry in entries:
        if shards[-1] and entry.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(entry)
        room -= entry.nbytes
    return shards


def _write_shard(read: Read, shard: Sequence[_Entry], path: Path, on_tensor: Callable[[str], None]) -> None:
    header = header_bytes([(entry.name, entry.dtype, entry.shape) for entry in shard])
    with StreamFile(path, len(header) + sum(entry.nbytes for entry in shard)) as file:
        file.write(header)
        for entry, end, piece in ahead(_pieces(read, shard)):
            file.write(piece)
            if end == entry.elements:
                on_tensor(entry.name)


def _pieces(read: Read, shard: Sequence[_Entry]) -> Iterator[tuple[_Entry, int, NDArray[Any]]]:
    """Every tensor's pieces, with the element that each ends at."""
    for entry in shard:
        step = PIECE_BYTES // to_dtype(entry.dtype).itemsize
        for start in range(0, entry.elements, step):
            count = min(step, entry.elements - start)
            piece = read(entry.name, start, count)
            if dtype_name(piece.dtype) != entry.dtype or piece.size != count:
                raise DataError(
                    f"cannot export tensor '{entry.name}': expected {count:,} elements of {entry.dtype} from element "
                    f"{start:,}, got {piece.size:,} of {piece.dtype}"
                )
            yield entry, start + count, np.ascontiguousarray(piece)


def _write_bytes(path: Path, content: bytes) -> None:
    """Writes ``content`` to ``path`` and to the disk; a failure names the path."""
    try:
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, f"cannot write the export: {error.strerror}", str(path)) from error
