# SPDX-License-Identifier: Apache-2.0
"""A Llama model in a GGUF file, dequantised a block of rows at a time, under Hugging Face's names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from memascend_jax.checkpoints.gguf_config import config_from_gguf, hf_tensor_name
from memascend_jax.checkpoints.gguf_header import GgufHeader, GgufTensor
from memascend_jax.checkpoints.gguf_tensors import check_places, read_rows, unpermuted
from memascend_jax.checkpoints.positioned_file import PositionedFile
from memascend_jax.checkpoints.sampled_digest import sampled_digest
from memascend_jax.checkpoints.source import PIECE_BYTES, CheckpointTensor
from memascend_jax.errors import DataError
from memascend_jax.models.shapes import LlamaConfig, check_tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class GgufCheckpoint:
    """See ``source.Checkpoint``. Elements are float32, whatever the file's types."""

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
            check_places(self._file, self._header)
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
            values = read_rows(self._file, place, start, min(step, rows - start))
            if unit > 1:
                values = unpermuted(values, unit)
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

    def _is_permuted(self, name: str) -> bool:
        return name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight"))
