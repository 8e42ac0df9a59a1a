# SPDX-License-Identifier: Apache-2.0
"""Processes of the main job to be killed: for each line on stdin, forks a child that carries out one run.

Line: a JSON object with ``arguments`` of the command, ``log``: the file that the child's output goes to, and ``end``:
null, or [operation, number, moment], which makes the child kill itself by SIGKILL ``before`` or ``after`` its
number-th ``write`` or ``flush`` of the store, ``line`` of the metrics or ``file`` of the run; ``within`` a line half
of it is written. ``initial_scale`` replaces that of a dynamic loss scale, so that a short run has steps to skip.

Forking saves the start of an interpreter and the imports: the parent starts neither a thread nor jax's backend.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import memascend_jax.recipes.finetune
import memascend_jax.transfer.cpu  # noqa: F401  What a run imports late.
from memascend_jax.checkpoints.array_files import ArrayWriter
from memascend_jax.checkpoints.orbax_steps import OrbaxSteps
from memascend_jax.observe.metrics import MetricsFile
from memascend_jax.optim import loss_scale
from memascend_jax.recipes import llama_finetune
from memascend_jax.recipes.run_folder import RunFolder
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
            if moment == "within":
                # The first half of the line, as a write that the kernel took in two.
                text = json.dumps(arguments[0]).encode()
                os.pwrite(self._fd, text[: len(text) // 2], self._length)
                die()
            really(self, *arguments, **more)
            die()
        return really(self, *arguments, **more)

    setattr(owner, name, counted)


def carry_out(
    arguments: list[str], log: str, end: tuple[str, int, str] | None, initial_scale: float | None
) -> None:
    """Becomes the command; never returns."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if end is not None:
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
            finally:
                os._exit(1)
        os.write(1, f"{child}\n".encode())
        # It is waited for only when whoever kills it holds on to it by more than its number.
        sys.stdin.readline()
        _, status = os.waitpid(child, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    main()
