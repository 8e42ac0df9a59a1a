# SPDX-License-Identifier: Apache-2.0
"""Models in Hugging Face's local cache, found by their name: ``org/name``. Nothing is fetched here, ever.

Layout of the cache: ``models--ORG--NAME/refs/REVISION`` holds a commit, ``models--ORG--NAME/snapshots/COMMIT`` the
files, as links to ``blobs``. A download that was broken off leaves links or files out.

Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memascend_jax.errors import DataError

#: Organisation and name, and a GGUF file of it where it has several.
_NAME = re.compile(
    r"(?P<org>[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*)(?:/(?P<file>[\w./-]+\.gguf))?", re.A
)
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub, as a user names it; ``file`` is one GGUF file of it, or empty."""

    repo: str
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Returns the name that ``text`` is, or None when it can only be a path."""
        match = _NAME.fullmatch(text)
        if match is None or ".." in text or "--" in text:
            return None
        return cls(f"{match['org']}/{match['name']}", match["file"] or "")


def cache_folder() -> Path:
    """Returns where Hugging Face's libraries keep models, by the same environment variables as theirs."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return _expanded(os.environ[variable])
    if os.environ.get("HF_HOME"):
        return _expanded(os.environ["HF_HOME"]) / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def _expanded(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()


def cached_model(name: HubName, revision: str | None = None) -> Path:
    """Returns the folder of a model in the cache, or its GGUF file; every file that it lists is there.

    Args:
        revision: branch, tag or commit; None: ``main``.

    Raises:
        DataError: it, or this revision of it, is not in the cache or not whole, with the command that fetches it.
    """
    cache, folder = cache_folder(), _folder(name)
    if not folder.is_dir():
        raise DataError(
            f"cannot open the model '{name.repo}': there is no such folder, and no model of that name in the cache "
            f"'{cache}' (HF_HUB_CACHE, HF_HOME). {_fetch(name, revision)}"
        )
    snapshot = _snapshot(folder, name, revision)
    _check_whole(snapshot, folder, name, revision)
    return _gguf_file(snapshot, name) or snapshot


def names_hub_model(source: str) -> bool:
    """Returns whether ``source`` is the name of a model of the hub, and no path that is there."""
    return HubName.parse(source) is not None and not os.path.lexists(Path(source).expanduser())


def is_cached(source: str) -> bool:
    """Returns whether anything of the model called ``source`` is in the cache."""
    name = HubName.parse(source)
    return name is not None and _folder(name).is_dir()


def _folder(name: HubName) -> Path:
    return cache_folder() / f"models--{name.repo.replace('/', '--')}"


def _snapshot(folder: Path, name: HubName, revision: str | None) -> Path:
    wanted = revision or "main"
    snapshots = folder / "snapshots"
    commit = _commit(folder, wanted)
    for known in (commit, wanted):
        if known and "/" not in known and known not in (".", "..") and (snapshots / known).is_dir():
            return snapshots / known
    there = sorted({*_refs(folder), *(path.name for path in _children(snapshots))})
    has = f"it has {', '.join(there[:_SHOWN])} (model.revision)" if there else "it has none"
    raise DataError(
        f"cannot open the model '{name.repo}': the cache '{folder}' has no revision {wanted!r}; {has}. "
        f"{_fetch(name, revision)}"
    )


def _commit(folder: Path, revision: str) -> str | None:
    """The commit that a branch or tag stands for; names such as ``refs/pr/1`` have folders of their own."""
    if ".." in revision.split("/") or revision.startswith("/"):
        return None
    try:
        text = (folder / "refs" / revision).read_bytes()[:100].decode("ascii").strip()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch(r"[0-9a-f]{7,64}", text) else None


def _refs(folder: Path) -> list[str]:
    refs = folder / "refs"
    return [path.relative_to(refs).as_posix() for path in refs.rglob("*") if path.is_file()]


def _children(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _check_whole(snapshot: Path, folder: Path, name: HubName, revision: str | None) -> None:
    files = {path.relative_to(snapshot).as_posix(): path for path in snapshot.rglob("*")}
    missing = {shown for shown, path in files.items() if path.is_symlink() and not path.exists()}
    missing |= _shards(files.get("model.safetensors.index.json")) - files.keys()
    if not any(shown.endswith((".safetensors", ".gguf", ".bin", ".pt", ".pth")) for shown in files):
        missing.add("its weights")
    elif "config.json" not in files and not any(shown.endswith(".gguf") for shown in files):
        missing.add("config.json")
    if not missing:
        return
    why = "; a download was broken off" if any((folder / "blobs").glob("*.incomplete")) else ""
    raise DataError(
        f"cannot open the model '{name.repo}': '{snapshot}' is not whole: {_listed(sorted(missing))} missing{why}. "
        f"{_fetch(name, revision)}"
    )


def _shards(index: Path | None) -> set[str]:
    """The files that an index names; what is wrong with it is told by who reads the model."""
    try:
        found = json.loads(index.read_bytes())["weight_map"].values() if index is not None else ()
        return {shard for shard in found if isinstance(shard, str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def _gguf_file(snapshot: Path, name: HubName) -> Path | None:
    """The GGUF file to read: the one that was named, or the only one of a model that has no other weights."""
    files = sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf"))
    if name.file:
        if name.file in files:
            return snapshot / name.file
        raise DataError(
            f"cannot open '{name.file}' of the model '{name.repo}': '{snapshot}' has {_listed(files) or 'no GGUF file'}"
        )
    if not files or any(snapshot.glob("*.safetensors")):
        return None
    # The parts of a split file are read by their first.
    first = [file for file in files if not re.search(r"-\d{5}-of-\d{5}\.gguf$", file) or "-00001-of-" in file]
    if len(first) == 1:
        return snapshot / first[0]
    raise DataError(
        f"cannot open the model '{name.repo}': it has several GGUF files: {_listed(first)}; name one, as "
        f"model.source={name.repo}/{(first or files)[0]}"
    )


def _fetch(name: HubName, revision: str | None) -> str:
    command = f"hf download {name.repo}" + (f" {name.file}" if name.file else "")
    command += f" --revision {revision}" if revision else ""
    return f"Nothing is fetched by this program; on a machine with a network: `{command}` (older: huggingface-cli)"


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - _SHOWN:,} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
