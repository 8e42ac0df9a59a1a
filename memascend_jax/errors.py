# SPDX-License-Identifier: Apache-2.0
"""The errors that reach a user, each with the exit code the command line returns for it.

A message names the action attempted, the object, what was got and expected with units, and one
sentence of remedy. Failures of the system itself stay ``OSError`` with errno and filename.
"""

from __future__ import annotations


class MemascendError(Exception):
    """A failure with a clear message for the user. ``exit_code`` is the process's exit status."""

    exit_code = 1


class RunError(MemascendError):
    """A run failed for a reason that none of the other classes names."""

    exit_code = 1


class ConfigError(MemascendError):
    """The configuration is wrong: unknown keys, wrong types, contradictory settings."""

    exit_code = 2


class MachineError(MemascendError):
    """This machine cannot run the program: platform, kernel, instruction set, missing device."""

    exit_code = 3


class BudgetError(MemascendError):
    """The run does not fit the memory, device or disk it was given."""

    exit_code = 4


class DataError(MemascendError):
    """Model files or training data are missing, truncated, malformed or empty."""

    exit_code = 5


class StoreError(MemascendError):
    """A tensor store is missing, foreign, damaged, full, in use or used wrongly."""

    exit_code = 6


class NonfiniteError(MemascendError):
    """The loss or a gradient is inf or nan and the run was not told to skip such steps."""

    exit_code = 7


class StoppedError(MemascendError):
    """The run stopped on request at a committed step and can be resumed."""

    exit_code = 75
