# SPDX-License-Identifier: Apache-2.0
"""How a command ends: the exit status of a call, and one clear message for a failure."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from memascend_jax.errors import MemascendError

INTERRUPTED = 130
logger = logging.getLogger(__name__)


def exit_status(call: Callable[[], int]) -> int:
    """Returns what ``call`` returns, or the exit status of its failure after writing the message to stderr.

    A failure that no class of ``memascend_jax.errors`` and no errno explains is a defect and keeps its
    traceback.
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
        _say(str(error))
        logger.debug("failed", exc_info=error)
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED


def _say(message: str) -> None:
    sys.stderr.write(f"memascend: {message}\n")
    sys.stderr.flush()
