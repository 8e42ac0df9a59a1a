# SPDX-License-Identifier: Apache-2.0
"""The store's own errors: those of ``memascend_jax.errors`` with what a caller needs to act on."""

from __future__ import annotations

import errno as errno_names
import os

from memascend_jax.errors import StoreError


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


class DirtyStoreError(StoreError):
    """A store in ``durability: checkpoint`` was overwritten in place and never committed again.

    ``generation`` and ``run_state`` are those of the last commit: what the data was before, not what it is.
    """

    def __init__(self, message: str, generation: int, run_state: bytes) -> None:
        super().__init__(message)
        self.generation = generation
        self.run_state = run_state


def errno_text(code: int) -> str:
    """Returns ``"Input/output error [EIO]"`` for 5."""
    return f"{os.strerror(code)} [{errno_names.errorcode.get(code, code)}]"
