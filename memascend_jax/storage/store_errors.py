# SPDX-License-Identifier: Apache-2.0
"""The store's own errors: those of ``memascend_jax.errors`` with what a caller needs to act on."""

from __future__ import annotations

import errno as errno_names
import os
from collections.abc import Sequence

from memascend_jax.errors import StoreError

#: What happened to a dirty store, after its name.
OVERWRITTEN = "was being overwritten in place when its last run ended, so it holds a mixture of two steps"


class StoreIOError(StoreError, OSError):
    """The system refused an operation: a ``StoreError`` with a clear message and an ``OSError`` with
    ``errno`` and ``filename``."""

    def __init__(self, message: str, errno: int, filename: str) -> None:
        super().__init__(errno, os.strerror(errno), filename)
        self.message = message

    def __str__(self) -> str:
        return self.message

    @classmethod
    def of(cls, action: str, path: str, error: OSError, remedy: str) -> StoreIOError:
        """Returns the error for ``action`` on ``path`` that ``error`` ended, with one sentence of remedy."""
        code = error.errno or errno_names.EIO
        return cls(f"cannot {action} '{path}': {errno_text(code)}; {remedy}", code, path)


class DamagedStoreError(StoreError):
    """What is on disk is not what was written: nothing but an earlier copy or another beginning helps."""


class DirtyStoreError(StoreError):
    """A store in ``durability: checkpoint`` was overwritten in place and never committed again.

    ``generation`` and ``run_state`` are those of the last commit: what the data was before, not what it is.
    """

    def __init__(self, message: str, generation: int, run_state: bytes) -> None:
        super().__init__(message)
        self.generation = generation
        self.run_state = run_state


def dirty_store(paths: Sequence[str], generation: int, run_state: bytes) -> DirtyStoreError:
    """Returns the error for a store that is dirty.

    Args:
        paths: its members, as a user gives them to a command.
        generation: the number of the dirty mark, one more than that of the last commit.
        run_state: that of the last commit.
    """
    return DirtyStoreError(
        f"store '{', '.join(paths)}' {OVERWRITTEN} (last commit: generation {generation - 1:,}). Remove it (memascend "
        f"store wipe {' '.join(paths)}) and start again with a new run.dir; with offload.durability=step a crash loses "
        "nothing",
        generation - 1,
        run_state,
    )


def errno_text(code: int) -> str:
    """Returns ``"Input/output error [EIO]"`` for 5."""
    return f"{os.strerror(code)} [{errno_names.errorcode.get(code, code)}]"
