# SPDX-License-Identifier: Apache-2.0
"""A model with more tokens or another size of vocabulary than it comes with; nothing of the model itself is changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from memascend_jax.checkpoints.model_files import TOKENIZER
from memascend_jax.checkpoints.source import PIECE_BYTES, Checkpoint, CheckpointTensor
from memascend_jax.checkpoints.tokenizer_files import SENTENCEPIECE
from memascend_jax.checkpoints.vocabulary import (
    TABLES,
    NewRows,
    RowInit,
    add_tokens,
    files_with_vocabulary,
    rows_needed,
    special_ids_of,
)
from memascend_jax.dtypes import to_dtype
from memascend_jax.optim.rounding import round_master

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ResizedCheckpoint:
    """See ``source.Checkpoint``: ``inner`` with ``tokens`` added and tables of ``vocab_size`` rows; owns ``inner``.

    Args:
        vocab_size: rows of the embedding, and of a head of its own; None: no more than the tokens need.
        tokens: texts that become tokens.
        init: what new rows begin as.
        where: what messages call the model.

    Raises:
        DataError: the vocabulary is smaller than the ids in use, or a token cannot be added.
    """

    def __init__(
        self,
        inner: Checkpoint,
        vocab_size: int | None,
        tokens: Sequence[str],
        init: RowInit,
        where: str,
        *,
        seed: int = 0,
    ) -> None:
        self._inner = inner
        self._tokens = tuple(tokens)
        self._where = where
        before = int(inner.config["vocab_size"])
        # A model of random weights that was saved has no tokenizer; who only changes the size needs none.
        beside = inner.export_files()
        tokenizer = self.tokenizer() if tokens or TOKENIZER in beside or SENTENCEPIECE in beside else None
        rows = rows_needed(vocab_size, before, tokenizer, special_ids_of(inner.config), where)
        self.config: dict[str, Any] = {**inner.config, "vocab_size": rows}
        self.tensors = {
            name: CheckpointTensor((rows, *tensor.shape[1:]), tensor.dtype) if name in TABLES else tensor
            for name, tensor in inner.tensors.items()
        }
        self._before = before
        columns = inner.tensors[TABLES[0]].shape[1]
        self._new_rows = NewRows(init, inner.pieces, columns, seed=seed)
        self._what = [rows, list(tokens), init, seed]

    def pieces(self, name: str, max_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields the tensor in blocks of whole rows: the old ones, then the new ones."""
        if name not in TABLES:
            yield from self._inner.pieces(name, max_bytes)
            return
        tensor = self.tensors[name]
        rows, columns, total = tensor.shape[0], tensor.shape[1], prod(tensor.shape)
        for start, values in self._inner.pieces(name, max_bytes):
            if start >= total:
                return
            yield start, values[: total - start]
        step = max(1, max_bytes // (columns * to_dtype(tensor.dtype).itemsize))
        for row in range(self._before, rows, step):
            made = self._new_rows(name, row, min(step, rows - row))
            yield row * columns, round_master(made, tensor.dtype)

    @property
    def chat_template(self) -> str | None:
        return self._inner.chat_template

    @property
    def special_ids(self) -> dict[str, int | None]:
        return self._inner.special_ids

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self._inner.digest, *self._what]).encode()).hexdigest()

    def tokenizer(self) -> Tokenizer:
        tokenizer = self._inner.tokenizer()
        add_tokens(tokenizer, self._tokens, self._where)
        return tokenizer

    def export_files(self) -> dict[str, bytes]:
        tokenizer = self.tokenizer() if self._tokens else None
        return files_with_vocabulary(
            self._inner.export_files(), tokenizer, self._tokens, self.config["vocab_size"]
        )

    def close(self) -> None:
        self._inner.close()
