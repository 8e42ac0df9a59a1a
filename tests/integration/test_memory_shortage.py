# SPDX-License-Identifier: Apache-2.0
"""The command in a real memory cgroup that another process fills: it waits with a warning and is not killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memascend_jax.observe.metrics import read_lines
from memascend_jax.units import MIB

pytestmark = [pytest.mark.integration, pytest.mark.timeout(800)]

_LIMIT = 800 * MIB
#: Fills its cgroup until its standard input closes.
_HOG = """\
import mmap, sys
nbytes = int(sys.argv[1])
memory = mmap.mmap(-1, nbytes)
for start in range(0, nbytes, 4096):
    memory[start] = 1
print("full", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """Yields the folder of a new memory cgroup of version 1; skips the test where none can be made."""
    top = Path("/sys/fs/cgroup/memory")
    group = top / f"memascend-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        deadline = time.monotonic() + 10
        while group.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                group.rmdir()
            time.sleep(0.05)


def start(group: Path, *command: str, **options: object) -> subprocess.Popen[str]:
    inside = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    return subprocess.Popen(["sh", "-c", inside, "sh", *command], text=True, **options)  # type: ignore[call-overload, no-any-return]


def wait_for(is_so: Callable[[], bool], process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + 200
    while not is_so():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def room(group: Path) -> int:
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    usage = int((group / "memory.usage_in_bytes").read_text())
    return _LIMIT - usage + int(statistics["total_inactive_file"])


def test_a_run_waits_for_memory_that_another_process_took_and_goes_on(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    command = [
        *(sys.executable, "-m", "memascend_jax.recipes.llama_finetune", "--config", "tiny_random"),
        *(f"run.dir={folder}", "train.steps=1000000", "offload.direct_io=optional"),
    ]

    def steps() -> int:
        return len(read_lines(folder / "metrics.jsonl")) if (folder / "metrics.jsonl").exists() else 0

    with memory_cgroup(_LIMIT) as group, log.open("w") as stderr, contextlib.ExitStack() as stack:
        run = start(group, *command, stderr=stderr, stdout=subprocess.DEVNULL)
        stack.callback(run.wait)
        stack.callback(run.kill)
        wait_for(lambda: steps() >= 3, run, log)
        # In a group with room for everything nothing is said.
        assert "memory is short" not in log.read_text()
        hog = start(
            group,
            *(sys.executable, "-c", _HOG, str(room(group) - 40 * MIB)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        stack.callback(hog.wait)
        stack.callback(hog.kill)
        assert hog.stdout is not None and hog.stdin is not None
        assert hog.stdout.readline() == "full\n"
        wait_for(lambda: "memory is short" in log.read_text(), run, log)
        held_up = steps()
        time.sleep(1.5)
        assert steps() == held_up
        hog.stdin.close()
        wait_for(lambda: "there is memory again" in log.read_text(), run, log)
        wait_for(lambda: steps() >= held_up + 3, run, log)
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=60) == 75
    said = log.read_text()
    assert "available in its memory cgroup (limited to 800.00 MiB)" in said
    # The time that it took is told, and is not computing.
    waited = [line["memory_wait"] for line in read_lines(folder / "metrics.jsonl")]
    assert max(waited) > 1.5


@pytest.mark.parametrize("placement", ["ssd", "host"])
def test_a_user_who_may_lock_next_to_nothing_trains_and_reads_the_remedy(
    tmp_path: Path, placement: str
) -> None:
    unprivileged = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]
    if os.geteuid() != 0:
        unprivileged = []
    elif shutil.which("setpriv") is None:
        pytest.skip("root may lock everything, and there is no setpriv")
    command = [
        *(sys.executable, "-m", "memascend_jax.recipes.llama_finetune", "--config", "tiny_random"),
        *(f"run.dir={tmp_path / 'run'}", f"offload.placement={placement}", "offload.direct_io=optional"),
    ]
    # The limit holds for io_uring's registered memory too.
    done = subprocess.run(
        ["prlimit", "--memlock=65536", *unprivileged, *command], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "pageable (cannot lock" in done.stderr
    assert "the limit of locked memory is 65,536 bytes; raise it with `ulimit -l`" in done.stderr


def test_a_run_that_the_kernel_killed_for_lack_of_memory_is_told_so_at_the_next_start(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    command = [
        *(sys.executable, "-m", "memascend_jax.recipes.llama_finetune", "--config", "tiny_random"),
        *(f"run.dir={folder}", "offload.direct_io=optional", "run.allow_changed=true"),
    ]
    with memory_cgroup(_LIMIT) as group, log.open("w") as stderr, contextlib.ExitStack() as stack:
        run = start(group, *command, "train.steps=1000000", stderr=stderr, stdout=subprocess.DEVNULL)
        stack.callback(run.wait)
        stack.callback(run.kill)
        metrics = folder / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(read_lines(metrics)) >= 3, run, log)
        # Whoever takes more than there is, the kernel shall choose the run.
        Path(f"/proc/{run.pid}/oom_score_adj").write_text("1000")
        hog = start(
            group,
            *(sys.executable, "-c", _HOG, str(_LIMIT - 60 * MIB)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        stack.callback(hog.wait)
        stack.callback(hog.kill)
        assert run.wait(timeout=60) == -signal.SIGKILL
    steps = len(read_lines(metrics))
    again = subprocess.run(
        [*command, f"train.steps={steps + 2}"], capture_output=True, text=True, timeout=200
    )
    assert again.returncode == 0, again.stderr
    assert (
        "for lack of memory: probably that run. To avoid it give it a smaller offload.host_memory"
        in again.stderr
    )
    # Once told it is not told again.
    assert "lack of memory" not in subprocess.run(command, capture_output=True, text=True, timeout=200).stderr
