# SPDX-License-Identifier: Apache-2.0
"""A report draws what the run recorded: parts that add up, limits in their place, one page that needs nothing else."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from memascend_jax import cli
from memascend_jax.observe import chart_png, report_files, trace
from memascend_jax.observe.chart_svg import chart_svg
from memascend_jax.observe.charts import Chart, Series, tick_text, ticks
from memascend_jax.observe.meter_log import MeterLog
from memascend_jax.observe.report import read_run
from memascend_jax.observe.run_charts import run_charts
from memascend_jax.units import GIB, MIB

SVG = "{http://www.w3.org/2000/svg}"


def meter_line(rss: int, **more: int) -> dict[str, int | None]:
    parts: dict[str, int | None] = {
        "rss": rss,
        "peak": rss + MIB,
        "anonymous": rss - 80 * MIB,
        "file": 80 * MIB,
    }
    return {**parts, **more}


def metrics_line(step: int) -> dict[str, Any]:
    split = {"compute": 3.0 / step, "ssd_read_wait": 0.5, "commit": 0.0}
    moved = {"ssd_read_bytes": 2 * GIB, "ssd_write_bytes": GIB, "tokens": 100}
    return {"step": step, "loss": 4.0 - step / 10, "step_seconds": 3.0 / step + 0.5, **split, **moved}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of two sessions, the first of which was killed."""
    facts = {
        "budget_bytes": 700 * MIB,
        "planned_bytes": 40 * GIB,
        "arena_bytes": {"layer": 64 * MIB, "spool": 8 * MIB},
    }
    for session in range(2):
        log = MeterLog(tmp_path / "meter.jsonl", facts)
        log._started_s = 0.0 if session == 0 else -1000.0
        for second in range(1, 11):
            gauges = {"leased:layer": MIB, "device": 30 * MIB, "ssd_read": second * 10**9, "ssd_written": 0}
            log.write(log._started_s + second, meter_line((400 + 10 * second) * MIB, **gauges))
        log.close()
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(metrics_line(step)) + "\n" for step in range(1, 6))
    )
    summary = {"step": 5, "eval_loss_before": 4.5, "eval_losses": [[3, 3.9]], "eval_loss_after": 3.5}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with trace.recording(tmp_path / "trace.json") as recorder:
        for step in range(2):
            begin = step * 10**9
            recorder.add(trace.PHASE, "phase", "forward", begin, begin + 10**9)
            recorder.add(trace.COMPUTE, "device", "layer", begin, begin + 8 * 10**8)
            recorder.add(trace.READ, "read 0", "w", begin + 6 * 10**8, begin + 10**9, overlapping=True)
    return tmp_path


def chart(charts: list[Chart], title: str) -> Chart:
    return next(one for one in charts if one.title == title)


# ---------------------------------------------------------------- gathering


def test_parts_of_memory_add_up_to_what_is_resident(run_dir: Path) -> None:
    memory = chart(run_charts(run_dir, {}), "Host memory")
    assert [series.name for series in memory.series] == [
        "mapped files",
        "arena: layer",
        "arena: spool",
        "device arrays",
        "interpreter, heap, compiler",
    ]
    totals = [sum(column) for column in zip(*(series.y for series in memory.series), strict=True)]
    assert totals == pytest.approx([410, 420, 430, 440, 450, 460, 470, 480, 490, 500] * 2)
    assert memory.series[1].y == [64.0] * 20
    # The pause between the sessions is left out; the clock goes on.
    assert memory.series[0].x == pytest.approx([*range(1, 11), *range(11, 21)])


def test_a_limit_near_the_memory_is_drawn_and_one_far_above_is_told(run_dir: Path) -> None:
    memory = chart(run_charts(run_dir, {}), "Host memory")
    assert memory.marks == [("budget 700.00 MiB", 700.0)]
    assert memory.note == "Highest, between samples too: 501.00 MiB; far above: planned 40.00 GiB"


