# SPDX-License-Identifier: Apache-2.0
"""The figures of a run, gathered from what it left in its folder: memory, the step's time, SSD bandwidth, loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from memascend_jax.observe.charts import Chart, Series
from memascend_jax.observe.gradient_charts import gradient_charts
from memascend_jax.observe.meter_log import MeterSeries, read_meter
from memascend_jax.observe.metrics import read_lines
from memascend_jax.observe.step_clock import SPANS
from memascend_jax.units import GIB, MIB, format_bytes, format_duration

#: Points of a curve and bars at most; more than the pixels of a figure show nothing more.
_MOST_POINTS = 400
_MOST_BARS = 60
_BANDWIDTH_POINTS = 160
#: A line so far above everything else would press the rest to the floor; it is told in words then.
_FAR_ABOVE = 2.0


def run_charts(folder: Path, summary: Mapping[str, Any]) -> list[Chart]:
    """Returns the charts that the files in ``folder`` are enough for.

    Raises:
        OSError: a file is there and cannot be read.
    """
    meter = folder / "meter.jsonl"
    metrics = folder / "metrics.jsonl"
    series = read_meter(meter) if meter.is_file() else []
    lines = read_lines(metrics) if metrics.is_file() else []
    run = [*_memory(series), *_step_time(lines), *_bandwidth(series), *_loss(lines, summary)]
    return [*run, *gradient_charts(lines)]


def _memory(sessions: Sequence[MeterSeries]) -> Iterator[Chart]:
    """Resident memory by what it is for; the parts add up to the whole, whose rest is the heap's."""
    samples = [
        (seconds, _parts(session, index))
        for session, seconds_before in _end_to_end(sessions)
        for index, seconds in enumerate(_shifted(session, seconds_before))
        if session.columns["rss"][index] is not None
    ]
    if len(samples) < 2:
        return
    samples = _highest_of_bins(samples)
    fullest = max((parts for _, parts in samples), key=len)
    names = [*fullest, *(name for _, parts in samples for name in parts if name not in fullest)]
    names = list(dict.fromkeys(names))
    highest = max(sum(parts.values()) for _, parts in samples)
    unit, unit_name = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    x, x_label = _in_fitting_unit([seconds for seconds, _ in samples])
    series = [Series(name, x, [parts.get(name, 0) / unit for _, parts in samples]) for name in names]
    marks, beyond = _limits(sessions[-1].facts, highest)
    peak = max(value for session in sessions for value in session.columns["peak"] if value is not None)
    yield Chart(
        "Host memory",
        "areas",
        x_label,
        unit_name,
        series,
        marks=[(f"{name} {format_bytes(value)}", value / unit) for name, value in marks],
        note=f"Highest, between samples too: {format_bytes(peak)}{beyond}",
    )


def _parts(session: MeterSeries, index: int) -> dict[str, int]:
    """Returns the bytes of each part of resident memory in one sample, from the bottom up."""
    values = {name: column[index] or 0 for name, column in session.columns.items()}
    left = values["rss"]
    parts = {}

    def take(name: str, nbytes: int) -> None:
        nonlocal left
        parts[name] = min(nbytes, left)
        left -= parts[name]

    take("mapped files", values["file"])
    # The arena is resident as a whole from the beginning: pinned, or lent out.
    if values.get("locked") or any(name.startswith("leased:") for name in values):
        for kind, nbytes in session.facts.get("arena_bytes", {}).items():
            take(f"arena: {kind}", nbytes)
    take("device arrays", values.get("device", 0))
    take("interpreter, heap, compiler", left)
    return parts


def _limits(facts: Mapping[str, Any], highest: int) -> tuple[list[tuple[str, int]], str]:
    """Returns the limits to draw, and a text on those that are far above."""
    names = {
        "planned_bytes": "planned",
        "budget_bytes": "budget",
        "cgroup_limit_bytes": "limit of the cgroup",
    }
    found = [(name, facts[key]) for key, name in names.items() if facts.get(key)]
    near = [(name, value) for name, value in found if value <= _FAR_ABOVE * highest]
    far = [f"{name} {format_bytes(value)}" for name, value in found if value > _FAR_ABOVE * highest]
    return near, f"; far above: {', '.join(far)}" if far else ""


