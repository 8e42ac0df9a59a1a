# SPDX-License-Identifier: Apache-2.0
"""A model in a Hugging Face folder: ``config.json``, safetensors whole or in shards, tokenizer.

Of a model that reads more than text the language model is taken, under the names and with the ``config.json`` that it
has alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from memascend_jax.checkpoints.folder_weights import FolderWeights
from memascend_jax.checkpoints.model_files import CONFIG, INDEX, ModelFiles
from memascend_jax.checkpoints.positioned_file import AHEAD_BYTES, read_ahead
from memascend_jax.checkpoints.safetensors_file import SafetensorsFile, elements_of
from memascend_jax.checkpoints.sampled_digest import sampled_digest
from memascend_jax.checkpoints.source import PIECE_BYTES, CheckpointTensor
from memascend_jax.checkpoints.tensor_faults import check_model_tensors, shape_of
from memascend_jax.errors import DataError
from memascend_jax.models.language_model import language_model_config, language_model_names
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import tensor_shapes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FLOAT = ("bfloat16", "float16", "float32")

_MAX_TEXT_BYTES = 256 << 20


class HuggingFaceCheckpoint:
    """See ``source.Checkpoint``. Elements have the files' dtype: bfloat16, float16 or float32."""

    def __init__(self, folder: Path) -> None:
        self._texts = ModelFiles(str(folder), partial(_read_text, folder), partial(_names, folder))
        self._weights, shape, self.config = self._open(folder)
        try:
            home = self._weights.home
            #: By our name the files' own.
            self._stored = language_model_names(home) if self._is_a_part else {name: name for name in home}
            found = {name: self._file_of(name).tensors[own] for name, own in self._stored.items()}
            check_model_tensors(found, shape, str(folder), _FLOAT)
            # What else is in the files, such as a tied head or the rotary frequencies, is left alone.
            self.tensors = {
                tensor.name: CheckpointTensor(tensor.shape, found[tensor.name].dtype)
                for tensor in tensor_shapes(shape)
            }
        except BaseException:
            self.close()
            raise

    def _open(self, folder: Path) -> tuple[FolderWeights, ModelConfig, dict[str, Any]]:
        """The files, and the model that the config describes; what is wrong with either is told together."""
        faults = []
        config: dict[str, Any] = {}
        shape = weights = None
        try:
            config = dict(language_model_config(self._texts.config))
            shape = shape_of(config, str(folder))
        except DataError as error:
            faults.append(str(error))
        try:
            weights = FolderWeights(folder, partial(self._texts.json, INDEX))
        except DataError as error:
            faults.append(str(error))
        if shape is None or weights is None:
            if weights is not None:
                weights.close()
            first, *more = (fault.removesuffix(".") for fault in faults)
            same = re.compile(rf"cannot use the model (?:in|folder) '{re.escape(str(folder))}': ")
            raise DataError("; ".join([first, *(same.sub("", fault, count=1) for fault in more)]))
        return weights, shape, config

    def pieces(self, name: str, max_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields the tensor in blocks of whole rows; see ``source.Checkpoint``."""
        return self._file_of(name).pieces(self._stored[name], max_bytes)

    def stream(
        self, sizes: Mapping[str, int], ahead_bytes: int = AHEAD_BYTES
    ) -> Iterator[tuple[str, int, NDArray[Any]]]:
        """Yields ``(name, first element, flat values)`` as ``pieces`` would for one name after the other.

        What comes next is being read, across tensors and shards.

        Args:
            sizes: most bytes of a piece, by name.
            ahead_bytes: how much is being read.
        """
        ours = {self._stored[name]: name for name in sizes}
        planned = chain.from_iterable(
            self._file_of(name).plan(self._stored[name], size) for name, size in sizes.items()
        )
        for piece, stored in read_ahead(planned, ahead_bytes):
            name, start = ours[piece.tag[0]], piece.tag[1]
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
        return sampled_digest([file.file for _, file in sorted(self._weights.files.items())], config)

    def tokenizer(self) -> Tokenizer:
        return self._texts.tokenizer()

    def export_files(self) -> dict[str, bytes]:
        files = self._texts.passed_on()
        if self._is_a_part:
            # What the files were called and held was the whole model's.
            files.pop(INDEX, None)
            files[CONFIG] = (json.dumps(self.config, indent=2) + "\n").encode()
        return files

    @property
    def _is_a_part(self) -> bool:
        return "text_config" in self._texts.config

    def close(self) -> None:
        self._weights.close()

    def _file_of(self, name: str) -> SafetensorsFile:
        return self._weights.files[self._weights.home[self._stored[name]]]


def _read_text(folder: Path, name: str) -> bytes | None:
    path = folder / name
    if not path.is_file():
        return None
    if path.stat().st_size > _MAX_TEXT_BYTES:
        raise DataError(
            f"cannot use the model folder '{folder}': {name} has {path.stat().st_size:,} bytes, which cannot be right."
        )
    return path.read_bytes()


def _names(folder: Path) -> list[str]:
    """The files in ``folder``, and those in its folders, with a slash."""
    nested = [path.relative_to(folder).as_posix() for path in folder.glob("*/*")]
    return [*(path.name for path in folder.iterdir()), *nested]
