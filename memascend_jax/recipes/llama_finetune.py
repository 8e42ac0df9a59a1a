# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a Llama-family model with its training state on SSD.

``python -m memascend_jax.recipes.llama_finetune [--config FILE] [key=value …]``

Here is the command line only: jax is imported when the configuration is known to be right, and everything that takes
long when the program handles Ctrl-C.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from memascend_jax.observe.failure import EXIT_STATUSES, exit_status, run_program

PROGRAM = "python -m memascend_jax.recipes.llama_finetune"

_EPILOG = """\
keys (key=default; later settings win, overrides win over files):

{keys}

{statuses}

shipped recipes for --config: {recipes}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    options = build_parser().parse_intermixed_args(arguments)

    def run() -> int:
        from memascend_jax.config import load_config

        config = load_config(options.config, options.overrides)
        from memascend_jax.recipes.finetune import run as run_training

        return run_training(config)

    return exit_status(run, resumable=True)


def program() -> NoReturn:
    """Runs the command line as the process's program and ends it."""
    run_program(main, resumable=True)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser; its help describes every key of the configuration."""
    from memascend_jax.config import describe_keys, recipe_names

    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Full-parameter fine-tuning with parameters, masters and moments on SSD.\n"
        "Without arguments: SmolLM2-135M-Instruct on questions about the Python standard library.",
        epilog=_EPILOG.format(
            keys=describe_keys(), statuses=EXIT_STATUSES, recipes=", ".join(recipe_names()) or "none"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_config_arguments(parser)
    return parser


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--config`` and the ``key=value`` overrides that every command with a configuration has."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="YAML file, or the name of a shipped recipe; may be given more than once, later files win",
    )
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="one key of the configuration, as train.steps=100 or offload.store=[/mnt/a,/mnt/b]",
    )


if __name__ == "__main__":
    program()
