# SPDX-License-Identifier: Apache-2.0
"""A Llama model in a Hugging Face folder: ``config.json``, safetensors whole or in shards, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from numpy.typing import NDArray

from memascend_jax.checkpoints.model_files import ModelFiles
from memascend_jax.checkpoints.positioned_file import AHEAD_BYTES, read_ahead
from memascend_jax.checkpoints.safetensors_file import SafetensorsFile, elements_of
from memascend_jax.checkpoints.sampled_digest import sampled_digest
from memascend_jax.checkpoints.source import PIECE_BYTES, CheckpointTensor
from memascend_jax.errors import DataError
from memascend_jax.models.shapes import LlamaConfig, check_tensors, tensor_shapes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOAT = ("bfloat16", "float16", "float32")

_MAX_TEXT_BYTES = 256 << 20


class HuggingFaceCheckpoint:
    """See ``source.Checkpoint``. Elements have the files' dtype: bfloat16, float16 or float32."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts = ModelFiles(str(folder), partial(_read_text, folder))
        self.config: dict[str, Any] = self._texts.config
        shape = LlamaConfig.from_hf(self.config)
        self._files: dict[str, SafetensorsFile] = {}
        try:
            self._home = self._locate()
            found = {name: self._file_of(name).tensors[name] for name in self._home}
            check_tensors({name: tensor.shape for name, tensor in found.items()}, shape, str(folder))
            # What else is in the files, such as a tied head or the rotary frequencies, is left alone.
            self.tensors = {
                tensor.name: CheckpointTensor(tensor.shape, found[tensor.name].dtype)
                for tensor in tensor_shapes(shape)
            }
            odd = [f"'{name}' is {t.dtype}" for name, t in self.tensors.items() if t.dtype not in _FLOAT]
            if odd:
                self._fault(f"{'; '.join(odd[:8])}; expected one of {', '.join(_FLOAT)}")
        except BaseException:
            self.close()
            raise

    def pieces(self, name: str, max_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields the tensor in blocks of whole rows; see ``source.Checkpoint``."""
        return self._file_of(name).pieces(name, max_bytes)

    def stream(
        self, sizes: Mapping[str, int], ahead_bytes: int = AHEAD_BYTES
    ) -> Iterator[tuple[str, int, NDArray[Any]]]:
        """Yields ``(name, first element, flat values)`` as ``pieces`` would for one name after the other.

        What comes next is being read, across tensors and shards.

        Args:
            sizes: most bytes of a piece, by name.
            ahead_bytes: how much is being read.
        """
        planned = chain.from_iterable(self._file_of(name).plan(name, size) for name, size in sizes.items())
        for piece, stored in read_ahead(planned, ahead_bytes):
            name, start = piece.tag
            yield name, start, elements_of(stored, self.tensors[name].dtype)

    @property
    def chat_template(self) -> str | None:
        return self._texts.chat_template

    @property
    def special_ids(self) -> dict[str, int | None]:
        return self._texts.special_ids

    @cached_property
    def digest(self) -> str:
        config = json.dumps(self.config, sort_keys=True).encode()
        return sampled_digest([file.file for _, file in sorted(self._files.items())], config)

    def tokenizer(self) -> Tokenizer:
        return self._texts.tokenizer()

    def export_files(self) -> dict[str, bytes]:
        return self._texts.passed_on()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _locate(self) -> dict[str, str]:
        """The file that each tensor is in."""
        if (self._folder / _WEIGHTS).is_file():
            return dict.fromkeys(self._open(_WEIGHTS).tensors, _WEIGHTS)
        index = self._texts.json(_INDEX)
        if index is None:
            self._fault(self._why_no_weights())
        home = index.get("weight_map")
        if not isinstance(home, dict) or not all(isinstance(file, str) for file in home.values()):
            self._fault(f"{_INDEX} has no weight_map of file names")
        faults = [
            name for name in sorted(set(home.values())) if Path(name).name != name or name in (".", "..")
        ]
        if faults:
            self._fault(f"{_INDEX} names files outside the folder: {', '.join(map(repr, faults))}")
        faults = [name for name in sorted(set(home.values())) if not (self._folder / name).is_file()]
        if faults:
            self._fault(f"shards are missing: {', '.join(faults)}")
        for name in sorted(set(home.values())):
            self._open(name)
        faults = [
            f"'{name}' in {file}" for name, file in home.items() if name not in self._files[file].tensors
        ]
        if faults:
            self._fault(f"{_INDEX} names tensors that are not there: {', '.join(faults[:8])}")
        return home

    def _why_no_weights(self) -> str:
        pickled = sorted(path.name for path in self._folder.glob("*.bin")) or sorted(
            path.name for path in self._folder.glob("*.pt*")
        )
        if pickled:
            return (
                f"its weights are pickles ({', '.join(pickled[:3])}), which run code when they are read; convert them "
                "with transformers: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
            )
        return f"it has neither {_WEIGHTS} nor {_INDEX}"

    def _open(self, name: str) -> SafetensorsFile:
        self._files[name] = SafetensorsFile(self._folder / name)
        return self._files[name]

    def _file_of(self, name: str) -> SafetensorsFile:
        return self._files[self._home[name]]

    def _fault(self, what: str) -> NoReturn:
        raise self._texts.fault(what)


def _read_text(folder: Path, name: str) -> bytes | None:
    path = folder / name
    if not path.is_file():
        return None
    if path.stat().st_size > _MAX_TEXT_BYTES:
        raise DataError(
            f"cannot use the model folder '{folder}': {name} has {path.stat().st_size:,} bytes, which cannot be right."
        )
    return path.read_bytes()
