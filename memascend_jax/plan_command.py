# SPDX-License-Identifier: Apache-2.0
"""``memascend plan``: arguments and output only."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memascend_jax.errors import ConfigError
from memascend_jax.observe.output import print_json, print_tables

if TYPE_CHECKING:
    from memascend_jax.config import Config
    from memascend_jax.training.step_time import Speeds

#: Adds one command: (subparsers, name, function, help) -> its parser.
AddCommand = Callable[[Any, str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add_plan_command(commands: Any, add: AddCommand) -> None:
    """Adds ``plan`` to ``commands``."""
    plan = add(
        commands, "plan", _plan, "where every byte of a run would live; reads no weights, writes nothing"
    )
    from memascend_jax.recipes.llama_finetune import add_config_arguments

    add_config_arguments(plan)
    plan.add_argument(
        "--model",
        metavar="NAME|PATH",
        help="plan for this model on any machine: a known name, or a config.json; --models lists the names",
    )
    plan.add_argument("--models", action="store_true", help="list the models whose shape is known")
    plan.add_argument(
        "--needs",
        action="store_true",
        help="print what a recipe needs of a machine with a GPU, as the shipped recipes say at their head",
    )
    plan.add_argument(
        "--accelerator", action="store_true", help="the device has memory of its own (a GPU), not the host's"
    )
    plan.add_argument("--read-bandwidth", metavar="RATE", help="of all SSDs together, as 7GB/s")
    plan.add_argument("--write-bandwidth", metavar="RATE", help="of all SSDs together, as 5GB/s")
    plan.add_argument(
        "--measure", action="store_true", help="find both out where the store would go, in about a second"
    )
    plan.add_argument(
        "--flops", metavar="N", help="operations per second the device sustains, as 150e12 or 150T"
    )
    plan.add_argument(
        "--update-rate",
        metavar="N",
        help="parameters per second the processor updates, as 2e9; default that of two slow cores",
    )


def _plan(options: argparse.Namespace) -> int:
    if options.models:
        from memascend_jax.models.known_shapes import known_names

        names = known_names()
        if options.json:
            print_json({"models": names})
        else:
            sys.stdout.write("\n".join(names) + "\n")
        return 0
    files, model, overrides = _split(options)
    from memascend_jax.config import load_config

    config = load_config(files, overrides)
    if options.needs:
        return _needs(options, config, model)
    if model is None:
        model = _published_shape(config)
    speeds = _speeds(options, config)
    from memascend_jax.recipes.plan_answer import answer_for_config, answer_for_model

    apart = {"device_is_host": not options.accelerator}
    if model is None:
        answer = answer_for_config(config, speeds, **apart)
    else:
        answer = answer_for_model(config, model, speeds, **apart)
    facts = answer.to_json()
    if options.json:
        print_json(facts)
    else:
        from memascend_jax.observe.plan_tables import plan_tables

        print_tables(*plan_tables(answer.plan.rows(), facts))
    return 0


def _needs(options: argparse.Namespace, config: Config, model: str | None) -> int:
    from memascend_jax.recipes.recipe_needs import needs_lines

    lines = needs_lines(config, model)
    if options.json:
        print_json({"needs": lines})
    else:
        sys.stdout.write("".join(f"#   {line}\n" for line in lines))
    return 0


def _published_shape(config: Config) -> str | None:
    """The known shape of a model that is not on this machine; None: the model itself is looked at."""
    from memascend_jax.checkpoints.hub_cache import is_cached, names_hub_model
    from memascend_jax.models.known_sources import shape_of_source

    source = config.model.source
    shape = shape_of_source(source)
    if shape is None or not names_hub_model(source) or is_cached(source):
        return None
    sys.stderr.write(f"memascend: {source} is not in the cache; planned by its published shape, {shape}\n")
    return shape


def _split(options: argparse.Namespace) -> tuple[list[str], str | None, list[str]]:
    """Returns configuration files, model and overrides: a word without ``=`` is a file, a ``.json`` the model's."""
    words = [word for word in options.overrides if "=" not in word]
    models = [word for word in words if word.endswith(".json")]
    if options.model is not None:
        models.append(options.model)
    if len(models) > 1:
        raise ConfigError(f"one model at a time, got {' and '.join(models)}")
    files = [*options.config, *(word for word in words if not word.endswith(".json"))]
    return files, models[0] if models else None, [word for word in options.overrides if "=" in word]


def _speeds(options: argparse.Namespace, config: Config) -> Speeds | None:
    """Returns the speeds that were given or measured; None when the bandwidth is not known."""
    from memascend_jax.training.step_time import UPDATE_RATE, Speeds
    from memascend_jax.units import parse_quantity

    def given(name: str) -> float | None:
        text = getattr(options, name)
        try:
            return None if text is None else parse_quantity(text)
        except ValueError as error:
            raise ConfigError(f"--{name.replace('_', '-')}: {error}") from error

    read, write, flops = given("read_bandwidth"), given("write_bandwidth"), given("flops")
    update_rate = given("update_rate")
    if options.measure:
        from memascend_jax.recipes.machine_speed import measure_bandwidth, measure_update_rate

        measured_read, measured_write = measure_bandwidth(config)
        read, write = read or measured_read, write or measured_write
        update_rate = update_rate or measure_update_rate()
    if read is None and write is None and flops is None:
        return None
    if read is None or write is None:
        raise ConfigError("the time of a step needs --read-bandwidth and --write-bandwidth, or --measure")
    return Speeds(read, write, flops, update_rate or UPDATE_RATE)
