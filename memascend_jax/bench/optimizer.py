# SPDX-License-Identifier: Apache-2.0
"""The optimizer's kernels against what memory allows, each other, optax, and the peers: in turns, in one run.

    python -m memascend_jax.bench.optimizer --elements 100e6 --threads 2 --peers VENV/bin/python

Writes JSON to standard output: for every case each contender's elements per second, and its speed relative to the
first one of the case, round by round. Without ``--peers`` DeepSpeed and PyTorch are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memascend_jax._native import _core
from memascend_jax.bench import peer_optimizers
from memascend_jax.bench.environment import describe_machine
from memascend_jax.bench.sample import Sample, Series, paired_ratio, timed
from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import MachineError
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.memory.rounding import exact_bytes
from memascend_jax.optim.adamw import AdamW, Draws, TileMemory, UpdateScale, update_tile
from memascend_jax.optim.state_format import STATE_FORMATS, itemsize, state_format
from memascend_jax.units import GIB

#: A contender of a case: its name, and what measures it once.
Work = tuple[str, Callable[[], Sample]]
_NUMBERS = {
    "lr": 1e-4,
    "b1": 0.9,
    "b2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "bias1": 0.1,
    "bias2": 1e-3,
}


@dataclass(frozen=True, slots=True)
class Case:
    """Contenders that do the same to ``elements``; the first one is what the others are compared with."""

    name: str
    elements: int
    contenders: tuple[Work, ...]


class Peer:
    """Another interpreter that runs ``peer_optimizers``.

    Raises:
        MachineError: it cannot be started, or what it was asked for failed.
    """

    def __init__(self, python: str, elements: int, threads: int) -> None:
        tools = str(Path(python).parent)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "DS_ACCELERATOR": "cpu",
            # Its extension is built by a ninja beside it.
            "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        command = [python, str(Path(peer_optimizers.__file__)), str(elements), str(threads)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        except OSError as error:
            raise MachineError(f"cannot start the peers' interpreter '{python}': {error}") from error

    def measure(self, name: str) -> Sample:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the interpreter ended"}
        if "error" in answer:
            raise MachineError(f"{name}: {answer['error']}")
        return Sample(answer["seconds"], 0.0)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Arrays:
    """Arrays in memory of an arena, as a run has them; filled, so that every page is there."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._arena = PinnedArena(exact_bytes(list(sizes)), pin="none")
        self.slots = [self._arena.allocate(size) for size in sizes]
        for slot in self.slots:
            slot.view(0, slot.nbytes)[:] = 0

    def addresses(self) -> list[int]:
        return [slot.address for slot in self.slots]

    def fill(self, index: int, values: np.ndarray[Any, Any]) -> None:
        """Fills an array with ``values``, over and over."""
        raw = values.view(np.uint8)
        view = self.slots[index].view(0, self.slots[index].nbytes)
        for begin in range(0, view.size, raw.size):
            part = view[begin : begin + raw.size]
            part[:] = raw[: part.size]

    def close(self) -> None:
        for slot in self.slots:
            slot.release()
        self._arena.close()


def fused_case(elements: int, peer: Peer | None, stack: ExitStack) -> Case:
    """AdamW on fp32 arrays and gradients: the roof, the peers and optax."""
    arrays = Arrays([4 * elements] * 4)
    stack.callback(arrays.close)
    arrays.fill(3, _gradient("float32"))
    param, mu, nu, grad = arrays.addresses()

    def run(kernel: str) -> Callable[[], Sample]:
        tile = {"param": param, "mu": mu, "nu": nu, "grad": grad, "n": elements, "grad_dtype": "float32"}
        return lambda: timed(lambda: _core.fused_update(kernel=kernel, **tile, **_NUMBERS))  # type: ignore[arg-type]

    contenders = [("memascend adamw", run("adam")), ("same loads and stores", run("roof"))]
    contenders.append(("optax.adamw, jitted and donated", _optax(elements)))
    if peer is not None:
        names = {"DeepSpeedCPUAdam": "deepspeed_adamw", "torch AdamW, fused": "torch_adamw"}
        contenders += [(name, _asking(peer, what)) for name, what in names.items()]
    return Case("AdamW, fp32 state and gradients", elements, tuple(contenders))


def format_case(elements: int, stack: ExitStack) -> Case:
    """AdamW on every state format, with bf16 gradients and parameters."""
    contenders = []
    for name in STATE_FORMATS:
        fmt = state_format(name, "bfloat16")
        leaves = [leaf.values(elements) * itemsize(leaf.dtype) for leaf in fmt.leaves]
        arrays = Arrays([2 * elements, 2 * elements, *leaves])
        stack.callback(arrays.close)
        arrays.fill(1, _gradient("bfloat16"))
        param, grad, *addresses = arrays.addresses()
        suffixes = [leaf.suffix for leaf in fmt.leaves]
        memory = TileMemory(param, grad, dict(zip(suffixes, addresses, strict=True)), elements)

        def run(fmt: Any = fmt, memory: TileMemory = memory) -> Sample:
            scale = UpdateScale(1, 1e-4, 1.0)
            return timed(lambda: update_tile(fmt, memory, AdamW(), scale, Draws(1), weight_decay=0.01))

        contenders.append((name, run))
    return Case("AdamW, state formats, bf16 gradients", elements, tuple(contenders))


