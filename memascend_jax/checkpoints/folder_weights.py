# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of a Hugging Face folder: which there are, and which of them holds a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memascend_jax.checkpoints.model_files import INDEX, WEIGHTS, is_plain_name
from memascend_jax.checkpoints.safetensors_file import SafetensorsFile
from memascend_jax.errors import DataError

_SHOWN = 8
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class FolderWeights:
    """The open files of a folder; every fault of theirs is found at once.

    Args:
        index: returns what ``model.safetensors.index.json`` holds, or None where there is none.

    Attributes:
        files: by name.
        home: the file that each tensor is in.

    Raises:
        DataError: lists all faults.
    """

    def __init__(self, folder: Path, index: Callable[[], Mapping[str, Any] | None]) -> None:
        self._folder = folder
        self._faults: list[str] = []
        self.files: dict[str, SafetensorsFile] = {}
        self.home: dict[str, str] = {}
        try:
            if (folder / WEIGHTS).is_file():
                self._open([WEIGHTS])
                self.home = {name: WEIGHTS for file in self.files.values() for name in file.tensors}
            else:
                self._follow(index())
            if self._faults:
                raise DataError(f"cannot use the model folder '{folder}': {'; '.join(self._faults)}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def _follow(self, index: Mapping[str, Any] | None) -> None:
        if index is None:
            self._faults.append(self._why_no_weights())
            return
        home = index.get("weight_map")
        if not isinstance(home, dict) or not home:
            self._faults.append(f"{INDEX} has no weight_map of file names")
            return
        elsewhere = sorted({repr(file) for file in home.values() if not is_plain_name(file)})
        if elsewhere:
            self._faults.append(f"{INDEX} names files outside the folder: {_listed(elsewhere)}")
        inside = sorted({file for file in home.values() if is_plain_name(file)})
        missing = [file for file in inside if not (self._folder / file).is_file()]
        if missing:
            self._faults.append(f"shards are missing: {_listed(self._why_missing(file) for file in missing)}")
        self._open([file for file in inside if file not in missing])
        self.home = {name: file for name, file in home.items() if is_plain_name(file)}
        self._compare()

    def _open(self, names: list[str]) -> None:
        for name in names:
            try:
                self.files[name] = SafetensorsFile(self._folder / name)
            except DataError as error:
                self._faults.append(str(error).removesuffix("."))
            except OSError as error:
                self._faults.append(f"{name} cannot be read: {error.strerror}")

    def _compare(self) -> None:
        """Holds the index to what is in the files."""
        places: dict[str, list[str]] = {}
        for file, opened in self.files.items():
            for name in opened.tensors:
                places.setdefault(name, []).append(file)
        absent, moved = [], []
        for name, file in self.home.items():
            if file not in self.files or file in places.get(name, ()):
                continue
            if name in places:
                moved.append(f"'{name}' is in {', '.join(places[name])}, not in {file}")
            else:
                absent.append(f"'{name}' in {file}")
        twice = [f"'{name}' in {' and '.join(files)}" for name, files in places.items() if len(files) > 1]
        # What the index leaves out is there all the same; whether the model has it is asked elsewhere.
        self.home |= {name: files[0] for name, files in places.items() if name not in self.home}
        for what, found in (
            ("names tensors that are not there", absent),
            ("names other files than the tensors are in", moved),
        ):
            if found:
                self._faults.append(f"{INDEX} {what}: {_listed(found)}")
        if twice:
            self._faults.append(f"tensors are in several shards: {_listed(twice)}")

    def _why_missing(self, name: str) -> str:
        path = self._folder / name
        return f"{name} (a link to what is not there)" if path.is_symlink() else name

    def _why_no_weights(self) -> str:
        pickled = sorted(path.name for pattern in _PICKLES for path in self._folder.glob(pattern))
        if pickled:
            return (
                f"its weights are pickles ({', '.join(pickled[:3])}), which run code when they are read; convert them "
                "with transformers: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
            )
        if (self._folder / WEIGHTS).is_symlink():
            return f"{WEIGHTS} is a link to what is not there"
        others = sorted(path.name for path in self._folder.glob("*.safetensors"))
        has = f"; {_listed(others)} is not what Hugging Face's models are called" if others else ""
        return f"it has neither {WEIGHTS} nor {INDEX}{has}"


def _listed(entries: Any) -> str:
    shown = list(entries)
    more = f" and {len(shown) - _SHOWN:,} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
