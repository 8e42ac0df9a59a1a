# SPDX-License-Identifier: Apache-2.0
"""Writes a Hugging Face folder from tensors that are read one piece at a time."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.model_files import CONFIG, INDEX
from memascend_jax.checkpoints.safetensors_file import header_bytes
from memascend_jax.checkpoints.shard_layout import Entry, ShardLayout, plan_shards
from memascend_jax.checkpoints.source import PIECE_BYTES
from memascend_jax.checkpoints.stream_file import StreamFile
from memascend_jax.dtypes import dtype_name, to_dtype
from memascend_jax.errors import ConfigError, DataError
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import TensorShape
from memascend_jax.observe.failure import is_disk_full
from memascend_jax.storage.ahead import ahead
from memascend_jax.storage.partial import partial_path, remove, remove_leftovers, sync_folder
from memascend_jax.units import format_bytes

#: Returns ``n`` elements of a tensor from a flat start: ``read(name, start, n)``.
Read = Callable[[str, int, int], NDArray[Any]]


def export_huggingface(
    read: Read,
    shapes: Sequence[TensorShape],
    dtype: str | Mapping[str, str],
    config: ModelConfig,
    files: Mapping[str, bytes],
    out_dir: Path,
    *,
    max_shard_bytes: int | None = None,
    on_tensor: Callable[[str], None] = lambda name: None,
) -> int:
    """Leaves a folder ``out_dir`` that transformers loads, or, when it fails, nothing; returns its bytes.

    The folder is written under a temporary name beside ``out_dir`` and renamed when all of it is on disk.

    Args:
        read: the source of the elements, in ``dtype``; at most 8 MiB are asked for at a time, from one thread.
        shapes: the tensors.
        dtype: our name of the weights' dtype, or of each tensor's.
        config: the model's shape, used where ``files`` has no ``config.json``.
        files: what lies beside the weights, from ``Checkpoint.export_files``; an index among them says which files
            they came in, and go to again.
        out_dir: must not exist.
        max_shard_bytes: see ``plan_shards``.
        on_tensor: called after each tensor, for progress.

    Raises:
        ConfigError: ``out_dir`` exists, or cannot be made.
        DataError: ``read`` returns another dtype or count than asked for.
        OSError: the disk has no room for all of it, which is found before the first byte, is full or fails, with the
            path.
    """
    types = dict.fromkeys((shape.name for shape in shapes), dtype) if isinstance(dtype, str) else dtype
    entries = [Entry(shape.name, types[shape.name], shape.shape) for shape in shapes]
    layout = plan_shards(entries, files.get(INDEX), max_shard_bytes)
    # What a mixture is called by: the type of most of it.
    texts = _with_config(files, config, dtype if isinstance(dtype, str) else _main_dtype(entries))
    return write_folder(
        entries,
        texts,
        out_dir,
        lambda folder: _write_weights(read, layout, folder, on_tensor),
    )


def write_folder(
    entries: Sequence[Entry], texts: Mapping[str, bytes], out_dir: Path, write_weights: Callable[[Path], None]
) -> int:
    """Leaves a folder ``out_dir`` with ``texts`` and what ``write_weights`` writes, or nothing; returns its bytes.

    Raises:
        ConfigError, OSError: see ``export_huggingface``.
    """
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
        write_weights(partial)
        for name, content in texts.items():
            if name != INDEX:  # That of the weights, which is written with them.
                (partial / name).parent.mkdir(exist_ok=True)
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


def _main_dtype(entries: Iterable[Entry]) -> str:
    held: dict[str, int] = {}
    for entry in entries:
        held[entry.dtype] = held.get(entry.dtype, 0) + entry.elements
    return max(held, key=lambda name: held[name])


def _with_config(files: Mapping[str, bytes], config: ModelConfig, dtype: str) -> dict[str, bytes]:
    """``files`` with a ``config.json`` that names the weights' dtype, by its older key and its newer one.

    One that does already stays as it is, byte for byte.
    """
    base = json.loads(files[CONFIG]) if CONFIG in files else config.to_hf()
    named = [base[key] for key in ("dtype", "torch_dtype") if key in base]
    if CONFIG in files and named and all(name == dtype for name in named):
        return dict(files)
    text = json.dumps(base | {"dtype": dtype, "torch_dtype": dtype}, indent=2, sort_keys=True) + "\n"
    return {**files, CONFIG: text.encode()}


def _write_weights(read: Read, layout: ShardLayout, folder: Path, on_tensor: Callable[[str], None]) -> None:
    for name, shard in layout.files.items():
        write_shard(read, shard, folder / name, on_tensor)
    if layout.index is not None:
        _write_bytes(folder / INDEX, layout.index)


def write_shard(read: Read, shard: Sequence[Entry], path: Path, on_tensor: Callable[[str], None]) -> None:
    """Writes ``shard`` to a safetensors file; ``read`` and ``on_tensor`` as for ``export_huggingface``."""
    header = header_bytes([(entry.name, entry.dtype, entry.shape) for entry in shard])
    with StreamFile(path, len(header) + sum(entry.nbytes for entry in shard)) as file:
        file.write(header)
        for entry, end, piece in ahead(_pieces(read, shard)):
            file.write(piece)
            if end == entry.elements:
                on_tensor(entry.name)


def _pieces(read: Read, shard: Sequence[Entry]) -> Iterator[tuple[Entry, int, NDArray[Any]]]:
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
