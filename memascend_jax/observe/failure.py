# SPDX-License-Identifier: Apache-2.0
"""How a program ends: the exit status of a call, one clear message for a failure, and no traceback for Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from memascend_jax.errors import MemascendError, StoreError

INTERRUPTED = 130
#: The command can be given again and nothing is lost (EX_TEMPFAIL of sysexits.h); ``StoppedError`` ends with it too.
STOPPED = 75
#: For the help of every program.
EXIT_STATUSES = """\
exit status: 0 done, 1 run failed, 2 configuration, 3 machine unfit, 4 does not fit, 5 data, 6 storage,
7 loss or gradient not finite, 75 stopped: the same command goes on, 130 interrupted (during a run: twice)"""
logger = logging.getLogger(__name__)


def exit_status(call: Callable[[], int], *, resumable: bool = False) -> int:
    """Returns what ``call`` returns, or the exit status of its failure after writing the message to stderr.

    A failure that no class of ``memascend_jax.errors`` and no errno explains is a defect and keeps its
    traceback.

    Args:
        resumable: ``call`` is a run, which goes on where it ended.
    """
    try:
        return call()
    except MemascendError as error:
        _say(str(error))
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`memascend report … | head`). Python would complain again when
        # it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if is_disk_full(error):
            _say(_disk_full(error, resumable))
            return StoreError.exit_code
        _say(str(error))
        logger.debug("failed", exc_info=error)
        return 1
    except KeyboardInterrupt as error:
        _say(str(error) or "interrupted")
        return INTERRUPTED


def is_disk_full(error: OSError) -> bool:
    """Returns whether ``error`` is of a disk, or a user's share of it, that has no room left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def run_program(main: Callable[[], int], *, resumable: bool = False) -> NoReturn:
    """Ends this process with the exit status of ``main``; Ctrl-C never shows a traceback, however often it comes.

    SIGTERM does what SIGINT does. The first raises ``KeyboardInterrupt``, so that what is half made is removed again;
    any further one, and one within an import, ends the process at once. Once ``main`` is over
    neither SIGINT nor SIGTERM changes its status: the interpreter's shutdown runs handlers of libraries,
    which would be interrupted half way.

    Args:
        resumable: the same command does what this one did not come to, so that a SIGTERM, from which a scheduler shall
            learn that, ends it with 75.

    Call it in the main thread, before anything is imported that takes long. ``main`` may handle signals itself for
    a while, as ``training.stop.StopRequest`` does. A signal that comes before this call is Python's to handle.
    """
    interrupts = _Interrupts(resumable)
    sys.unraisablehook = interrupts.on_unraisable
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupts.on_signal)
    try:
        status = main()
        interrupts.over = True
        if status == INTERRUPTED and interrupts.came:
            status = interrupts.status
    except BaseException:
        interrupts.over = True
        _ignore_signals()
        if not interrupts.came:
            raise  # A defect, with its traceback; or argparse, which ends the process itself.
        # Not always a KeyboardInterrupt any more: libraries make other errors of it.
        _say(interrupts.text)
        status = interrupts.status
    _ignore_signals()
    sys.exit(status)


def say_at_once(text: str) -> None:
    """Writes one line to stderr by one system call, as a signal handler may while another write is under way."""
    # A progress bar leaves the cursor behind itself.
    start = "\n" if os.isatty(2) else ""
    os.write(2, f"{start}{text}\n".encode())


class _Interrupts:
    """What SIGINT and SIGTERM do in a program; ``came``: there was one, ``over``: the program's status is known."""

    def __init__(self, resumable: bool) -> None:
        self.came = False
        self.over = False
        self.status = INTERRUPTED
        self.text = "interrupted"
        self._resumable = resumable

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.over:
            return
        if not self.came and self._resumable and number == signal.SIGTERM:
            self.status = STOPPED
            self.text = "stopped by SIGTERM before the run had begun; the same command begins it, or goes on"
        if self.came or _is_import(frame):
            # Native modules do not survive an exception in the middle of their initialisation: jaxlib crashes.
            self._end_at_once()
        self.came = True
        raise KeyboardInterrupt(self.text)

    def on_unraisable(self, unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            # Raised where nobody can catch it, as in a destructor: it would be lost, and the program go on.
            self._end_at_once()
        if self.over and unraisable.exc_type is OSError:
            return  # Python's note that a signal came just before it was to be ignored.
        sys.__unraisablehook__(unraisable)

    def _end_at_once(self) -> NoReturn:
        say_at_once(f"memascend: {self.text}")
        os._exit(self.status)


def _is_import(frame: FrameType | None) -> bool:
    """Returns whether an import is under way above ``frame``."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _disk_full(error: OSError, resumable: bool) -> str:
    what, where = error.strerror or str(error), ""
    if isinstance(error.filename, str):
        what += f": '{error.filename}'"
        with contextlib.suppress(OSError):
            # What was half written may be gone again, with its folder.
            parents = Path(error.filename).absolute().parents
            disk = os.statvfs(next(folder for folder in parents if folder.is_dir()))
            where = f" ({disk.f_bavail * disk.f_frsize:,} bytes are free there)"
    goes_on = ": a run on SSD goes on from its last committed step" if resumable else ""
    return f"{what}{where}; free space, then give the same command again{goes_on}"


def _say(message: str) -> None:
    # What is redirected to a full disk is lost, but not the exit status.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"memascend: {message}\n")
        sys.stderr.flush()