def test_parts_never_exceed_the_whole(tmp_path: Path) -> None:
    log = MeterLog(tmp_path / "meter.jsonl", {"arena_bytes": {"layer": 900 * MIB}})
    for second in (1.0, 2.0):
        log.write(second, meter_line(100 * MIB, **{"leased:layer": 0}))
    log.close()
    (memory,) = run_charts(tmp_path, {})
    assert [series.y[0] for series in memory.series] == [80, 20, 0, 0]


def test_bandwidth_is_the_difference_of_the_counters(run_dir: Path) -> None:
    bandwidth = chart(run_charts(run_dir, {}), "SSD bandwidth")
    assert bandwidth.series[0].y == pytest.approx([1.0] * 18)
    assert bandwidth.series[1].y == [0.0] * 18


def test_bars_leave_out_the_step_that_compiles_and_what_took_no_time(run_dir: Path) -> None:
    bars = chart(run_charts(run_dir, {}), "Time of a step")
    assert [series.name for series in bars.series] == ["compute", "ssd read wait"]
    assert bars.series[0].x == [2, 3, 4, 5]
    assert bars.series[0].y == pytest.approx([1.5, 1.0, 0.75, 0.6])
    assert "Step 1, which compiles, took 3.5 s." in bars.note


def test_long_runs_become_few_points_and_keep_their_peak(tmp_path: Path) -> None:
    log = MeterLog(tmp_path / "meter.jsonl", {})
    log._started_s = 0.0
    for second in range(1, 5001):
        log.write(float(second), meter_line((900 if second == 3333 else 200) * MIB))
    log.close()
    lines = [json.dumps(metrics_line(step)) for step in range(1, 2002)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    charts = run_charts(tmp_path, {})
    memory = chart(charts, "Host memory")
    assert len(memory.series[0].x) <= 400
    assert memory.x_label == "minutes"
    assert max(sum(column) for column in zip(*(series.y for series in memory.series), strict=True)) == 900
    bars = chart(charts, "Time of a step")
    assert len(bars.series[0].x) <= 60
    assert "A bar is the mean of 34 steps." in bars.note


def test_losses_of_training_and_of_held_out_data_are_two_curves(run_dir: Path) -> None:
    loss = chart(run_charts(run_dir, read_run(run_dir)["summary"]), "Loss")
    training, held_out = loss.series
    assert next(zip(training.x, training.y, strict=True)) == (1, 3.9)
    assert list(zip(held_out.x, held_out.y, strict=True)) == [(0, 4.5), (3, 3.9), (5, 3.5)]


@pytest.mark.parametrize("name", ["report.html", "report.png"])
def test_report_on_a_full_disk_names_its_file_and_leaves_the_one_before(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    def half_written(draft: Path) -> None:
        draft.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_text(draft: Path, text: str, **_: object) -> None:
        half_written(draft) if name == "report.html" else draft.write_bytes(text.encode())

    monkeypatch.setattr(report_files, "has_matplotlib", lambda: name == "report.png")
    monkeypatch.setattr(report_files, "write_png", lambda charts, draft, title: half_written(draft))
    (run_dir / name).write_text("the one before")
    monkeypatch.setattr(Path, "write_text", write_text)
    assert cli.main(["report", str(run_dir)]) == 6
    told = capsys.readouterr().err
    assert f"cannot write the report: No space left on device: '{run_dir / name}' (" in told
    assert told.endswith("; free space, then give the same command again\n")
    assert (run_dir / name).read_text() == "the one before"
    assert not list(run_dir.glob(".*"))


def test_nothing_recorded_is_nothing_drawn(tmp_path: Path) -> None:
    assert run_charts(tmp_path, {}) == []


# ---------------------------------------------------------------- drawing


def test_areas_lie_on_each_other_to_scale() -> None:
    drawn = Chart(
        "m", "areas", "seconds", "MiB", [Series("a", [0, 10], [100, 100]), Series("b", [0, 10], [0, 300])]
    )
    root = ElementTree.fromstring(chart_svg(drawn))
    lower, upper = (
        [tuple(map(float, point.split(","))) for point in polygon.attrib["points"].split()]
        for polygon in root.iter(f"{SVG}polygon")
    )
    base, low, high = lower[-1][1], lower[1][1], upper[1][1]
    assert base - high == pytest.approx(4 * (base - low), abs=0.5)
    assert upper[-1] == lower[0]
    assert lower[1][0] - lower[0][0] > 700


def test_names_cannot_break_out_of_the_picture_or_the_page(run_dir: Path) -> None:
    drawn = Chart(
        "<b>&", "lines", "x", "y", [Series("<script>alert(1)</script>", [0, 1], [0, 1])], [("</svg>", 0.5)]
    )
    texts = [element.text for element in ElementTree.fromstring(chart_svg(drawn)).iter(f"{SVG}text")]
    assert {"<b>&", "<script>alert(1)</script>", "</svg>"} <= set(texts)
    status = {"state": "<img src=x>", "step": 1, "total_steps": 2}
    (run_dir / "status.json").write_text(json.dumps(status))
    page = report_files.write_report(read_run(run_dir), run_dir)[0].read_text()
    assert "<img" not in page
    assert "&lt;img src=x&gt;" in page


def test_words_of_limits_close_together_do_not_cover_each_other() -> None:
    drawn = Chart(
        "m", "lines", "x", "y", [Series("a", [0, 1], [0, 100])], [("p", 90.0), ("q", 90.5), ("r", 91.0)]
    )
    root = ElementTree.fromstring(chart_svg(drawn))
    heights = sorted(float(t.attrib["y"]) for t in root.iter(f"{SVG}text") if t.text in ("p", "q", "r"))
    assert all(b - a >= 14 for a, b in pairwise(heights))


def test_ticks_are_round_and_within() -> None:
    assert ticks(0, 730, most=5) == [0, 200, 400, 600]
    assert ticks(0, 0.0123, most=5) == [0, 0.005, 0.01]
    assert ticks(6.243, 6.269, most=5) == pytest.approx([6.25, 6.26])
    assert ticks(3, 3) == [3]
    assert [tick_text(value, 0.005) for value in (0.0, 0.005)] == ["0.000", "0.005"]
    assert tick_text(2000, 500) == "2,000"


def test_the_page_needs_nothing_else(run_dir: Path) -> None:
    page = report_files.write_report(read_run(run_dir), run_dir)[0].read_text()
    assert page.count("<svg") == 4
    assert not re.search(r"<script|<link|<img|@import|url\(|src=|href=", page)
    # Addresses are those of the vocabulary only.
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "overlap of computing and I/O" in page
    assert ">50%<" in page


# ---------------------------------------------------------------- the command


def test_report_prints_the_overlap_and_writes_page_and_picture(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["report", str(run_dir)]) == 0
    captured = capsys.readouterr()
    assert re.search(r"forward +1 +1\.000 +80% +40% +50%", captured.out)
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert f"wrote {run_dir / 'report.html'}" in captured.err
    assert f"wrote {run_dir / 'report.png'}" in captured.err
    # Drawn without a display's machinery.
    assert "matplotlib.pyplot" not in sys.modules


def test_report_without_matplotlib_has_text_and_page_and_says_so(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (chart_png, report_files):
        monkeypatch.setattr(module, "has_matplotlib", lambda: False)
    out = run_dir / "figures"
    out.mkdir()
    assert cli.main(["report", str(run_dir), "--out", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["overlap"][0]["overlap"] == 0.5
    assert "memascend-jax[report]" in captured.err
    assert [path.name for path in out.iterdir()] == ["report.html"]


def test_report_can_leave_the_disk_alone_and_names_a_missing_folder(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(run_dir), "--no-figures"]) == 0
    assert not (run_dir / "report.html").exists()
    assert cli.main(["report", str(run_dir), "--out", str(run_dir / "missing")]) == 1
    assert str(run_dir / "missing" / "report.html") in capsys.readouterr().err
