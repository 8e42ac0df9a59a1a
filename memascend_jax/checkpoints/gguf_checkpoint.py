# SPDX-License-Identifier: Apache-2.0
"""A model in a GGUF file, or several, dequantised a block of rows at a time, under Hugging Face's names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.gguf_config import config_from_gguf
from memascend_jax.checkpoints.gguf_names import FAMILIES, ROPE_FACTORS, GgufFamily, gguf_name, module_of
from memascend_jax.checkpoints.gguf_parts import GgufParts, PlacedTensor
from memascend_jax.checkpoints.gguf_tensors import read_rows, unpermuted
from memascend_jax.checkpoints.gguf_tokenizer import special_id
from memascend_jax.checkpoints.sampled_digest import sampled_digest
from memascend_jax.checkpoints.source import PIECE_BYTES, CheckpointTensor
from memascend_jax.checkpoints.tensor_faults import check_model_tensors, shape_of
from memascend_jax.errors import DataError
from memascend_jax.models.shapes import tensor_shapes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Settings stored as tensors are this small; a larger one is none.
_MAX_SETTINGS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Stored:
    """Rows of a GGUF tensor that are one tensor of the model."""

    tensor: PlacedTensor
    first_row: int
    shape: tuple[int, ...]
    dtype: str = "float32"


class GgufCheckpoint:
    """See ``source.Checkpoint``. Elements are float32, whatever the file's types."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts = GgufParts(path)
        try:
            self._header = self._parts.header
            self.config: dict[str, Any] = config_from_gguf(
                self._header, path, self._parts.tensors, self._settings_tensor
            )
            self._family = FAMILIES[self._header.metadata["general.architecture"]]
            self._shape = shape_of(self.config, str(path))
            self._stored = self._named(self._family)
            check_model_tensors(self._stored, self._shape, str(path))
            self.tensors = {
                name: CheckpointTensor(stored.shape, "float32") for name, stored in self._stored.items()
            }
            self._parts.check()
        except BaseException:
            self._parts.close()
            raise

    def pieces(self, name: str, max_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields the tensor in blocks of whole rows; see ``source.Checkpoint``."""
        stored = self._stored[name]
        place, columns = stored.tensor.place, stored.shape[-1]
        rows = stored.shape[0] if len(stored.shape) > 1 else 1
        module = module_of(name)
        head = self._shape.head_dim if module in self._family.permuted else 1
        offset = self._family.offset if module.endswith("norm") else 0.0
        # A bias has a row of its own in each head's order: its elements are its rows.
        if head > 1 and len(stored.shape) == 1:
            values = read_rows(stored.tensor.file, place, 0, 1)
            yield 0, unpermuted(values.reshape(-1, 1), head).reshape(-1)
            return
        step = max(1, max_bytes // (4 * columns * head)) * head
        for start in range(0, rows, step):
            count = min(step, rows - start)
            values = read_rows(stored.tensor.file, place, stored.first_row + start, count)
            if head > 1:
                values = unpermuted(values, head)
            if offset:
                values -= np.float32(offset)
            yield start * columns, values.reshape(-1)

    @property
    def chat_template(self) -> str | None:
        template = self._header.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    @property
    def special_ids(self) -> dict[str, int | None]:
        return {name: special_id(self._header, name) for name in ("bos", "eos", "pad", "unk")}

    @cached_property
    def digest(self) -> str:
        return sampled_digest(self._parts.files)

    def tokenizer(self) -> Tokenizer:
        from memascend_jax.checkpoints.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(self._header, self._path)

    def export_files(self) -> dict[str, bytes]:
        tokenizer = self.tokenizer()
        named = {
            f"{name}_token": tokenizer.id_to_token(token_id)
            for name, token_id in self.special_ids.items()
            if token_id is not None
        }
        tokens = {name: token for name, token in named.items() if token is not None}
        tokenizer_config = {
            **tokens,
            "clean_up_tokenization_spaces": False,
            "model_max_length": self._shape.max_position_embeddings,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        ids = {f"{name}_token_id": self.special_ids[name] for name in ("bos", "eos", "pad")}
        texts = {
            "config.json": self.config,
            "generation_config.json": {key: value for key, value in ids.items() if value is not None},
            "special_tokens_map.json": tokens,
            "tokenizer_config.json": tokenizer_config,
        }
        files = {name: (json.dumps(value, indent=2) + "\n").encode() for name, value in texts.items()}
        files["tokenizer.json"] = tokenizer.to_str(pretty=True).encode()
        if self.chat_template is not None:
            files["chat_template.jinja"] = self.chat_template.encode()
        return files

    def close(self) -> None:
        self._parts.close()

    def _named(self, family: GgufFamily) -> dict[str, _Stored]:
        """What the file has of the model's tensors, by Hugging Face's names; under its own what the model has not."""
        stored: dict[str, _Stored] = {}
        used = set(ROPE_FACTORS)
        if self._shape.num_hidden_layers > len(self._parts.tensors):
            return {name: _Stored(found, 0, found.place.shape) for name, found in self._parts.tensors.items()}
        for tensor in tensor_shapes(self._shape):
            place = gguf_name(tensor.name, family)
            found = self._parts.tensors.get(place.name) if place is not None else None
            if place is None or found is None:
                continue
            used.add(place.name)
            shape = found.place.shape
            if place.expert is None:
                stored[tensor.name] = _Stored(found, 0, shape)
            elif len(shape) == 3 and place.expert < shape[0]:
                stored[tensor.name] = _Stored(found, place.expert * shape[1], shape[1:])
        left = {name: found for name, found in self._parts.tensors.items() if name not in used}
        return stored | {name: _Stored(found, 0, found.place.shape) for name, found in left.items()}

    def _settings_tensor(self, name: str) -> NDArray[np.float32] | None:
        found = self._parts.tensors.get(name)
        if found is None:
            return None
        shape, kind = found.place.shape, found.place.type
        if len(shape) != 1 or shape[0] > _MAX_SETTINGS or kind != 0:
            raise DataError(
                f"cannot use the model '{self._path}': '{name}' has type {kind} and shape {list(shape)}, expected one "
                "dimension of float32"
            )
        return read_rows(found.file, found.place, 0, 1).reshape(-1)
