# SPDX-License-Identifier: Apache-2.0
"""From a path to a source: what a file is by its first bytes, and which files of a folder belong together."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memascend_jax.data.arrow_batches import FILE_MAGIC, STREAM_MAGIC
from memascend_jax.data.file_bytes import AnyBytes, FileBytes
from memascend_jax.data.jsonl import JsonLines
from memascend_jax.data.plain_text import PlainText
from memascend_jax.data.source import Joined, Source
from memascend_jax.data.tables import open_arrow, open_parquet
from memascend_jax.data.unpack import Unpacker, elements, gunzip
from memascend_jax.errors import DataError

#: Ends of names of files that are trained as they are.
_TEXT_NAMES = (".txt", ".text", ".md", ".rst")
_DATA_NAMES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", *_TEXT_NAMES)
_OTHERS = {
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"PK\x03\x04": ("zip", "unzip"),
}
_SHOWN = 5


def open_source(path: str, kind: str, unpacker: Unpacker, key: str = "data.source") -> Source:
    """Returns the examples of a file, a folder, or all files that a pattern such as ``data/*.jsonl`` names.

    Args:
        kind: of the records; ``text`` lets any file be plain text.
        key: of the configuration that names it.

    Raises:
        DataError: nothing is there, or nothing that is data.
    """
    place = Path(path).expanduser()
    files = _files(place, key)
    opened = [_open_file(file, kind, unpacker, key) for file in files]
    forms = {source.form for source in opened}
    if len(forms) > 1:
        for source in opened:
            source.close()
        first = {source.form: source.name for source in reversed(opened)}
        kinds = "; ".join(f"'{name}' is {form}" for form, name in sorted(first.items()))
        raise DataError(
            f"'{path}' names files of several kinds: {kinds}; name those of one kind, as {place}/*.jsonl, or each of "
            "them in data.sources"
        )
    return opened[0] if len(opened) == 1 else Joined(path, opened)


def _files(place: Path, key: str) -> list[Path]:
    if place.is_dir():
        return _files_of_folder(place, key)
    if not place.exists() and glob.has_magic(str(place)):
        found = sorted(Path(name) for name in glob.glob(str(place), recursive=True))  # noqa: PTH207 (any place)
        if not found:
            raise DataError(f"no file is named '{place}'; set {key}")
        return [file for file in found if file.is_file()] or _nothing(place, key)
    return [place]


def _files_of_folder(folder: Path, key: str) -> list[Path]:
    splits = _json(folder / "dataset_dict.json").get("splits")
    if splits is not None:
        if "train" not in splits:
            raise _without_train(folder, [f"{folder}/{name}" for name in splits], key)
        return _files_of_folder(folder / "train", key)
    state = _json(folder / "state.json")
    if "_data_files" in state:
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise DataError(
                f"the dataset in '{folder}' has a table of indices beside its rows, which is not read; save it again "
                "with a newer version of datasets, which leaves none"
            )
        return [folder / entry["filename"] for entry in state["_data_files"]]
    found = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and file.name.removesuffix(".gz").endswith(_DATA_NAMES)
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and not _is_about(file)
    )
    return _train_files(folder, found, key) if found else _nothing(folder, key)


def _is_about(file: Path) -> bool:
    """Whether a file says something about data, rather than being some."""
    return file.stem.lower() in ("readme", "license", "dataset_info", "dataset_infos", "state")


def _train_files(folder: Path, files: list[Path], key: str) -> list[Path]:
    """Those of the split ``train``, where names or folders tell splits apart as ``datasets`` does."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        words = "/".join(file.relative_to(folder).parts).replace("_", "-").replace(".", "-").replace("/", "-")
        split = next((word for word in words.split("-") if word in _SPLITS), "")
        splits.setdefault(_SPLITS.get(split, ""), []).append(file)
    if set(splits) <= {""} or set(splits) == {"train"}:
        return files
    if "train" not in splits:
        raise _without_train(folder, [str(some[0]) for name, some in sorted(splits.items()) if name], key)
    return splits["train"]


_SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
}


def _without_train(folder: Path, names: list[str], key: str) -> DataError:
    shown = ", ".join(names[:_SHOWN])
    return DataError(
        f"the dataset in '{folder}' has several splits, and none is called train: {shown}; name one: {key}={names[0]}"
    )


def _nothing(place: Path, key: str) -> list[Path]:
    there = sorted(file.name for file in place.iterdir())[:_SHOWN] if place.is_dir() else []
    holds = f"holds {', '.join(there)}" if there else "is empty"
    raise DataError(
        f"there is no data in '{place}': it {holds}; expected files that end in {', '.join(_DATA_NAMES)} (or .gz), or a"
        f" dataset that datasets saved; set {key}"
    )


def _open_file(path: Path, kind: str, unpacker: Unpacker, key: str) -> Source:
    if path.is_dir():
        raise DataError(f"'{path}' is a folder within a folder; name it itself: {key}={path}")
    if path.exists() and not path.is_file():
        raise DataError(
            f"the data file '{path}' is no regular file; set {key} to one that can be read anywhere"
        )
    content = FileBytes(path, key=key)
    first = content.read(0, 16)
    if first[:4] == b"PAR1":
        return open_parquet(content)
    if first.startswith((FILE_MAGIC, STREAM_MAGIC)):
        return open_arrow(content)
    for magic, (name, command) in _OTHERS.items():
        if first.startswith(magic):
            raise DataError(
                f"the data file '{path}' is packed with {name}; unpack it ({command}), or use gzip"
            )
    name = path.name
    readable: AnyBytes = content
    if first[:2] == b"\x1f\x8b":
        readable, name = unpacker.unpacked(content, gunzip), name.removesuffix(".gz")
    return _text_or_json(readable, name, kind, unpacker)


def _text_or_json(content: AnyBytes, name: str, kind: str, unpacker: Unpacker) -> Source:
    if not content.size:
        raise DataError(f"the data file '{content.shown}' is empty")
    first = content.read(0, 1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if name.endswith(_TEXT_NAMES) or (kind == "text" and first not in (b"{", b"[")):
        return PlainText(content)
    if first == b"[":
        lines = unpacker.unpacked(content, elements)
        if not lines.size:
            raise DataError(f"the data file '{content.shown}' is empty: its array has no element")
        return JsonLines(lines, _element_of(content.shown))
    return JsonLines(content)


def _element_of(shown: str) -> Callable[[int], str]:
    return lambda number: f"{shown}: element {number}"


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read '{path}', which says what the dataset holds: {error}") from error
    return value if isinstance(value, dict) else {}
