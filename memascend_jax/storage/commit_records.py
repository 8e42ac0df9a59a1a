# SPDX-License-Identifier: Apache-2.0
"""Records that commits carry beside the user's run state: what a library keeps of the tensors it owns in the store.

On disk a run state with records is JSON, ``{"memascend_offload": {name: record}, "user": hex}``; one without is the
user's bytes as they are. Whoever commits, each record goes along in its newest form, and nobody commits while the
tensors of a record are half changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from memascend_jax.errors import StoreError

_KEY, _USER = "memascend_offload", "user"
#: What ``_joined`` begins with, so that a long run state without records is not parsed to find that out.
_BEGINNING = json.dumps({_KEY: {}}, separators=(",", ":"))[:-2].encode()


class CommitRecords:
    """The records of one open store, by name; ``committed`` are those of the last generation.

    Args:
        run_state: returns the run state of the last generation as it is on disk.
    """

    def __init__(self, run_state: Callable[[], bytes]) -> None:
        self._run_state = run_state
        self._known: tuple[bytes, Mapping[str, Any], bytes] = (b"", {}, b"")
        self._changed: dict[str, Any] = {}
        self._refusals: dict[str, str] = {}

    @property
    def user(self) -> bytes:
        """The user's run state of the last generation."""
        return self._parsed()[2]

    @property
    def committed(self) -> Mapping[str, Any]:
        """The records of the last generation."""
        return self._parsed()[1]

    @property
    def current(self) -> dict[str, Any]:
        """The records that the next commit takes along."""
        return {**self.committed, **self._changed}

    def set(self, name: str, record: Any) -> None:
        """Makes ``record``, fit for JSON, what the next commit keeps under ``name``."""
        self._changed[name] = record

    def roll_back(self, name: str) -> None:
        """Makes the last generation's record of ``name`` the newest again."""
        self._changed.pop(name, None)

    def refuse_commits(self, name: str, reason: str) -> None:
        """Lets every commit fail with ``reason`` until ``allow_commits`` of the same name."""
        self._refusals[name] = reason

    def allow_commits(self, name: str) -> None:
        """Says that the tensors of ``name`` are whole again."""
        self._refusals.pop(name, None)

    def with_user(self, user: bytes) -> bytes:
        """Returns the run state to commit: the user's and the newest records.

        Raises:
            StoreError: tensors of a record are half changed.
        """
        for reason in self._refusals.values():
            raise StoreError(f"cannot commit: {reason}")
        records = self.current
        if not records and not user.startswith(_BEGINNING):
            return user
        return json.dumps({_KEY: records, _USER: user.hex()}, separators=(",", ":")).encode()

    def _parsed(self) -> tuple[bytes, Mapping[str, Any], bytes]:
        raw = self._run_state()
        if self._known[0] is not raw:
            self._known = (raw, *split_run_state(raw))
        return self._known


def split_run_state(raw: bytes) -> tuple[Mapping[str, Any], bytes]:
    """Returns (records, the user's bytes) of a run state as it is on disk."""
    if raw.startswith(_BEGINNING):
        try:
            found = json.loads(raw)
            return found[_KEY], bytes.fromhex(found.get(_USER, ""))
        except (ValueError, TypeError, KeyError):
            pass
    return {}, raw
