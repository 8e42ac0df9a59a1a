# SPDX-License-Identifier: Apache-2.0
"""Encoded examples, one by one and kept flat: five bytes a token, however many examples there are."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One example: ``tokens`` int32 [n], and ``trained`` bool [n]: whether the model learns to predict it."""

    tokens: IntArray
    trained: BoolArray

    @property
    def trained_tokens(self) -> int:
        """Tokens that the loss counts; the first one has nothing to be predicted from."""
        return int(self.trained[1:].sum())

    def cut(self, length: int) -> Encoded:
        """Returns a view of the first ``length`` tokens, ending with the last trained one among them."""
        trained = self.trained[:length]
        last = int(np.flatnonzero(trained)[-1]) + 1 if trained.any() else len(trained)
        return Encoded(self.tokens[:last], trained[:last])


@dataclass(frozen=True, slots=True)
class Examples:
    """Examples by number: example i is ``tokens[starts[i]:starts[i + 1]]``."""

    tokens: IntArray
    trained: BoolArray
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> Encoded:
        """Returns views of one example's arrays."""
        span = slice(int(self.starts[number]), int(self.starts[number + 1]))
        return Encoded(self.tokens[span], self.trained[span])

    def lengths(self) -> npt.NDArray[np.int64]:
        """Returns the tokens of each example, int64 [examples]."""
        return np.diff(self.starts)


@dataclass(slots=True)
class ExampleBuilder:
    """Collects examples one after another without keeping an object for each."""

    _tokens: array[int] = field(default_factory=lambda: array("i"))
    _trained: bytearray = field(default_factory=bytearray)
    _starts: array[int] = field(default_factory=lambda: array("q", [0]))

    def add(self, example: Encoded) -> int:
        """Returns the number of ``example``, whose arrays are copied."""
        self._tokens.frombytes(np.ascontiguousarray(example.tokens, np.int32).tobytes())
        self._trained += np.ascontiguousarray(example.trained, np.bool_).tobytes()
        self._starts.append(len(self._trained))
        return len(self._starts) - 2

    def finish(self) -> Examples:
        """Returns the examples, over this builder's memory; nothing can be added afterwards."""
        return Examples(
            tokens=np.frombuffer(self._tokens, np.int32),
            trained=np.frombuffer(self._trained, np.bool_),
            starts=np.frombuffer(self._starts, np.int64),
        )
