# SPDX-License-Identifier: Apache-2.0
"""``memascend checkpoint list|verify``: arguments and output only. Changes nothing, reaches neither jax nor orbax."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memascend_jax.observe.output import print_json, print_tables

#: Adds one command: (subparsers, name, function, help) -> its parser.
AddCommand = Callable[[Any, str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add_checkpoint_commands(commands: Any, add: AddCommand) -> None:
    """Adds ``checkpoint`` and its verbs to ``commands``."""
    parser = commands.add_parser("checkpoint", help="looks at or checks checkpoints", allow_abbrev=False)
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add(verbs, "list", _list, "the steps that there are, and what they are of; reads no arrays")
    verify = add(verbs, "verify", _verify, "reads every array and compares the checksums")
    verify.add_argument("--step", metavar="N", type=int, help="this step alone; default: all")
    for verb in verbs.choices.values():
        verb.add_argument("path", metavar="PATH", help="run.dir, checkpoint.dir, or the folder of one step")


def _list(options: argparse.Namespace) -> int:
    from memascend_jax.checkpoints.verify_step import describe_step
    from memascend_jax.errors import DataError

    folder, paths = _steps(options.path, None)
    steps = [describe_step(path) for path in paths]
    if options.json:
        print_json({"folder": str(folder), "steps": steps})
    else:
        from memascend_jax.observe.checkpoint_tables import steps_table

        print_tables(steps_table(str(folder), steps))
    faults = [step["fault"] for step in steps if step["fault"] is not None]
    for fault in faults:
        sys.stderr.write(f"memascend: {fault}\n")
    return DataError.exit_code if faults else 0


def _verify(options: argparse.Namespace) -> int:
    from memascend_jax.checkpoints.saved_step import open_step
    from memascend_jax.checkpoints.verify_step import StepReport, verify_step
    from memascend_jax.errors import DataError

    folder, paths = _steps(options.path, options.step)
    reports = []
    for path in paths:
        try:
            reports.append(verify_step(open_step(path)))
        except DataError as error:
            if len(paths) == 1:
                raise
            reports.append(StepReport(int(path.name), 0, 0, (str(error),)))
    facts = [
        {
            "step": r.step,
            "arrays": r.arrays,
            "bytes": r.bytes,
            "faults": list(r.faults),
            "digests_recorded": r.recorded,
        }
        for r in reports
    ]
    if options.json:
        print_json({"folder": str(folder), "steps": facts})
    else:
        from memascend_jax.observe.checkpoint_tables import verify_table

        print_tables(verify_table(str(folder), facts))
    faults = [fault for report in reports for fault in report.faults]
    for fault in faults:
        sys.stderr.write(f"memascend: {fault}\n")
    return DataError.exit_code if faults else 0


def _steps(text: str, step: int | None) -> tuple[Path, list[Path]]:
    """The folder of steps that is meant, and the folders of those to look at."""
    from memascend_jax.checkpoints.saved_step import find_steps, is_step, open_step, resolve_step
    from memascend_jax.errors import DataError

    path = Path(text).expanduser()
    if is_step(path):
        return path.parent, [path]
    if not find_steps(path) and (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if step is not None:
        return path, [resolve_step(path, step).path]
    steps = find_steps(path)
    if not steps:
        if not path.is_dir() and path.name.isdecimal() and find_steps(path.parent):
            open_step(path)  # Raises, with the steps that there are.
        there = "there is no such folder" if not path.is_dir() else "it holds no step"
        raise DataError(
            f"no checkpoints in '{path}': {there}. Give run.dir, checkpoint.dir, or the folder of a step"
        )
    return path, [path / str(number) for number in steps]
