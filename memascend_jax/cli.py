# SPDX-License-Identifier: Apache-2.0
"""The command ``memascend``: arguments and output only. Each of its commands imports what it needs, never jax.

Results go to stdout, as a table or with ``--json`` as one JSON object with a ``schema`` number; all else to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from memascend_jax import __version__
from memascend_jax.observe.failure import EXIT_STATUSES, exit_status, run_program
from memascend_jax.observe.output import print_json, print_tables

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes the overrides of a subcommand only in one run; those after an option are left over.
    if rest and (not hasattr(options, "overrides") or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    command: Command = options.command
    return exit_status(lambda: command(options))


def program() -> NoReturn:
    """Runs the command line as the process's program and ends it: the console script ``memascend``."""
    run_program(main)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser with all commands."""
    parser = argparse.ArgumentParser(
        prog="memascend",
        description="Training with the state on SSD: plans, stores and runs.",
        epilog=EXIT_STATUSES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"memascend-jax {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    from memascend_jax.plan_command import add_plan_command

    add_plan_command(commands, _command)
    from memascend_jax.store_commands import add_store_commands

    add_store_commands(commands, _command)
    from memascend_jax.checkpoint_commands import add_checkpoint_commands

    add_checkpoint_commands(commands, _command)
    from memascend_jax.model_commands import add_export_command, add_import_command

    add_import_command(commands, _command)
    add_export_command(commands, _command)
    report = _command(commands, "report", _report, "the figures of a run, finished or not")
    report.add_argument("run_dir", metavar="RUN", help="run.dir of the run")
    report.add_argument("--out", metavar="DIR", help="where report.html and report.png go; default: RUN")
    report.add_argument("--no-figures", action="store_true", help="print the figures only, write no files")
    return parser


def _command(commands: Any, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(command=run)
    return parser


def _report(options: argparse.Namespace) -> int:
    from memascend_jax.observe.report import read_run

    folder = Path(options.run_dir).expanduser()
    run = read_run(folder)
    if options.json:
        print_json(run)
    else:
        from memascend_jax.observe.overlap_table import overlap_table
        from memascend_jax.observe.summary import status_line, summary_table

        overlap = [overlap_table(run["overlap"])] if run["overlap"] else []
        print_tables(status_line(run["status"]), summary_table(run["summary"]), *overlap)
    if not options.no_figures:
        from memascend_jax.observe.chart_png import has_matplotlib
        from memascend_jax.observe.report_files import NO_PNG, write_report

        written = write_report(run, Path(options.out).expanduser() if options.out else folder)
        sys.stderr.write("".join(f"memascend: wrote {path}\n" for path in written))
        if not has_matplotlib():
            sys.stderr.write(f"memascend: {NO_PNG}\n")
    return 0


if __name__ == "__main__":
    program()
