# SPDX-License-Identifier: Apache-2.0
"""The rungs from the fastest I/O down, which were not reached, and why: said once, never silently."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

from memascend_jax.storage.volume import Volume

_log = logging.getLogger(__name__)
#: What this process has said already: a run opens its store more than once.
_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class Fallback:
    """A rung that was not reached. ``wanted`` and ``used`` are what the I/O goes through."""

    wanted: str
    used: str
    reason: str

    def __str__(self) -> str:
        return f"uses {self.used} instead of {self.wanted}: {self.reason}"

    def to_json(self) -> dict[str, str]:
        """Returns the fields."""
        return asdict(self)


def fallbacks(volume: Volume, has_arena: bool) -> list[Fallback]:
    """Returns the rungs that ``volume`` did not reach, the most important first.

    Without an arena there is no memory to register; that is a choice, not a fallback.
    """
    engine = volume.engine
    found = []
    if engine.backend_reason:
        found.append(Fallback("io_uring", engine.backend, engine.backend_reason))
    buffered = [member for member in volume.members if not member.direct]
    if buffered:
        reason = "; ".join(note for member in buffered for note in member.notes) or "direct_io is off"
        found.append(Fallback("direct I/O", "the page cache", reason))
    registered = getattr(engine, "uses_registered_buffers", True)
    if has_arena and engine.backend == "io_uring" and not registered:
        reason = str(getattr(engine, "registration_reason", ""))
        found.append(Fallback("registered buffers", "plain buffers", reason))
    return found


def report(path: str, found: list[Fallback], notes: list[str]) -> None:
    """Logs each fallback and each note about the store at ``path``, once in this process."""
    told = {note for fallback in found for note in fallback.reason.split("; ")}
    lines = [f"store '{path}' {fallback}" for fallback in found]
    lines += [note for note in notes if note not in told]
    for line in lines:
        if line not in _said:
            _said.add(line)
            _log.warning("%s", line)
