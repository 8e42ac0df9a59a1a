# SPDX-License-Identifier: Apache-2.0
"""What a run starts from: the model's shape and weights, its tokenizer, and the data. jax-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from memascend_jax.checkpoints.random_init import random_pieces
from memascend_jax.checkpoints.resized import ResizedCheckpoint
from memascend_jax.checkpoints.saved_model import SavedModel
from memascend_jax.checkpoints.smollm2 import smollm2_135m_path
from memascend_jax.checkpoints.source import Checkpoint, PiecesInOrder, open_checkpoint
from memascend_jax.config import Config
from memascend_jax.data.dataset import Dataset, build_dataset
from memascend_jax.data.tokenize import Coder
from memascend_jax.errors import ConfigError, DataError
from memascend_jax.models.shapes import LlamaConfig, tensor_shapes
from memascend_jax.units import MIB

SMOLLM2 = "smollm2-135m"
RANDOM = "random"
_PIECE_BYTES = 8 * MIB

Pieces = Callable[[str], Iterable[tuple[int, NDArray[Any]]]]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model before any of its weights are read; ``checkpoint`` is None for random weights."""

    config: LlamaConfig
    checkpoint: Checkpoint | None
    coder: Coder | None
    pieces: Pieces

    def export_files(self) -> dict[str, bytes]:
        """Returns what an exported folder holds beside the weights; of random weights nothing."""
        return self.checkpoint.export_files() if self.checkpoint is not None else {}

    def close(self) -> None:
        """Closes the checkpoint's files."""
        if self.checkpoint is not None:
            self.checkpoint.close()


def open_model(config: Config) -> ModelSource:
    """Returns the model that ``model.source`` names, fetched if need be.

    Raises:
        DataError: the model cannot be fetched, is damaged, or is of an architecture this program does not compute.
        ConfigError: ``data.seq_len`` is more than the model's positions.
    """
    source = config.model.source
    if source == RANDOM:
        shape = LlamaConfig.from_hf(config.model.config)
        seed = config.train.seed
        return ModelSource(shape, None, None, lambda name: random_pieces(shape, name, seed, _PIECE_BYTES))
    found = open_checkpoint(smollm2_135m_path() if source == SMOLLM2 else source)
    has_tokenizer = not isinstance(found, SavedModel) or found.has_tokenizer
    checkpoint = _with_vocabulary(found, config)
    shape = LlamaConfig.from_hf(checkpoint.config)
    if config.data.seq_len > shape.max_position_embeddings:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} is more than the {shape.max_position_embeddings} positions of "
            f"the model in {source!r}"
        )
    pieces = PiecesInOrder(checkpoint, [tensor.name for tensor in tensor_shapes(shape)], _PIECE_BYTES)
    if not has_tokenizer:
        if config.data.source != RANDOM:
            raise DataError(
                f"data.source={config.data.source} needs a tokenizer, which the model in {source!r} has not: it began "
                "as random weights. Use random data"
            )
        return ModelSource(shape, checkpoint, None, pieces)
    coder = Coder(checkpoint.tokenizer(), checkpoint.chat_template, checkpoint.special_ids)
    return ModelSource(shape, checkpoint, coder, pieces)


def _with_vocabulary(checkpoint: Checkpoint, config: Config) -> Checkpoint:
    """``checkpoint`` with the tokens and the size of vocabulary that the configuration asks for."""
    model = config.model
    if not model.add_tokens and model.vocab_size is None:
        return checkpoint
    try:
        return ResizedCheckpoint(
            checkpoint,
            model.vocab_size,
            model.add_tokens,
            model.new_rows,
            model.source,
            seed=config.train.seed,
        )
    except BaseException:
        checkpoint.close()
        raise


def open_data(config: Config, model: ModelSource) -> Dataset:
    """Returns the tokenized and packed data of ``data.source``.

    Raises:
        DataError: the data is missing, malformed or empty, or nothing of it would be trained.
    """
    data = config.data
    return build_dataset(
        source=data.source,
        coder=model.coder,
        vocab_size=model.config.vocab_size,
        seq_len=data.seq_len,
        eval_source=data.eval_source,
        eval_fraction=data.eval_fraction,
        eval_sequences=data.eval_sequences,
        too_long=data.too_long,
        seed=config.train.seed,
    )
