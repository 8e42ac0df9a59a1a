# SPDX-License-Identifier: Apache-2.0
"""Processes of the main job to be killed: for each line on stdin, forks a child that carries out one run.

Line: a JSON object with ``arguments`` of the command, ``log``: the file that the child's output goes to, and ``end``:
null, or [operation, number, moment], which makes the child kill itself by SIGKILL ``before`` or ``after`` its
number-th ``write`` or ``flush`` of the store, ``line`` of the metrics, ``file`` of the run, ``chunk`` of a checkpoint
or ``step`` of one that is removed. Other moments: ``within``, when half of a line is written; ``pause`` stops the
process until SIGCONT; ``EIO`` and ``ENOSPC`` let this ``read``, ``write`` or ``flush`` of the store and all that follow
fail.
``initial_scale`` replaces that of a dynamic loss scale, so that a short run has steps to skip.

Forking saves the start of an interpreter and the imports: the parent starts neither a thread nor jax's backend.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from simulated_disk import DoneTicket

import memascend_jax.recipes.finetune
import memascend_jax.transfer.cpu  # noqa: F401  What a run imports late.
from memascend_jax.checkpoints.array_files import ArrayWriter
from memascend_jax.checkpoints.orbax_steps import OrbaxSteps
from memascend_jax.observe.metrics import MetricsFile
from memascend_jax.optim import loss_scale
from memascend_jax.recipes import llama_finetune
from memascend_jax.recipes.run_folder import RunFolder
from memascend_jax.storage import options
from memascend_jax.storage.engine import native_engine
from memascend_jax.storage.volume import Volume

#: What can be waited for, by the function that does it.
OPERATIONS: dict[str, tuple[type, str]] = {
    "write": (Volume, "_submit_write"),
    "flush": (Volume, "flush"),
    "line": (MetricsFile, "write"),
    "file": (RunFolder, "_write"),
    "chunk": (ArrayWriter, "write"),
    "step": (OrbaxSteps, "forget"),
}


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still here")


def end_at(operation: str, number: int, moment: str) -> None:
    """Arranges the process's end."""
    owner, name = OPERATIONS[operation]
    really: Callable[..., Any] = getattr(owner, name)
    done = 0

    def counted(self: Any, *arguments: Any, **more: Any) -> Any:
        nonlocal done
        done += 1
        if done == number:
            if moment == "before":
                die()
            if moment == "pause":
                os.kill(os.getpid(), signal.SIGSTOP)
                return really(self, *arguments, **more)
            if moment == "within":
                # The first half of the line, as a write that the kernel took in two.
                text = json.dumps(arguments[0]).encode()
                os.pwrite(self._fd, text[: len(text) // 2], self._length)
                die()
            really(self, *arguments, **more)
            die()
        return really(self, *arguments, **more)

    setattr(owner, name, counted)


class FailingEngine:
    """An engine whose ``operation`` fails from the ``number``-th on."""

    def __init__(self, fds: Sequence[int], operation: str, number: int, code: int, **more: Any) -> None:
        self._engine = native_engine(fds, **more)
        self._path = str(Path(f"/proc/self/fd/{fds[0]}").readlink())
        self._operation, self._left, self._code = operation, number, code

    def submit_read(self, *arguments: Any, **more: Any) -> Any:
        error = self._error("read")
        return self._engine.submit_read(*arguments, **more) if error is None else DoneTicket(error)

    def submit_write(self, *arguments: Any, **more: Any) -> Any:
        error = self._error("write")
        return self._engine.submit_write(*arguments, **more) if error is None else DoneTicket(error)

    def flush(self) -> None:
        error = self._error("flush")
        if error is not None:
            raise error
        self._engine.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _error(self, operation: str) -> OSError | None:
        self._left -= operation == self._operation
        if operation != self._operation or self._left > 0:
            return None
        return OSError(self._code, f"cannot {operation}: {os.strerror(self._code)} [injected]", self._path)


def carry_out(
    arguments: list[str], log: str, end: tuple[str, int, str] | None, initial_scale: float | None
) -> None:
    """Becomes the command; never returns."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if end is not None and end[2] in ("EIO", "ENOSPC"):
        operation, number, name = end
        make = functools.partial(FailingEngine, operation=operation, number=number, code=getattr(errno, name))
        options.native_engine = make  # type: ignore[assignment]
    elif end is not None:
        end_at(*end)
    if initial_scale is not None:
        loss_scale.INITIAL_SCALE = initial_scale
    sys.argv[1:] = arguments
    llama_finetune.program()


def main() -> None:
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                carry_out(**request)
            except SystemExit as error:
                sys.stdout.flush()
                os._exit(int(error.code or 0))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.write(1, f"{child}\n".encode())
        # It is waited for only when whoever kills it holds on to it by more than its number.
        sys.stdin.readline()
        _, status = os.waitpid(child, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    main()
