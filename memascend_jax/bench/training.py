# SPDX-License-Identifier: Apache-2.0
"""The main job under several settings, each run a process of its own, in turns on one machine.

    python -m memascend_jax.bench.training --rounds 2 --config FILE train.steps=6 \\
        --run memory offload.placement=memory --run ssd offload.host_memory=700MiB --run ...

What stands before the first ``--run`` goes to all. The first step, which compiles, does not count. The ratio is the
median over the rounds of a run's median step by the first run's in the same round.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memascend_jax.observe.failure import exit_status, run_program
from memascend_jax.units import GIB, MIB

#: Neither is part of a step.
_ALWAYS = ("run.export=false", "train.samples=0", "run.resume=never")
_PHASES = ("compute", "ssd_read_wait", "ssd_write_wait", "optimizer", "commit")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One process: its summary, its steps but the first, and how much of the machine others used, 0 to 1."""

    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    foreign_share: float

    @property
    def step_seconds(self) -> float:
        """The median step."""
        return float(statistics.median(step["step_seconds"] for step in self.steps))


@dataclass(slots=True)
class Contender:
    """A name, its arguments, and what came of it in each round; ``error`` when it could not run."""

    name: str
    arguments: list[str]
    outcomes: list[Outcome] = field(default_factory=list)
    error: str = ""


def parse(words: Sequence[str]) -> tuple[int, Path | None, list[Contender]]:
    """Returns rounds, the folder for the runs, and the contenders of a command line.

    Raises:
        SystemExit: there is no ``--run NAME``, or an option lacks its value.
    """
    rounds, folder, common = 1, None, list[str]()
    contenders: list[Contender] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word in ("--run", "--rounds", "--folder") and not left:
            raise SystemExit(f"{word} needs a value")
        if word == "--run":
            contenders.append(Contender(left.pop(0), []))
        elif word == "--rounds":
            rounds = int(left.pop(0))
        elif word == "--folder":
            folder = Path(left.pop(0))
        else:
            (contenders[-1].arguments if contenders else common).append(word)
    if not contenders:
        raise SystemExit(__doc__)
    for contender in contenders:
        contender.arguments = [*common, *contender.arguments]
    return rounds, folder, contenders


def run_once(arguments: Sequence[str], folder: Path) -> Outcome:
    """Runs the main job in ``folder``, which is removed afterwards.

    Raises:
        RuntimeError: it failed; the message has the end of what it said.
    """
    command = [sys.executable, "-m", "memascend_jax.recipes.llama_finetune", *arguments, *_ALWAYS]
    busy, own, began = _busy_seconds(), _children_seconds(), time.monotonic()
    try:
        done = subprocess.run([*command, f"run.dir={folder}"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise RuntimeError(f"exit status {done.returncode}: {said[-600:]}")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        lines = [
            json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    foreign = (_busy_seconds() - busy) - (_children_seconds() - own)
    share = max(foreign, 0.0) / ((time.monotonic() - began) * (os.cpu_count() or 1))
    return Outcome(summary, [line for line in lines if not line.get("drain") and line["step"] > 1], share)


def _busy_seconds() -> float:
    """Returns the processor time of all programs since the machine started."""
    fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, soft_irq = map(int, fields[:7])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compete(rounds: int, contenders: Sequence[Contender], folder: Path, say: Callable[[str], None]) -> None:
    """Runs all contenders in each round, in an order drawn anew."""
    draw = random.Random(0)
    for turn in range(rounds):
        for contender in draw.sample(contenders, len(contenders)):
            if contender.error:
                continue
            try:
                outcome = run_once(contender.arguments, folder / "run")
            except RuntimeError as error:
                contender.error = str(error)
                say(f"round {turn + 1}, {contender.name}: {error}")
                continue
            contender.outcomes.append(outcome)
            say(f"round {turn + 1}, {contender.name}: {_line(outcome)}")


def report(contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    """Returns the figures of each contender over its rounds; times in seconds, memory and traffic in bytes."""
    return [_facts(contender, contenders[0]) for contender in contenders]


def _facts(contender: Contender, first: Contender) -> dict[str, Any]:
    if not contender.outcomes:
        return {"run": contender.name, "error": contender.error}
    seconds = [step["step_seconds"] for outcome in contender.outcomes for step in outcome.steps]
    middle = statistics.median(seconds)
    last = contender.outcomes[-1].summary
    facts: dict[str, Any] = {
        "run": contender.name,
        "steps": len(seconds),
        "step_seconds": middle,
        "mad": statistics.median(abs(value - middle) for value in seconds),
        "min": min(seconds),
        "host_peak_bytes": max(outcome.summary["host_peak_bytes"] for outcome in contender.outcomes),
        "planned_host_bytes": last["planned_host_bytes"],
        "ssd_read_bytes_per_step": last["ssd_read_bytes_per_step"],
        "ssd_write_bytes_per_step": last["ssd_write_bytes_per_step"],
        "loss_last": last["loss_last"],
        "foreign_share": max(outcome.foreign_share for outcome in contender.outcomes),
    }
    pairs = list(zip(contender.outcomes, first.outcomes, strict=False))
    if contender is not first and pairs:
        facts["ratio"] = statistics.median(own.step_seconds / other.step_seconds for own, other in pairs)
    return facts


def _line(outcome: Outcome) -> str:
    steps, summary = outcome.steps, outcome.summary
    phases = ", ".join(f"{phase} {statistics.median(step[phase] for step in steps):.2f}" for phase in _PHASES)
    return (
        f"step {outcome.step_seconds:.2f} s (min {min(step['step_seconds'] for step in steps):.2f}; {phases}); "
        f"peak {summary['host_peak_bytes'] / MIB:,.0f} of {summary['planned_host_bytes'] / MIB:,.0f} MiB; "
        f"read {summary['ssd_read_bytes_per_step'] / GIB:.2f}, "
        f"written {summary['ssd_write_bytes_per_step'] / GIB:.2f} GiB per step; "
        f"others had {outcome.foreign_share:.0%} of the machine"
    )


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(words: Sequence[str]) -> int:
    """Runs the comparison, prints each run as it ends and one JSON line per contender."""
    rounds, folder, contenders = parse(words)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="memascend-bench-", dir=folder) as scratch:
        compete(rounds, contenders, Path(scratch), _say)
    for facts in report(contenders):
        _say(json.dumps(facts))
    return 1 if any(contender.error for contender in contenders) else 0


if __name__ == "__main__":
    # A comparison that is stopped ends its run and removes what that left.
    run_program(lambda: exit_status(lambda: main(sys.argv[1:])))
