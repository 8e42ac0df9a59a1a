# SPDX-License-Identifier: Apache-2.0
"""A store's model with another size of vocabulary or more tokens; a run goes on with it. jax-free."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from memascend_jax.checkpoints.model_files import CONFIG, TOKENIZER, ModelFiles
from memascend_jax.checkpoints.store_checkpoint import FILE_PREFIX, ModelRecord, file_array, is_model_record
from memascend_jax.checkpoints.vocabulary import (
    TABLES,
    NewRows,
    RowInit,
    add_tokens,
    files_with_vocabulary,
    rows_needed,
    special_ids_of,
)
from memascend_jax.errors import ConfigError, StoreError
from memascend_jax.observe.screen import Screen
from memascend_jax.optim.format_conversion import master_of
from memascend_jax.recipes.inputs import RANDOM, open_model
from memascend_jax.recipes.store_rewrite import Rewrite, rewrite_store
from memascend_jax.recipes.stored_run import (
    config_of,
    format_of,
    open_committed,
    run_of,
    with_config,
    without_data,
)
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.training.stored_state import StoredState

_READ_BYTES = 4 << 20


def resize_vocabulary(
    paths: Sequence[str],
    size: int | None,
    tokens: Sequence[str],
    init: RowInit,
    into: Sequence[str] | None,
    screen: Screen,
) -> dict[str, Any]:
    """Leaves the store's model with tables of ``size`` rows and with ``tokens`` added to its tokenizer.

    Rows that stay keep every bit, of their state too; new rows begin as ``init`` says, from the run's masters, with
    moments of zero. A run is at the same step and remembers what it did; its configuration gets the keys that it has
    to be gone on with.

    Args:
        size: rows of the embedding, and of a head of its own; None: as many as there are, and those the tokens need.

    Returns:
        ``paths`` and ``bytes`` of the store, ``rows`` and ``rows_before``, ``settings`` of a run that goes on.

    Raises:
        ConfigError: neither a size nor a token is given, or nothing would change; tokens for a model without tokenizer.
        DataError: the size is smaller than the ids in use, or a token cannot be added.
        StoreError: see ``rewrite_store``; or the store holds neither a run nor a model.
    """
    if size is None and not tokens:
        raise ConfigError("nothing to change: give a size (--size) or a token (--add-token)")
    with open_committed(paths) as old:
        if is_model_record(old.run_state):
            return _resize_model(old, size, tokens, init, into, screen)
        return _resize_run(old, size, tokens, init, into, screen)


def _resize_run(
    old: TensorStore,
    size: int | None,
    tokens: Sequence[str],
    init: RowInit,
    into: Sequence[str] | None,
    screen: Screen,
) -> dict[str, Any]:
    run, where = run_of(old), ", ".join(old.paths)
    config = config_of(run)
    if config.lora.rank:
        raise ConfigError(
            f"the run in the store {where} trains LoRA adapters (lora.rank={config.lora.rank}) beside a model that "
            "stays as it is; nothing was changed. Merge them (memascend export RUN DIR --merge), and resize that model"
        )
    is_random = config.model.source == RANDOM
    if is_random and tokens:
        raise ConfigError(
            f"the run in the store {where} began with random weights: it has no tokenizer to add to"
        )
    state = StoredState(old, format_of(run))
    model = open_model(without_data(config))
    try:
        special = special_ids_of(model.config.to_hf())
        tokenizer = model.coder.tokenizer if model.coder is not None else None
        if tokenizer is not None:
            add_tokens(tokenizer, tokens, where)
        rows = rows_needed(size, state.shape(TABLES[0])[0], tokenizer, special, where)
    finally:
        model.close()
    if is_random:
        changed: dict[str, Any] = {"config": {**config.model.config, "vocab_size": rows}}
    else:
        added = [*config.model.add_tokens, *tokens]
        changed = {"vocab_size": rows, "add_tokens": added, "new_rows": init}
    # Digests of the model and of data in its tokens: what they were is none of the new vocabulary.
    after = replace(run, config=with_config(run, model=changed), contents={})
    change = Rewrite(
        after.encode(),
        **_tables(state, rows, init, seed=config.train.seed, where=where, more=bool(tokens)),
        target_tile_elements=run.tile_elements,
    )
    made = rewrite_store(old, state, change, into, screen)
    settings = _settings(changed if not is_random else {"config.vocab_size": rows})
    return {**made, "rows": rows, "rows_before": state.shape(TABLES[0])[0], "settings": settings}


def _resize_model(
    old: TensorStore,
    size: int | None,
    tokens: Sequence[str],
    init: RowInit,
    into: Sequence[str] | None,
    screen: Screen,
) -> dict[str, Any]:
    where = ", ".join(old.paths)
    record, state = ModelRecord.decode(old.run_state, where), StoredState(old, None)
    files = {
        name.removeprefix(FILE_PREFIX): old.get(name).tobytes()
        for name in state.others
        if name.startswith(FILE_PREFIX)
    }
    tokenizer = ModelFiles.of(where, files).tokenizer() if TOKENIZER in files or tokens else None
    if tokenizer is not None:
        add_tokens(tokenizer, tokens, where)
    rows = rows_needed(size, state.shape(TABLES[0])[0], tokenizer, special_ids_of(record.config), where)
    config = {**record.config, "vocab_size": rows}
    digest = hashlib.sha256(json.dumps([record.digest, rows, list(tokens), init]).encode()).hexdigest()
    written = files_with_vocabulary(files, tokenizer, tokens, rows)
    replaced = {
        FILE_PREFIX + name: file_array(content)
        for name, content in written.items()
        if content != files.get(name) or name == CONFIG
    }
    change = Rewrite(
        replace(record, config=config, digest=digest).encode(),
        **_tables(state, rows, init, seed=0, where=where, more=bool(tokens)),
        replaced=replaced,
    )
    made = rewrite_store(old, state, change, into, screen)
    return {**made, "rows": rows, "rows_before": state.shape(TABLES[0])[0], "settings": []}


def _tables(
    state: StoredState, rows: int, init: RowInit, *, seed: int, where: str, more: bool
) -> dict[str, Any]:
    """The part of a ``Rewrite`` that is about the tables."""
    tables = [name for name in TABLES if name in state.parameters]
    if not tables:
        raise StoreError(
            f"the store '{where}' holds no table of embeddings ({TABLES[0]}); nothing was changed"
        )
    before, columns = state.shape(tables[0])
    if rows == before and not more:
        raise ConfigError(
            f"the model in the store {where} has a vocabulary of {rows:,} already; nothing was changed"
        )

    def masters(name: str) -> Iterator[tuple[int, NDArray[Any]]]:
        fmt, total = state.format_of(name), math.prod(state.shape(name))
        # Whole rows, and whole groups of scales.
        step = max(_READ_BYTES // (4 * columns * 256), 1) * columns * 256
        for start in range(0, total, step):
            n = min(step, total - start)
            yield start, master_of(fmt, state.read(name, start, n, masters_only=True))

    shapes = dict.fromkeys(tables, (rows, columns)) if rows != before else {}
    return {"shapes": shapes, "new_rows": NewRows(init, masters, columns, seed=seed)}


def _settings(changed: dict[str, Any]) -> list[str]:
    """The keys that a run has to be gone on with, as a command line has them."""

    def shown(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else str(value)

    return [f"model.{key}={shown(value)}" for key, value in changed.items() if value not in ([], None)]
