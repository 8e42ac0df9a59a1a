# SPDX-License-Identifier: Apache-2.0
"""``memascend store create|inspect|verify|wipe|bench``: arguments and output only.

What changes a store's contents is in ``model_commands``.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import Any

from memascend_jax.observe.output import print_json, print_tables

#: Adds one command: (subparsers, name, function, help) -> its parser.
AddCommand = Callable[[Any, str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add_store_commands(commands: Any, add: AddCommand) -> None:
    """Adds ``store`` and its verbs to ``commands``."""
    store = commands.add_parser(
        "store", help="makes, looks at, checks, measures or removes a store", allow_abbrev=False
    )
    verbs = store.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_create(verbs, add)
    inspect = add(verbs, "inspect", _inspect, "what a store is and holds; changes nothing")
    inspect.add_argument(
        "--rated-tbw",
        metavar="TB[,TB…]",
        help="terabytes written that the drives are rated for, one number for all or one per member",
    )
    add(verbs, "verify", _verify, "reads everything and compares the checksums; changes nothing")
    wipe = add(verbs, "wipe", _wipe, "removes a store: its files are deleted, its devices blanked")
    wipe.add_argument("--yes", action="store_true", help="do not ask, on a terminal either")
    wipe.add_argument(
        "--incomplete",
        action="store_true",
        help="remove what is given and there, although other members of the store are missing",
    )
    _add_bench(verbs, add)
    from memascend_jax.model_commands import add_store_changes

    add_store_changes(verbs, add)
    for parser in verbs.choices.values():
        parser.add_argument("paths", metavar="PATH", nargs="+", help="paths of the store, one per member")


def _add_create(verbs: Any, add: AddCommand) -> None:
    create = add(verbs, "create", _create, "makes an empty store in files or on block devices")
    create.add_argument(
        "--capacity", metavar="SIZE", help="such as 40GiB; without it, all of the block devices"
    )
    create.add_argument(
        "--weights", metavar="W[,W…]", help="share of each member, or 'measure' to find out; default equal"
    )
    create.add_argument("--speeds", metavar="S[,S…]", help="speed of each member instead, in any unit")
    create.add_argument("--durability", choices=("step", "checkpoint"), default="step")
    create.add_argument(
        "--catalog-bytes",
        metavar="SIZE",
        help="room for what describes the tensors, about 100 bytes each; default from the capacity, at most 64MiB",
    )
    create.add_argument("--block-bytes", metavar="N", type=int, default=4096)
    create.add_argument("--direct-io", choices=("required", "optional", "off"), default="required")
    create.add_argument(
        "--no-discard", action="store_true", help="do not tell the drives that the old data is not needed"
    )
    create.add_argument("--overwrite", action="store_true", help="replace a store that is there, for good")
    create.add_argument(
        "--erase-foreign-data",
        metavar="PATH",
        action="append",
        default=[],
        help="erase whatever else is on this member, for good; once per member. Without it a device that "
        "holds anything is refused (up to 1 GiB all of it is looked at, else both ends and 2,048 samples)",
    )


def _add_bench(verbs: Any, add: AddCommand) -> None:
    bench = add(
        verbs, "bench", _bench, "measures a store made for it and removed again, against fio and files"
    )
    bench.add_argument("--size", metavar="SIZE", default="1GiB", help="of the large tensor; default 1GiB")
    bench.add_argument("--rounds", metavar="N", type=int, default=7, help="measurements of each; default 7")
    bench.add_argument(
        "--against",
        metavar="KIND[,KIND…]",
        default="fio",
        help="fio, numpy, safetensors, zarr, file (the last two: tensorstore), deepspeed, or none; default fio",
    )
    bench.add_argument(
        "--kinds",
        metavar="KIND[,KIND…]",
        default="write,read,mixed,durable write,rows",
        help="of work; default all: write, read, mixed, durable write, rows",
    )
    bench.add_argument("--io-backend", choices=("auto", "io_uring", "threads"), default="auto")
    bench.add_argument("--direct-io", choices=("required", "optional", "off"), default="required")
    bench.add_argument("--queue-depth", metavar="N", type=int, default=8)
    bench.add_argument("--request-bytes", metavar="N", type=int, default=4 << 20)


def _create(options: argparse.Namespace) -> int:
    from memascend_jax.storage.tensor_store import TensorStore

    with TensorStore.create(
        options.paths,
        capacity=None if options.capacity is None else size_option(options.capacity, "--capacity"),
        weights="measure" if options.weights == "measure" else _numbers(options.weights, int, "--weights"),
        speeds=_numbers(options.speeds, float, "--speeds"),
        durability=options.durability,
        block_bytes=options.block_bytes,
        catalog_bytes=None
        if options.catalog_bytes is None
        else size_option(options.catalog_bytes, "--catalog-bytes"),
        direct_io=options.direct_io,
        discard=not options.no_discard,
        overwrite=options.overwrite,
        erase_foreign_data=options.erase_foreign_data,
    ) as store:
        facts = store.inspect()
    if options.json:
        print_json(facts)
    else:
        from memascend_jax.observe.store_tables import store_tables

        print_tables(*store_tables(facts)[:2])
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from memascend_jax.storage.endurance import expected_life
    from memascend_jax.storage.tensor_store import TensorStore
    from memascend_jax.training.run_state import run_facts

    with TensorStore.open(options.paths, read_only=True, direct_io="optional") as store:
        facts = {**store.inspect(), "run": run_facts(store.run_state)}
    rated = _numbers(options.rated_tbw, float, "--rated-tbw")
    if rated is not None:
        facts["endurance"] = expected_life(facts, rated)
    if options.json:
        print_json(facts)
    else:
        from memascend_jax.observe.store_tables import store_tables

        print_tables(*store_tables(facts))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from memascend_jax.errors import StoreError
    from memascend_jax.storage.store_errors import dirty_store
    from memascend_jax.storage.tensor_store import TensorStore

    with TensorStore.open(options.paths, read_only=True, direct_io="optional") as store:
        report, generation = store.verify(), store.generation
        dirty = dirty_store(store.paths, generation, store.run_state) if store.dirty else None
    facts = {
        "generation": generation,
        "dirty": dirty is not None,
        "tensors": report.tensors,
        "tiles": report.tiles,
        "bytes": report.bytes,
        "faults": [str(fault) for fault in report.faults],
    }
    if options.json:
        print_json(facts)
    else:
        from memascend_jax.observe.store_tables import verify_table

        print_tables(verify_table(facts))
        for fault in report.faults:
            sys.stderr.write(f"memascend: {fault}\n")
    if dirty is not None:
        raise dirty
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
    wiped = wipe(options.paths, incomplete=options.incomplete)
    if options.json:
        print_json({"wiped": wiped})
    else:
        sys.stderr.write(f"memascend: removed the store {', '.join(wiped)}\n")
    return 0


def _bench(options: argparse.Namespace) -> int:
    from memascend_jax.bench.store_bench import BenchOptions, bench_store

    # What was made for the measurement is removed on the way out, then too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tensor_bytes = size_option(options.size, "--size")
    facts = bench_store(
        options.paths,
        BenchOptions(
            tensor_bytes=tensor_bytes,
            rounds=options.rounds,
            against=() if options.against == "none" else options.against.split(","),
            kinds=options.kinds.split(","),
            io={
                "io_backend": options.io_backend,
                "direct_io": options.direct_io,
                "queue_depth": options.queue_depth,
                "request_bytes": options.request_bytes,
            },
        ),
        say=lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201 - progress of a command
    )
    if options.json:
        print_json(facts)
    else:
        from memascend_jax.observe.bench_tables import bench_tables

        print_tables(*bench_tables(facts))
    return 0


def _numbers(text: str | None, kind: type[int] | type[float], option: str) -> list[Any] | None:
    """Returns the numbers of a list such as ``2,1``."""
    from memascend_jax.errors import ConfigError

    if text is None:
        return None
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option}: expected numbers with commas, one per path, got {text!r}") from None


def size_option(text: str, option: str) -> int:
    """Returns the bytes that an option's value stands for; raises ``ConfigError`` naming the option."""
    from memascend_jax.errors import ConfigError
    from memascend_jax.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