def _step_time(lines: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    names = [name for name in ("compute", *SPANS) if any(line.get(name) for line in lines)]
    if not names:
        return
    # The first step compiles: beside it the others would be flat.
    shown = lines[1:] or lines
    size = -(-len(shown) // _MOST_BARS)
    groups = [shown[start : start + size] for start in range(0, len(shown), size)]
    x = [_mean([line["step"] for line in group]) for group in groups]
    series = [
        Series(name.replace("_", " "), x, [_mean([line.get(name, 0) for line in group]) for group in groups])
        for name in names
    ]
    notes = [f"A bar is the mean of {size} steps."] if size > 1 else []
    if shown is not lines:
        notes.append(
            f"Step {lines[0]['step']}, which compiles, took {format_duration(lines[0]['step_seconds'])}."
        )
    yield Chart("Time of a step", "bars", "step", "seconds", series, note=" ".join(notes))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _bandwidth(sessions: Sequence[MeterSeries]) -> Iterator[Chart]:
    """Bytes per second between samples far enough apart, from the store's own counters."""
    x: list[float] = []
    rates: dict[str, list[float]] = {"ssd_read": [], "ssd_written": []}
    total = sum(session.seconds[-1] for session in sessions)
    for session, before in _end_to_end(sessions):
        if not rates.keys() <= session.columns.keys():
            continue
        for a, b in pairwise(_apart(session.seconds, total / _BANDWIDTH_POINTS)):
            seconds = session.seconds[b] - session.seconds[a]
            x.append(before + (session.seconds[a] + session.seconds[b]) / 2)
            for name, values in rates.items():
                column = session.columns[name]
                values.append(((column[b] or 0) - (column[a] or 0)) / seconds / 1e9)
    if len(x) > 1 and any(map(any, rates.values())):
        x, x_label = _in_fitting_unit(x)
        series = [Series("read", x, rates["ssd_read"]), Series("written", x, rates["ssd_written"])]
        yield Chart("SSD bandwidth", "lines", x_label, "GB/s", series)


def _loss(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Iterator[Chart]:
    trained = [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None]
    held_out = [(step, loss) for step, loss in summary.get("eval_losses") or [] if loss is not None]
    if summary.get("eval_loss_before") is not None:
        held_out.insert(0, (0, summary["eval_loss_before"]))
    if summary.get("eval_loss_after") is not None:
        held_out.append((summary["step"], summary["eval_loss_after"]))
    series = [
        Series(name, [step for step, _ in points], [loss for _, loss in points], points=name == "held out")
        for name, points in (("training", trained), ("held out", held_out))
        if points
    ]
    if trained:
        yield Chart("Loss", "lines", "step", "nats per token", series)


def _in_fitting_unit(seconds: list[float]) -> tuple[list[float], str]:
    """Returns ``seconds`` in a unit that suits the longest of them, and its name."""
    longest = max(seconds)
    size, name = (3600, "hours") if longest > 7200 else (60, "minutes") if longest > 300 else (1, "seconds")
    return [value / size for value in seconds], name


def _end_to_end(sessions: Sequence[MeterSeries]) -> Iterator[tuple[MeterSeries, float]]:
    """Yields each series with the second at which it begins when the pauses between sessions are left out.

    Series of one session, which differ in their columns only, share their clock.
    """
    begin = end = 0.0
    clock: float | None = None
    for session in sessions:
        if clock is None or abs(session.unix_time_s - clock) > 1.0:
            begin, clock = end, session.unix_time_s
        yield session, begin
        end = begin + session.seconds[-1]


def _shifted(session: MeterSeries, before: float) -> Iterator[float]:
    return (before + seconds for seconds in session.seconds)


def _highest_of_bins(samples: list[tuple[float, dict[str, int]]]) -> list[tuple[float, dict[str, int]]]:
    """Returns few enough samples for a figure: of each run of neighbours the one with the most memory."""
    size = -(-len(samples) // _MOST_POINTS)
    bins = (samples[start : start + size] for start in range(0, len(samples), size))
    return [max(group, key=lambda sample: sum(sample[1].values())) for group in bins]


def _apart(seconds: Sequence[float], distance: float) -> list[int]:
    """Returns indices of ``seconds`` that are at least ``distance`` from each other."""
    chosen: list[int] = []
    for index, value in enumerate(seconds):
        if not chosen or value - seconds[chosen[-1]] >= max(distance, 1e-3):
            chosen.append(index)
    return chosen
