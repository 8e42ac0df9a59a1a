# SPDX-License-Identifier: Apache-2.0
"""Writes a Hugging Face folder from tensors that are read one piece at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.safetensors_file import header_bytes
from memascend_jax.checkpoints.source import PIECE_BYTES
from memascend_jax.dtypes import dtype_name, to_dtype
from memascend_jax.errors import ConfigError, DataError
from memascend_jax.models.shapes import LlamaConfig, TensorShape
from memascend_jax.observe.failure import is_disk_full
from memascend_jax.storage.partial import partial_path, remove, remove_leftovers, sync_folder

#: Returns ``n`` elements of a tensor from a flat start: ``read(name, start, n)``.
Read = Callable[[str, int, int], NDArray[Any]]


def export_huggingface(
    read: Read,
    shapes: Sequence[TensorShape],
    dtype: str,
    config: LlamaConfig,
    files: Mapping[str, bytes],
    out_dir: Path,
    *,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Leaves a folder ``out_dir`` that transformers loads, or, when it fails, nothing.

    The folder is written under a temporary name beside ``out_dir`` and renamed when all of it is on disk.

    Args:
        read: the source of the elements, in ``dtype``; at most 8 MiB are asked for at a time.
        shapes: the tensors, in the order in which they are written.
        dtype: our name of the weights' dtype.
        config: the model's shape, used where ``files`` has no ``config.json``.
        files: what lies beside the weights, from ``Checkpoint.export_files``.
        out_dir: must not exist.
        max_shard_bytes: a shard is at most this large, but holds at least one tensor.

    Raises:
        ConfigError: ``out_dir`` exists, or cannot be made.
        DataError: ``read`` returns another dtype or count than asked for.
        OSError: the disk is full or fails, with the path.
    """
    partial = partial_path(out_dir)
    try:
        if out_dir.exists():
            raise ConfigError(
                f"cannot export to '{out_dir}': it exists already. Move it away, or choose another place."
            )
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(out_dir)
        partial.mkdir()
    except OSError as error:
        if is_disk_full(error):
            raise
        raise ConfigError(
            f"cannot export to '{out_dir}': {error.strerror}. Choose a place you may write to."
        ) from error
    try:
        _write_weights(read, shapes, dtype, partial, max_shard_bytes)
        for name, content in _with_config(files, config, dtype).items():
            _write_bytes(partial / name, content)
        sync_folder(partial)
        partial.rename(out_dir)
    except BaseException:
        remove(partial)
        raise
    sync_folder(out_dir.parent)


def _with_config(files: Mapping[str, bytes], config: LlamaConfig, dtype: str) -> dict[str, bytes]:
    """``files`` with a ``config.json`` that names the weights' dtype, by its older key and its newer one."""
    base = json.loads(files["config.json"]) if "config.json" in files else config.to_hf()
    text = json.dumps(base | {"dtype": dtype, "torch_dtype": dtype}, indent=2, sort_keys=True) + "\n"
    return {**files, "config.json": text.encode()}


def _write_weights(
    read: Read, shapes: Sequence[TensorShape], dtype: str, folder: Path, max_shard_bytes: int
) -> None:
    shards = _shards(shapes, to_dtype(dtype).itemsize, max_shard_bytes)
    if len(shards) == 1:
        _write_shard(read, shards[0], dtype, folder / "model.safetensors")
        return
    home: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(read, shard, dtype, folder / name)
        home |= {tensor.name: name for tensor in shard}
    total = sum(tensor.elements for tensor in shapes) * to_dtype(dtype).itemsize
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": home}, indent=2) + "\n"
    _write_bytes(folder / "model.safetensors.index.json", index.encode())


def _shards(shapes: Sequence[TensorShape], itemsize: int, max_shard_bytes: int) -> list[list[TensorShape]]:
    shards: list[list[TensorShape]] = [[]]
    room = max_shard_bytes
    for tensor in shapes:
        nbytes = tensor.elements * itemsize
        if shards[-1] and nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= nbytes
    return shards


def _write_shard(read: Read, shard: Sequence[TensorShape], dtype: str, path: Path) -> None:
    step = PIECE_BYTES // to_dtype(dtype).itemsize

    def content(file: BinaryIO) -> None:
        file.write(header_bytes([(tensor.name, dtype, tensor.shape) for tensor in shard]))
        for tensor in shard:
            for start in range(0, tensor.elements, step):
                count = min(step, tensor.elements - start)
                piece = read(tensor.name, start, count)
                if dtype_name(piece.dtype) != dtype or piece.size != count:
                    raise DataError(
                        f"cannot export tensor '{tensor.name}': expected {count:,} elements of {dtype} from element "
                        f"{start:,}, got {piece.size:,} of {piece.dtype}"
                    )
                file.write(piece.reshape(-1).view(np.uint8).data)

    _write(path, content)


def _write_bytes(path: Path, content: bytes) -> None:
    _write(path, lambda file: file.write(content))


def _write(path: Path, content: Callable[[BinaryIO], object]) -> None:
    """Writes ``content`` to ``path`` and to the disk; a failure names the path."""
    try:
        with open(path, "wb") as file:
            content(file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, f"cannot write the export: {error.strerror}", str(path)) from error
