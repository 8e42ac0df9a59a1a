# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a model go into which file, in which order, and the index that says so. Pure.

A model that came in files keeps them: their names, and which tensors each holds, are in the index that came with it.
Within a file tensors lie as the ``safetensors`` package lays them: the widest types first, then by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from memascend_jax.checkpoints.model_files import WEIGHTS, is_plain_name
from memascend_jax.dtypes import to_dtype

#: Hugging Face's own default.
MAX_SHARD_BYTES = 5 * 10**9
#: The order of the package's types; what is not here comes last.
_RANK = ("float64", "uint64", "int64", "float32", "uint32", "int32", "bfloat16", "float16", "uint16", "int16")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write, under the name that ``read`` knows; ``dtype`` is our name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * to_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The files of a model: tensors in order by file name; ``index`` is None for a single file."""

    files: dict[str, list[Entry]]
    index: bytes | None


def plan_shards(
    entries: Sequence[Entry], index: bytes | None = None, max_shard_bytes: int | None = None
) -> ShardLayout:
    """Returns the files that ``entries`` go into.

    Args:
        index: of the files that the model came in, a ``model.safetensors.index.json``; None, or one that makes no
            sense: there is none.
        max_shard_bytes: a file is at most this large, but holds at least one tensor, and ``index`` decides nothing;
            None: as the index says, else 5 GB.
    """
    found = _read_index(index) if max_shard_bytes is None else None
    if found is not None:
        return _as_before(entries, found)
    shards = _by_size(entries, MAX_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes)
    if len(shards) == 1:
        return ShardLayout({WEIGHTS: _ordered(shards[0])}, None)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    home = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    files = {name: _ordered(shard) for name, shard in zip(names, shards, strict=True)}
    return ShardLayout(files, _index_text({}, home, entries))


def _read_index(index: bytes | None) -> dict[str, Any] | None:
    if index is None:
        return None
    try:
        found = json.loads(index)
        files = found["weight_map"].values()
        makes_sense = files and all(is_plain_name(name) for name in files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return found if makes_sense else None


def _as_before(entries: Sequence[Entry], index: dict[str, Any]) -> ShardLayout:
    before: dict[str, str] = index["weight_map"]
    # A tensor that the model did not have goes to the last file, as a head does.
    last = max(before.values())
    by_name = {entry.name: entry for entry in entries}
    home = {name: file for name, file in before.items() if name in by_name}
    home |= {name: last for name in by_name if name not in home}
    files: dict[str, list[Entry]] = {}
    for name, file in home.items():
        files.setdefault(file, []).append(by_name[name])
    metadata = index.get("metadata")
    text = _index_text(metadata if isinstance(metadata, dict) else {}, home, entries)
    return ShardLayout({file: _ordered(files[file]) for file in sorted(files)}, text)


def _index_text(metadata: dict[str, Any], home: dict[str, str], entries: Sequence[Entry]) -> bytes:
    facts = {**metadata, "total_size": sum(entry.nbytes for entry in entries)}
    if "total_parameters" in metadata:
        facts["total_parameters"] = sum(entry.elements for entry in entries)
    return (json.dumps({"metadata": facts, "weight_map": home}, indent=2) + "\n").encode()


def _by_size(entries: Sequence[Entry], max_shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    room = max_shard_bytes
    for entry in entries:
        if shards[-1] and entry.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(entry)
        room -= entry.nbytes
    return shards


def _ordered(entries: Sequence[Entry]) -> list[Entry]:
    def place(entry: Entry) -> tuple[int, str]:
        return (_RANK.index(entry.dtype) if entry.dtype in _RANK else len(_RANK), entry.name)

    return sorted(entries, key=place)
