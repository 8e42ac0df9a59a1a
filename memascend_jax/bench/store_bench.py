# SPDX-License-Identifier: Apache-2.0
"""``memascend store bench``: the store against fio and against files, on the user's own disk.

Everything is made in a folder (or on devices) given for it and removed again; nothing that exists is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memascend_jax.bench import deepspeed_aio, file_contenders, fio
from memascend_jax.bench.checksum_cost import checksum_cost
from memascend_jax.bench.contenders import Files, TheDisk, TheStore, TheStoreUnchecked
from memascend_jax.bench.contest import KINDS, Case, Contender, Kind, compete
from memascend_jax.bench.deepspeed_aio import DeepSpeedAio
from memascend_jax.bench.environment import describe_machine
from memascend_jax.bench.fio import FioRegion
from memascend_jax.bench.sample import Series, find, paired_ratio
from memascend_jax.bench.store_contender import StoreContender
from memascend_jax.bench.tensor_set import TensorSet, one_tensor, smollm2
from memascend_jax.errors import ConfigError, MachineError, StoreError
from memascend_jax.storage.device import resolve_paths
from memascend_jax.storage.options import IoArguments
from memascend_jax.storage.tensor_store import Scratch
from memascend_jax.units import GIB, MIB, format_bytes

#: What ``against`` may name.
OPPONENTS = ("fio", *file_contenders.KINDS, "deepspeed")
MIN_TENSOR_BYTES = MIB
FILE_NAME = "memascend-bench.store"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is measured.

    Args:
        tensor_bytes: size of the one large tensor and of the table of rows.
        rounds: measurements of each, after one that does not count.
        against: of ``OPPONENTS``.
        kinds: which work.
        beside: further contenders of the caller.
    """

    tensor_bytes: int = GIB
    rounds: int = 7
    against: Sequence[str] = ("fio",)
    kinds: Sequence[Kind] = KINDS
    beside: Sequence[Contender] = ()
    io: IoArguments = field(default_factory=lambda: IoArguments())


def bench_store(
    paths: Sequence[str], options: BenchOptions, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Returns the figures of all contenders, the store's speed relative to each, and the machine.

    Raises:
        ConfigError: an option is out of its range, or names no contender or kind of work.
        StoreError: something is at the paths already, there is no room, or data was not read as written.
    """
    _check(options)
    members = bench_paths(paths)
    large = one_tensor(options.tensor_bytes, f"one tensor of {format_bytes(options.tensor_bytes)}")
    sets = [large, smollm2(1 if options.tensor_bytes >= 128 * MIB else 64)]
    machine = describe_machine(paths)
    with ExitStack() as stack:
        table_bytes = options.tensor_bytes if "rows" in options.kinds else 0
        store = StoreContender(members, sets, table_bytes, options.io)
        stack.callback(store.close)
        store.fill()
        contenders: list[Contender] = [TheStore(store), TheStoreUnchecked(store), *options.beside]
        skipped = _add_roof(contenders, store.scratch, options, say)
        skipped += _add_files(contenders, members, sets, options, stack)
        skipped += _add_deepspeed(contenders, members, sets, options, say, stack)
        cases = [
            Case(kind, tensors)
            for tensors in sets
            for kind in options.kinds
            if kind != "rows" or tensors is large
        ]
        series = compete(contenders, cases, options.rounds, say)
        return {
            "machine": machine,
            "members": store.store.inspect()["members"],
            "io_backend": store.store.io_backend,
            "notes": [*store.store.notes, *skipped],
            "series": [one.to_json() for one in series],
            "ratios": ratios(series),
            "checksums": checksum_cost(store),
        }


def bench_paths(paths: Sequence[str]) -> list[str]:
    """Returns where the members will be: a file of its own in each directory, or the path given.

    Raises:
        StoreError: a file is there already.
    """
    members = [str(Path(path) / FILE_NAME) if Path(path).is_dir() else path for path in paths]
    for member in resolve_paths(members):
        if Path(member).is_file():
            raise StoreError(
                f"cannot measure at '{member}': the file exists; give a directory or another name"
            )
    return members


def ratios(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Returns the store's speed over that of every other contender, case by case."""
    found = []
    for other in series:
        own = find(series, StoreContender.name, other.case)
        if own is None or own is other or not other.samples:
            continue
        ratio = paired_ratio(own, other)
        if ratio is not None:
            found.append({"case": other.case, "to": other.contender, "ratio": ratio})
    return found


def _check(options: BenchOptions) -> None:
    unknown = [name for name in options.against if name not in OPPONENTS]
    unknown += [kind for kind in options.kinds if kind not in KINDS]
    if unknown or options.rounds < 1 or options.tensor_bytes < MIN_TENSOR_BYTES:
        raise ConfigError(
            f"cannot measure {options.rounds} rounds of {', '.join(options.kinds) or 'nothing'} with "
            f"{options.tensor_bytes:,} bytes against {', '.join(options.against) or 'nothing'}: at least 1 round of "
            f"{', '.join(KINDS)} with {MIN_TENSOR_BYTES:,} bytes, against {', '.join(OPPONENTS)}"
        )


def _add_roof(
    contenders: list[Contender], scratch: Scratch, options: BenchOptions, say: Callable[[str], None]
) -> list[str]:
    """Adds fio on the store's scratch extent, so that both have the same files or devices; returns why not."""
    if "fio" not in options.against:
        return []
    if reason := fio.available():
        return [reason]
    disk = TheDisk(_region(scratch), options.kinds)
    disk.tune(say)
    contenders.append(disk)
    return []


def _region(scratch: Scratch) -> FioRegion:
    """Returns the part of ``scratch`` that lies at the same offsets on all members: fio takes one for all."""
    places = scratch.places()
    begin = max(offset for _, offset, _ in places)
    end = min(offset + nbytes for _, offset, nbytes in places)
    return FioRegion(tuple(path for path, _, _ in places), begin, (end - begin) * len(places))


def _add_files(
    contenders: list[Contender],
    members: Sequence[str],
    sets: Sequence[TensorSet],
    options: BenchOptions,
    stack: ExitStack,
) -> list[str]:
    """Adds the ways of keeping tensors in files that are installed; returns which are not."""
    missing = []
    for kind in options.against:
        if kind not in file_contenders.KINDS:
            continue
        if Path(members[0]).is_block_device():
            missing.append(f"{kind} is left out: a block device holds no files")
            continue
        folder = Path(f"{members[0]}.{kind}")
        if not file_contenders.installed(kind):
            missing.append(f"{kind} is left out: its package is not installed")
            continue
        stack.callback(file_contenders.remove, folder)
        contenders.append(Files(kind, folder, sets))
    return missing


def _add_deepspeed(
    contenders: list[Contender],
    members: Sequence[str],
    sets: Sequence[TensorSet],
    options: BenchOptions,
    say: Callable[[str], None],
    stack: ExitStack,
) -> list[str]:
    """Adds DeepSpeed's aio where it is installed; returns why not."""
    if "deepspeed" not in options.against:
        return []
    if Path(members[0]).is_block_device():
        return ["deepspeed is left out: a block device holds no files"]
    if not deepspeed_aio.installed():
        return ["deepspeed is left out: it is not installed"]
    folder = Path(f"{members[0]}.deepspeed")
    stack.callback(file_contenders.remove, folder)
    try:
        aio = DeepSpeedAio(folder, sets)
    except MachineError as error:
        return [f"deepspeed is left out: {error}"]
    stack.callback(aio.close)
    aio.tune(sets[0].label, say)
    contenders.append(aio)
    return []
