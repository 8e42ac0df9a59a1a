# SPDX-License-Identifier: Apache-2.0
"""What is asked of the data, as plain values: the keys of the section ``data``, and what a run adds to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memascend_jax.data.records import AUTO
from memascend_jax.data.sequences import Packing
from memascend_jax.units import MIB

#: Sources with more text than this are streamed by default: tokenized at the start it would take half a minute.
STREAMED_FROM_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A source with its share of the sequences; ``weight`` None: as large as it is."""

    path: str
    weight: float | None = None
    kind: str = AUTO


@dataclass(frozen=True, slots=True)
class DataSettings:
    """See ``config.sections.DataSection`` for the keys of the same names.

    Attributes:
        packing_on: ``data.packing``.
        cache: folder of the token cache; None: nothing is written.
        looks_only: the data is not trained on, only looked at.
        cache_all: whether data that is held in memory is cached too.
        cache_home: nothing is cached before this folder is there.
        position: of the streams, as an earlier run committed it.
        read: sequences that it had read.
        notes: sentences that a user should see with those of the data.
        say: told what takes long.
    """

    source: str = "pydocs"
    sources: Sequence[SourceSpec] = ()
    kind: str = AUTO
    eval_source: str | None = None
    eval_fraction: float = 0.1
    eval_sequences: int | None = None
    seq_len: int = 256
    too_long: str = "cut"
    packing_on: bool = True
    length_grouping: bool = False
    bad_records: str = "refuse"
    stream: str = "auto"
    seed: int = 0
    micro_batch_size: int = 1
    cache: Path | None = None
    looks_only: bool = False
    cache_all: bool = False
    cache_home: Path | None = None
    position: Mapping[str, Any] = field(default_factory=dict)
    read: int = 0
    notes: Sequence[str] = ()
    say: Callable[[str], object] = lambda text: None

    @property
    def is_random(self) -> bool:
        return not self.sources and self.source == "random"

    @property
    def named(self) -> str:
        """The sources in words."""
        return ", ".join(spec.path for spec in self.sources) or self.source

    def specs(self) -> list[SourceSpec]:
        """Returns the sources that are trained on."""
        return list(self.sources) or [SourceSpec(self.source)]

    def is_streamed(self, nbytes: int) -> bool:
        """Returns whether a source of ``nbytes`` of text is not held in memory."""
        return self.stream == "always" or (self.stream == "auto" and nbytes > STREAMED_FROM_BYTES)

    def packing(self, pad_id: int) -> Packing:
        """Returns how examples become sequences."""
        return Packing(
            self.seq_len,
            pad_id,
            self.too_long,
            self.packing_on,
            self.length_grouping,
            self.micro_batch_size,
            self.seed,
        )

    def position_of(self, part: int, *, weighted: bool) -> Mapping[str, Any] | None:
        """Returns where a stream goes on, by the number of its source; None: at its beginning."""
        found = self.position.get(str(part)) if weighted else self.position
        return found or None
