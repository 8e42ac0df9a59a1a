# SPDX-License-Identifier: Apache-2.0
"""What a run starts from: the model's shape and weights, its tokenizer, and the data. jax-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from memascend_jax.checkpoints.model_files import CHAT_TEMPLATE
from memascend_jax.checkpoints.random_init import random_pieces
from memascend_jax.checkpoints.resized import ResizedCheckpoint
from memascend_jax.checkpoints.saved_model import SavedModel
from memascend_jax.checkpoints.smollm2 import smollm2_135m_path
from memascend_jax.checkpoints.source import Checkpoint, PiecesInOrder, open_checkpoint
from memascend_jax.checkpoints.vocabulary import check_vocabulary
from memascend_jax.config import Config
from memascend_jax.data.dataset import Dataset, build_dataset
from memascend_jax.data.named_templates import chat_template, missing_tokens
from memascend_jax.data.settings import DataSettings, SourceSpec
from memascend_jax.data.tokenize import Coder
from memascend_jax.errors import ConfigError, DataError
from memascend_jax.models.adapters import Adapters
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import tensor_shapes
from memascend_jax.recipes.lora import PiecesWithFactors, adapters_of
from memascend_jax.units import MIB

SMOLLM2 = "smollm2-135m"
RANDOM = "random"
CACHE_AUTO, CACHE_OFF = "auto", "off"
_PIECE_BYTES = 8 * MIB

Pieces = Callable[[str], Iterable[tuple[int, NDArray[Any]]]]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model before any of its weights are read; ``checkpoint`` is None for random weights.

    Attributes:
        adapters: LoRA adapters beside it, whose factors ``pieces`` gives too; None: the model itself is trained.
        notes: sentences that the user should read.
        chosen_template: the chat template of ``data.chat_template``; None: the model's own.
    """

    config: ModelConfig
    checkpoint: Checkpoint | None
    coder: Coder | None
    pieces: Pieces
    adapters: Adapters | None = None
    notes: tuple[str, ...] = ()
    chosen_template: str | None = None

    def export_files(self) -> dict[str, bytes]:
        """Returns what an exported folder holds beside the weights; of random weights nothing."""
        if self.checkpoint is None:
            return {}
        files = self.checkpoint.export_files()
        # Who uses the model must write to it as it was trained.
        chosen = self.chosen_template
        return files if chosen is None else {**files, CHAT_TEMPLATE: chosen.encode()}

    def close(self) -> None:
        """Closes the checkpoint's files."""
        if self.checkpoint is not None:
            self.checkpoint.close()
        if isinstance(self.pieces, PiecesWithFactors):
            self.pieces.close()


def open_model(config: Config) -> ModelSource:
    """Returns the model that ``model.source`` names, fetched if need be, with the adapters of ``lora``.

    Raises:
        DataError: the model cannot be fetched, is damaged, or is of an architecture this program does not compute.
        ConfigError: ``data.seq_len`` is more than the model's positions; ``lora.targets`` or ``lora.rank`` do not fit.
    """
    model = _open_base(config)
    try:
        adapters = adapters_of(config.lora, model.config)
    except BaseException:
        model.close()
        raise
    if adapters is None:
        return model
    pieces = PiecesWithFactors(config, model.config, adapters, model.pieces)
    return replace(model, adapters=adapters, pieces=pieces)


def _open_base(config: Config) -> ModelSource:
    source = config.model.source
    if source == RANDOM:
        shape = ModelConfig.from_hf(config.model.config)
        seed = config.train.seed
        return ModelSource(shape, None, None, lambda name: random_pieces(shape, name, seed, _PIECE_BYTES))
    found = open_checkpoint(smollm2_135m_path() if source == SMOLLM2 else source, config.model.revision)
    has_tokenizer = not isinstance(found, SavedModel) or found.has_tokenizer
    checkpoint = _with_vocabulary(found, config)
    shape = ModelConfig.from_hf(checkpoint.config)
    if config.data.seq_len > shape.max_position_embeddings:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} is more than the {shape.max_position_embeddings} positions of "
            f"the model in {source!r}"
        )
    pieces = PiecesInOrder(checkpoint, [tensor.name for tensor in tensor_shapes(shape)], _PIECE_BYTES)
    if not has_tokenizer:
        if config.data.source != RANDOM or config.data.sources:
            raise DataError(
                f"data.source={config.data.source} needs a tokenizer, which the model in {source!r} has not: it began "
                "as random weights. Use random data"
            )
        return ModelSource(shape, checkpoint, None, pieces)
    data = config.data
    chosen = chat_template(data.chat_template) if data.chat_template is not None else None
    coder = Coder(
        checkpoint.tokenizer(),
        chosen or checkpoint.chat_template,
        checkpoint.special_ids,
        "the model's chat template" if chosen is None else f"the chat template {data.chat_template}",
        data.train_on,
        data.system_prompt,
    )
    notes = (
        check_vocabulary(shape.vocab_size, coder.tokenizer, source),
        missing_tokens(data.chat_template or "", coder.tokenizer),
    )
    told = tuple(note for note in notes if note is not None)
    return ModelSource(shape, checkpoint, coder, pieces, notes=told, chosen_template=chosen)


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


def open_data(
    config: Config,
    model: ModelSource,
    *,
    position: Mapping[str, Any] | None = None,
    read: int = 0,
    writes: bool = True,
    say: Callable[[str], object] = lambda text: None,
) -> Dataset:
    """Returns the data of ``data.source`` or ``data.sources``: tokenized and packed, or streamed.

    Args:
        position: of streamed data, as an earlier run committed it, which had read ``read`` sequences.
        writes: whether tokens may be kept in the cache.
        say: told what takes long.

    Raises:
        DataError: the data is missing, malformed or empty, or nothing of it would be trained.
    """
    data = config.data
    settings = DataSettings(
        source=data.source,
        sources=[SourceSpec(entry.path, entry.weight, entry.kind or "auto") for entry in data.sources],
        kind=data.kind,
        eval_source=data.eval_source,
        eval_fraction=data.eval_fraction,
        eval_sequences=data.eval_sequences,
        seq_len=data.seq_len,
        too_long=data.too_long,
        packing_on=data.packing,
        length_grouping=data.length_grouping,
        bad_records=data.bad_records,
        stream=data.stream,
        seed=config.train.seed,
        micro_batch_size=config.train.micro_batch_size,
        cache=cache_folder(config) if writes else None,
        looks_only=not writes,
        cache_all=data.cache not in (CACHE_AUTO, CACHE_OFF),
        # A run writes nothing into its folder before it has been found to be right.
        cache_home=Path(config.run.dir).expanduser() if data.cache == CACHE_AUTO else None,
        position=position or {},
        read=read,
        say=say,
    )
    return build_dataset(settings, model.coder, vocab_size=model.config.vocab_size)


def cache_folder(config: Config) -> Path | None:
    """Returns the folder of the token cache, or None where there is none."""
    named = config.data.cache
    if named == CACHE_AUTO:
        return Path(config.run.dir).expanduser() / "token_cache"
    return None if named == CACHE_OFF else Path(named).expanduser()
