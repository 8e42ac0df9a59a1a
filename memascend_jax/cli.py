# SPDX-License-Identifier: Apache-2.0
"""``memascend plan|store|export|report``: arguments and output only. Each command imports what it needs, never jax.

Results go to stdout, as a table or with ``--json`` as one JSON object with a ``schema`` number; all else to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memascend_jax import __version__
from memascend_jax.observe.failure import exit_status

SCHEMA = 1
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


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser with all commands."""
    parser = argparse.ArgumentParser(
        prog="memascend",
        description="Training with the state on SSD: plans, stores and runs.",
        epilog="exit status: 0 done, 1 failed, 2 configuration, 3 machine unfit, 4 does not fit, 5 data, 6 storage",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"memascend-jax {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    plan = _command(commands, "plan", _plan, "where every byte of a run would live; loads and writes nothing")
    from memascend_jax.recipes.llama_finetune import add_config_arguments

    add_config_arguments(plan)
    _add_store(commands)
    export = _command(commands, "export", _export, "a store's model as a Hugging Face folder")
    export.add_argument("paths", metavar="STORE", nargs="+", help="paths of the store, one per member")
    export.add_argument("--out", metavar="DIR", required=True, help="folder to make; must not exist")
    report = _command(commands, "report", _report, "the figures of a run, finished or not")
    report.add_argument("run_dir", metavar="RUN", help="run.dir of the run")
    return parser


def _add_store(commands: Any) -> None:
    store = commands.add_parser("store", help="looks at, checks or removes a store", allow_abbrev=False)
    verbs = store.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, verb, text in (
        ("inspect", _inspect, "what a store is and holds; changes nothing"),
        ("verify", _verify, "reads everything and compares the checksums; changes nothing"),
        ("wipe", _wipe, "removes a store: its files are deleted, its devices blanked"),
    ):
        parser = _command(verbs, name, verb, text)
        parser.add_argument("paths", metavar="PATH", nargs="+", help="paths of the store, one per member")
        if name == "wipe":
            parser.add_argument("--yes", action="store_true", help="do not ask, on a terminal either")


def _command(commands: Any, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(command=run)
    return parser


def _plan(options: argparse.Namespace) -> int:
    from memascend_jax.config import load_config

    config = load_config(options.config, options.overrides)
    from memascend_jax.recipes.planning import plan_from_config

    plan = plan_from_config(config)
    if options.json:
        _print_json(plan.to_json())
    else:
        from memascend_jax.observe.screen import plan_table

        _print(plan_table(plan.rows()))
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from memascend_jax.storage.tensor_store import TensorStore

    with TensorStore.open(options.paths, read_only=True, direct_io="optional") as store:
        facts = store.inspect()
    if options.json:
        _print_json(facts)
    else:
        from memascend_jax.observe.store_tables import store_tables

        _print(*store_tables(facts))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from memascend_jax.errors import StoreError
    from memascend_jax.storage.tensor_store import TensorStore

    with TensorStore.open(options.paths, read_only=True, direct_io="optional") as store:
        report, generation = store.verify(), store.generation
    facts = {
        "generation": generation,
        "tensors": report.tensors,
        "tiles": report.tiles,
        "bytes": report.bytes,
        "faults": [str(fault) for fault in report.faults],
    }
    if options.json:
        _print_json(facts)
    else:
        from memascend_jax.observe.store_tables import verify_table

        _print(verify_table(facts))
        for fault in report.faults:
            sys.stderr.write(f"memascend: {fault}\n")
    return StoreError.exit_code if report.faults else 0


def _wipe(options: argparse.Namespace) -> int:
    from memascend_jax.storage.wipe import wipe

    names = ", ".join(options.paths)
    if not options.yes and sys.stdin.isatty() and sys.stderr.isatty():
        sys.stderr.write(f"Remove the store {names} and everything in it? Type yes: ")
        sys.stderr.flush()
        if sys.stdin.readline().strip() != "yes":
            sys.stderr.write("memascend: nothing was changed\n")
            return 1
    wiped = wipe(options.paths)
    if options.json:
        _print_json({"wiped": wiped})
    else:
        sys.stderr.write(f"memascend: removed the store {', '.join(wiped)}\n")
    return 0


def _export(options: argparse.Namespace) -> int:
    from memascend_jax.recipes.store_export import export_store

    facts = export_store(options.paths, Path(options.out).expanduser())
    if options.json:
        _print_json(facts)
    else:
        sys.stderr.write(f"memascend: wrote {facts['path']}, the model after step {facts['step']}\n")
    return 0


def _report(options: argparse.Namespace) -> int:
    from memascend_jax.observe.report import read_run

    run = read_run(Path(options.run_dir).expanduser())
    if options.json:
        _print_json(run)
        return 0
    from memascend_jax.observe.summary import status_line, summary_table

    _print(status_line(run["status"]), summary_table(run["summary"]))
    return 0


def _print(*renderables: Any) -> None:
    from memascend_jax.observe.screen import build_console

    console = build_console(stderr=False)
    for renderable in renderables:
        console.print(renderable)


def _print_json(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"schema": SCHEMA, **facts}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