def norm_case(dtype: str, nbytes: int, peer: Peer | None, stack: ExitStack) -> Case:
    """Nonfinite check and norm of a gradient: the roof of reading, numpy and DeepSpeed's check."""
    arrays = Arrays([nbytes])
    stack.callback(arrays.close)
    arrays.fill(0, _gradient(dtype))
    elements, address = nbytes // itemsize(dtype), arrays.addresses()[0]
    view = arrays.slots[0].view(0, nbytes).view(to_dtype(dtype))
    contenders: list[Work] = [
        ("memascend nonfinite + norm", lambda: timed(lambda: _core.norm_squared(address, elements, dtype))),
        ("reading alone", lambda: timed(lambda: _core.read_words(address, nbytes))),
        ("numpy isfinite().all()", lambda: timed(lambda: np.isfinite(view).all())),
    ]
    if peer is not None and nbytes == GIB:
        contenders.append(("DeepSpeed ZeRO-3 check", _asking(peer, f"overflow_{dtype}")))
    return Case(f"nonfinite check and norm, {dtype}", elements, tuple(contenders))


def measure(case: Case, rounds: int) -> list[Series]:
    """Returns the series of all contenders, in each round in another order; the first round warms up."""
    series = [Series(name, case.name, case.elements) for name, _ in case.contenders]
    draw = random.Random(0)
    entered = list(zip(series, (work for _, work in case.contenders), strict=True))
    for turn in range(rounds + 1):
        for one, work in draw.sample(entered, len(entered)):
            if one.error:
                continue
            try:
                sample = work()
            except MachineError as error:
                one.error = str(error)
                continue
            if turn > 0:
                one.samples.append(sample)
    return series


def facts_of(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Returns elements per second of each, and how fast the first one was beside it."""
    found = []
    for one in series:
        facts = one.to_json()
        facts["elements"] = facts.pop("bytes")
        facts.pop("cpu_s_per_gib", None)
        ratio = paired_ratio(series[0], one)
        if ratio is not None and one is not series[0]:
            facts[f"{series[0].contender} / this"] = ratio
        found.append(facts)
    return found


def _gradient(dtype: str) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(1 << 20).astype(to_dtype(dtype))


def _asking(peer: Peer, what: str) -> Callable[[], Sample]:
    return lambda: peer.measure(what)


def _optax(elements: int) -> Callable[[], Sample]:
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.adamw(1e-4, weight_decay=0.01)
    kept: dict[str, Any] = {}

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, donate_argnums=(0, 1))

    def once() -> None:
        kept["params"], kept["state"] = jitted(kept["params"], kept["state"], kept["grads"])
        kept["params"].block_until_ready()

    def run() -> Sample:
        if not kept:
            kept["params"] = jnp.full(elements, 0.02)
            kept["grads"] = jnp.tile(jnp.asarray(_gradient("float32")), -(-elements // (1 << 20)))[:elements]
            kept["state"] = tx.init(kept["params"])
            once()
        return timed(once)

    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the options name; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m memascend_jax.bench.optimizer", description=__doc__)
    parser.add_argument("--elements", type=float, default=100e6, help="of the updated arrays")
    parser.add_argument("--norm-bytes", type=float, default=GIB, help="of the checked gradient")
    parser.add_argument("--threads", type=int, default=2, help="of the kernels and the peers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=("fused", "formats", "norm"), default=None)
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter with torch and deepspeed")
    options = parser.parse_args(arguments)
    cases = options.cases or ("fused", "formats", "norm")
    _core.set_threads(options.threads)
    series: list[dict[str, Any]] = []
    with ExitStack() as whole:
        peer = Peer(options.peers, int(options.elements), options.threads) if options.peers else None
        if peer is not None:
            whole.callback(peer.close)
        builders: dict[str, list[Callable[[ExitStack], Case]]] = {
            "fused": [lambda stack: fused_case(int(options.elements), peer, stack)],
            "formats": [lambda stack: format_case(int(options.elements), stack)],
            "norm": [
                lambda stack, dtype=dtype: norm_case(dtype, int(options.norm_bytes), peer, stack)  # type: ignore[misc]
                for dtype in ("float32", "bfloat16", "float16")
            ],
        }
        for name in cases:
            for build in builders[name]:
                with ExitStack() as stack:
                    series += facts_of(measure(build(stack), options.rounds))
    json.dump(
        {"schema": 1, "machine": describe_machine([]), "threads": options.threads, "series": series},
        sys.stdout,
    )
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
