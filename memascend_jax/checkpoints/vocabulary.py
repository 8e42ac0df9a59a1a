# SPDX-License-Identifier: Apache-2.0
"""A vocabulary of another size: the tokenizer's new tokens, and the new rows of the tables that go with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.model_files import ADDED_TOKENS, CONFIG, TOKENIZER, TOKENIZER_CONFIG
from memascend_jax.errors import DataError
from memascend_jax.models.shapes import EMBED_NAME, LM_HEAD_NAME

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: How new rows begin. ``mean``: every one is the mean of the old rows, as transformers does by default, which leaves
#: what the model says as it was; ``normal``: drawn with mean and deviation of each column; ``zeros``.
RowInit = Literal["mean", "normal", "zeros"]
ROW_INITS: tuple[RowInit, ...] = ("mean", "normal", "zeros")
#: The tensors that have a row per token; a tied model has the first only.
TABLES = (EMBED_NAME, LM_HEAD_NAME)
#: Rows that are summed at once, in float64.
_ROWS_AT_ONCE = 1024

#: Yields a table's elements in order: ``(first element, flat values)``.
Pieces = Iterable[tuple[int, NDArray[Any]]]


class NewRows:
    """Values of rows that tables get. The same for the same seed, table and row, however they are asked for.

    Args:
        pieces_of: returns the elements of an old table; read once, when its rows are first asked for.
        columns: elements of a row.
    """

    def __init__(
        self, init: RowInit, pieces_of: Callable[[str], Pieces], columns: int, *, seed: int = 0
    ) -> None:
        self._init = init
        self._pieces_of = pieces_of
        self._columns = columns
        self._seed = seed
        self._known: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}

    def __call__(self, name: str, first_row: int, n_rows: int) -> NDArray[np.float32]:
        """Returns rows ``[first_row, first_row + n_rows)`` of table ``name``, flat."""
        if self._init == "zeros":
            return np.zeros(n_rows * self._columns, np.float32)
        mean, deviation = self._statistics(name)
        rows = np.tile(mean, (n_rows, 1))
        if self._init == "normal":
            key = np.frombuffer(hashlib.sha256(f"{self._seed}:{name}".encode()).digest()[:16], np.uint64)
            for index in range(n_rows):
                counter = np.array([0, 0, first_row + index, 1], np.uint64)
                drawn = np.random.Generator(np.random.Philox(counter=counter, key=key))
                rows[index] += deviation * drawn.standard_normal(self._columns)
        return rows.astype(np.float32).reshape(-1)

    def _statistics(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation of each column over the old rows."""
        if name not in self._known:
            total, squares, count = np.zeros(self._columns), np.zeros(self._columns), 0
            for _, values in self._pieces_of(name):
                rows = values.reshape(-1, self._columns)
                for start in range(0, len(rows), _ROWS_AT_ONCE):
                    part = rows[start : start + _ROWS_AT_ONCE].astype(np.float64)
                    total += part.sum(axis=0)
                    squares += np.square(part).sum(axis=0)
                count += len(rows)
            mean = total / max(count, 1)
            deviation = np.sqrt(np.maximum(squares / max(count, 1) - np.square(mean), 0.0))
            self._known[name] = mean, deviation
        return self._known[name]


def add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], where: str) -> None:
    """Gives ``tokenizer`` the ``tokens``, each with an id of its own behind those that there are.

    They are plain tokens, matched wherever they stand in a text, and no special ones: a decoded text shows them.

    Raises:
        DataError: a token is empty, there already, or given twice; all are told.
    """
    from tokenizers import AddedToken

    faults = []
    for index, token in enumerate(tokens):
        known = tokenizer.token_to_id(token)
        if not token:
            faults.append("a token is empty")
        elif known is not None:
            faults.append(f"{token!r} is one already, id {known:,}")
        elif token in tokens[:index]:
            faults.append(f"{token!r} is given twice")
    if faults:
        raise DataError(
            f"cannot add tokens to the tokenizer of '{where}': {'; '.join(faults)}; leave those out"
        )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])


def ids_of(tokenizer: Tokenizer) -> int:
    """Returns one more than the highest id of a tokenizer: the rows that it needs."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def rows_needed(
    wanted: int | None, before: int, tokenizer: Tokenizer | None, special: Iterable[int], where: str
) -> int:
    """Returns the rows of the tables: ``wanted``, or those of ``before`` and as many more as the tokenizer needs.

    Raises:
        DataError: ``wanted`` is fewer than are in use.
    """
    in_use = max([ids_of(tokenizer) if tokenizer is not None else 0, *(index + 1 for index in special)])
    if wanted is None:
        return max(before, in_use)
    if wanted < in_use:
        raise DataError(
            f"cannot give the model in '{where}' a vocabulary of {wanted:,}: ids up to {in_use - 1:,} are in use by "
            f"its tokenizer and configuration; give at least {in_use:,}"
        )
    return wanted


def check_vocabulary(rows: int, tokenizer: Tokenizer, where: str) -> str | None:
    """Returns what a user should know of tables of ``rows`` rows beside ``tokenizer``; None: they are of one size.

    Raises:
        DataError: the tokenizer has ids that the tables have no row for.
    """
    ids = ids_of(tokenizer)
    if ids > rows:
        raise DataError(
            f"cannot use the model in '{where}': its tokenizer has ids up to {ids - 1:,}, its tables only {rows:,} "
            f"rows. Give them rows with model.vocab_size={ids} (model.new_rows: what these begin as), or use the "
            "tokenizer that belongs to the model"
        )
    if ids == rows:
        return None
    return (
        f"the model's tables have {rows:,} rows, its tokenizer {ids:,} tokens: {rows - ids:,} rows are to spare, for "
        "model.add_tokens"
    )


def special_ids_of(config: Mapping[str, Any]) -> list[int]:
    """Returns the ids that a ``config.json`` names."""
    found: list[int] = []
    for name in ("bos", "eos", "pad"):
        value = config.get(f"{name}_token_id")
        found += [
            index
            for index in (value if isinstance(value, list | tuple) else [value])
            if isinstance(index, int)
        ]
    return found


def files_with_vocabulary(
    files: Mapping[str, bytes], tokenizer: Tokenizer | None, tokens: Sequence[str], vocab_size: int
) -> dict[str, bytes]:
    """Returns the files beside the weights for ``tokenizer``, which has ``tokens`` added, and ``vocab_size`` rows."""
    changed = dict(files)
    if CONFIG in files:
        changed[CONFIG] = _text(json.loads(files[CONFIG]) | {"vocab_size": vocab_size})
    if tokenizer is None or not tokens:
        return changed
    changed[TOKENIZER] = tokenizer.to_str(pretty=True).encode()
    ids = {token: tokenizer.token_to_id(token) for token in tokens}
    if ADDED_TOKENS in files:
        changed[ADDED_TOKENS] = _text(json.loads(files[ADDED_TOKENS]) | ids)
    if TOKENIZER_CONFIG in files:
        settings = json.loads(files[TOKENIZER_CONFIG])
        plain = {
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": False,
        }
        added = {str(index): {"content": token, **plain} for token, index in ids.items()}
        settings["added_tokens_decoder"] = settings.get("added_tokens_decoder", {}) | added
        changed[TOKENIZER_CONFIG] = _text(settings)
    return changed


def _text(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
