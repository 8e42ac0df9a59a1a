# SPDX-License-Identifier: Apache-2.0
"""A Llama model in a GGUF file, dequantised a block of rows at a time, under Hugging Face's names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.gguf_config import config_from_gguf, hf_tensor_name
from memascend_jax.checkpoints.gguf_header import GgufHeader, GgufTensor
from memascend_jax.checkpoints.positioned_file import PositionedFile
from memascend_jax.checkpoints.sampled_digest import sampled_digest
from memascend_jax.checkpoints.source import PIECE_BYTES, CheckpointTensor
from memascend_jax.errors import DataError
from memascend_jax.models.shapes import LlamaConfig, check_tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Dequantising makes several temporaries of its output's size, so it is done in blocks of this size.
_BLOCK_BYTES = 1 << 20


class GgufCheckpoint:
    """See ``source.Checkpoint``. Elements are float32, whatever the file's types.

    Shortcomings: the tensors of one shape only, and of the types that the ``gguf`` package dequantises.
    """

    def __init__(self, path: Path) -> None:
        self._file = PositionedFile(path)
        try:
            self._header = GgufHeader(self._file)
            self.config: dict[str, Any] = config_from_gguf(self._header, path)
            self._shape = LlamaConfig.from_hf(self.config)
            self._places = self._named_places()
            self.tensors = {
                name: CheckpointTensor(place.shape, "float32") for name, place in self._places.items()
            }
            check_tensors({name: t.shape for name, t in self.tensors.items()}, self._shape, str(path))
            self._check_places()
        except BaseException:
            self._file.close()
            raise

    def pieces(self, name: str, max_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields the tensor in blocks of whole rows; see ``source.Checkpoint``."""
        place = self._places[name]
        columns = place.shape[-1]
        rows = place.shape[0] if len(place.shape) > 1 else 1
        unit = self._shape.head_dim if self._is_permuted(name) else 1
        step = max(1, max_bytes // (4 * columns * unit)) * unit
        for start in range(0, rows, step):
            values = self._dequantised(place, start, min(step, rows - start), columns)
            if unit > 1:
                values = _unpermuted(values, unit)
            yield start * columns, values.reshape(-1)

    @property
    def chat_template(self) -> str | None:
        template = self._header.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    @property
    def special_ids(self) -> dict[str, int | None]:
        keys = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        return {
            name: self._header.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()
        }

    @cached_property
    def digest(self) -> str:
        return sampled_digest([self._file])

    def tokenizer(self) -> Tokenizer:
        from memascend_jax.checkpoints.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(self._header, self._file.path)

    def export_files(self) -> dict[str, bytes]:
        tokenizer = self.tokenizer()
        tokens = {
            f"{name}_token": tokenizer.id_to_token(token_id)
            for name, token_id in self.special_ids.items()
            if token_id is not None
        }
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
        self._file.close()

    def _named_places(self) -> dict[str, GgufTensor]:
        places = {hf_tensor_name(place.name): place for place in self._header.tensors}
        unknown = [place.name for place in self._header.tensors if hf_tensor_name(place.name) is None]
        if unknown:
            raise DataError(
                f"cannot use the model '{self._file.path}': it has tensors that a Llama model computed here "
                f"does not have: {', '.join(unknown[:8])}"
            )
        return {name: place for name, place in places.items() if name is not None}

    def _check_places(self) -> None:
        """Every tensor inside the file, none upon another, and of a type that can be dequantised."""
        faults, end, before = [], self._header.end, "the header"
        for place in sorted(self._header.tensors, key=lambda place: place.offset):
            nbytes = _stored_bytes(place)
            if nbytes is None:
                faults.append(
                    f"'{place.name}' is of type {place.type} or shape {list(place.shape)}, not known here"
                )
                continue
            if place.offset < end:
                faults.append(f"'{place.name}' lies upon {before}")
            if place.offset + nbytes > self._file.size:
                faults.append(
                    f"'{place.name}' (offset {place.offset:,}, {nbytes:,} bytes) ends beyond the file's "
                    f"{self._file.size:,} bytes"
                )
            end, before = place.offset + nbytes, f"'{place.name}'"
        if faults:
            raise DataError(
                f"cannot use the model '{self._file.path}': {'; '.join(faults[:8])}"
                f"{f'; and {len(faults) - 8} more' if len(faults) > 8 else ''}. Fetch the file again."
            )

    def _dequantised(self, place: GgufTensor, start: int, rows: int, columns: int) -> NDArray[np.float32]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType(place.type)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = columns // block * block_bytes
        values = np.empty((rows, columns), np.float32)
        step = max(1, _BLOCK_BYTES // (4 * columns))
        for first in range(0, rows, step):
            count = min(step, rows - first)
            stored = self._file.read(
                place.offset + (start + first) * row_bytes, count * row_bytes, f"tensor '{place.name}'"
            )
            values[first : first + count] = dequantize(
                np.frombuffer(stored, np.uint8).reshape(count, row_bytes), kind
            ).reshape(count, columns)
        return values

    def _is_permuted(self, name: str) -> bool:
        return name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight"))


def _unpermuted(rows: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Hugging Face's order of the rows of whole heads.

    GGUF interleaves the two halves of a head, which rotary positions pair: its row ``2 i + t`` of a head is
    Hugging Face's row ``t * head_dim / 2 + i``.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _stored_bytes(place: GgufTensor) -> int | None:
    """The bytes of a tensor in the file; None when its type or row length cannot be dequantised."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType(place.type)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    if not place.shape or place.shape[-1] % block:
        return None
    return prod(place.shape) // block * block_bytes
