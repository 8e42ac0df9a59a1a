# SPDX-License-Identifier: Apache-2.0
"""A run goes on with other settings where that is harmless or allowed, and exactly where it stopped."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from killed_runs import Outcome, check_same, outcome
from tiny_checkpoints import hf_config, random_tensors, write_folder

from memascend_jax.checkpoints.saved_step import find_steps, open_step
from memascend_jax.config import load_config
from memascend_jax.data.chunks import ChunkOrder
from memascend_jax.data.packing import Microbatch
from memascend_jax.data.sequences import TrainingSequences
from memascend_jax.errors import ConfigError, DataError, StoppedError, StoreError
from memascend_jax.observe.metrics import read_lines
from memascend_jax.observe.report import read_run
from memascend_jax.recipes import finetune
from memascend_jax.recipes.checkpointing import RunCheckpoints
from memascend_jax.recipes.resume import Found, check_scratch
from memascend_jax.storage.endurance import expected_life
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.training.loop import StepData
from memascend_jax.training.run_state import RunState

pytestmark = pytest.mark.integration

STEPS = 8
CONSTANT = ("optimizer.schedule=constant", "optimizer.warmup_steps=2", "train.eval_every=3")


def go(folder: Path, *settings: str, steps: int = STEPS) -> int:
    config = load_config(
        ["tiny_random"],
        [f"run.dir={folder}", "offload.direct_io=optional", f"train.steps={steps}", *settings],
    )
    return finetune.run(config)


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Starts a run that a signal stops after a step."""

    def start(step: int, folder: Path, *settings: str) -> None:
        after_step = finetune._after_step

        def signalled(job: finetune.Run, session: Any, trainer: Any, state: RunState) -> RunState:
            if state.step == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return after_step(job, session, trainer, state)

        with monkeypatch.context() as patch, pytest.raises(StoppedError):
            patch.setattr(finetune, "_after_step", signalled)
            go(folder, *settings)

    return start


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert go(folder, *CONSTANT) == 0
    return outcome(folder)


def test_a_complete_run_goes_on_when_it_is_to_be_longer(
    tmp_path: Path, undisturbed: Outcome, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert go(folder, *CONSTANT, steps=6) == 0
    exported = (folder / "export" / "model.safetensors").read_bytes()
    assert go(folder, *CONSTANT) == 0
    check_same(folder, undisturbed)
    assert (folder / "export_step_6" / "model.safetensors").read_bytes() == exported
    assert json.loads((folder / "summary_step_6.json").read_text())["step"] == 6
    assert "the results of step 6 are kept: export_step_6 and summary_step_6.json" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"train\.steps \(8 → 6\)"):
        go(folder, *CONSTANT, steps=6)
    with pytest.raises(ConfigError, match=r"at step 8, past the 6 that it is to have now"):
        go(folder, *CONSTANT, "run.allow_changed=[train.steps]", steps=6)


def test_settings_that_change_nothing_of_the_training_are_others_after_a_stop(
    tmp_path: Path, undisturbed: Outcome, stop_after: Callable[..., None]
) -> None:
    first = tmp_path / "first"
    stop_after(3, first, *CONSTANT)
    # Copied to another place, with its store, as to another machine.
    folder = tmp_path / "second"
    shutil.copytree(first, folder)
    shutil.rmtree(first)
    for step, settings in (
        (5, ("offload.host_memory=1GiB", "run.trace=true", "offload.io_backend=threads")),
        (6, ("offload.host_memory=560MiB", "train.samples=2", "checkpoint.keep=7")),
    ):
        stop_after(step, folder, *CONSTANT, *settings)
    assert go(folder, *CONSTANT, "offload.update=exact", "offload.durability=step") == 0
    check_same(folder, undisturbed)


def test_a_signal_in_an_evaluation_breaks_it_off_and_it_is_done_after_the_resume(
    tmp_path: Path, undisturbed: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    evaluate = finetune.evaluate
    evaluations = 0

    def signalled(*arguments: object, **more: object) -> float:
        nonlocal evaluations
        evaluations += 1
        # The one before the training, the one after step 3, and the one after the training.
        if evaluations in (1, 3, 6):
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(finetune, "evaluate", signalled)
    for words in (
        "before the training, at step 0 of 8",
        "after step 3 of 8",
        "after the training, at step 8 of 8",
    ):
        with pytest.raises(StoppedError, match=words):
            go(folder, *CONSTANT)
        assert "SIGTERM" in json.loads((folder / "status.json").read_text())["message"]
    assert go(folder, *CONSTANT) == 0
    assert evaluations == 7
    check_same(folder, undisturbed)


def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, undisturbed: Outcome, stop_after: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forth by days and back again at every look, before the epoch too; as a machine without a battery does."""
    jumps = itertools.cycle([0.0, 1e6, -3e9, 5e9, 1.0])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    folder = tmp_path / "run"
    stop_after(4, folder, *CONSTANT, "run.trace=true")
    assert go(folder, *CONSTANT) == 0
    check_same(folder, undisturbed)
    assert all(0 < line["step_seconds"] < 300 for line in read_lines(folder / "metrics.jsonl"))
    assert read_run(folder)["status"]["state"] == "done"
    with TensorStore.open([folder / "memascend.store"], read_only=True, direct_io="optional") as store:
        assert expected_life(store.inspect(), [1.0])[0]["bytes_written"] > 0


def test_a_checkpoint_that_a_kill_between_commit_and_save_has_cost_is_saved_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    settings = (
        "train.eval_every=2",
        "data.eval_fraction=0.1",
        "checkpoint.every=2",
        "checkpoint.keep_best=1",
    )

    def killed(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(RunCheckpoints, "save", killed)
        go(folder, *settings, steps=3)
    assert find_steps(folder / "checkpoints") == []
    assert go(folder, *settings, steps=3) == 0
    assert find_steps(folder / "checkpoints") == [2]
    saved = open_step(folder / "checkpoints" / "2")
    losses = dict(saved.record.run_state["results"]["eval_losses"])
    assert saved.metrics == {"eval_loss": losses[2]}


@dataclass
class Places:
    """Sequences whose first token is their place."""

    seq_len: int = 1
    pad_id: int = 0

    def fill(self, batch: Microbatch, row: int, place: int) -> None:
        batch.tokens[row] = place


def test_a_signal_while_the_model_is_read_breaks_it_off_and_it_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    initialise = finetune.initialise_state

    def signalled(*arguments: Any, **more: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        initialise(*arguments, **more)

    with (
        monkeypatch.context() as patch,
        pytest.raises(StoppedError, match="SIGUSR1 while the model was read"),
    ):
        patch.setattr(finetune, "initialise_state", signalled)
        go(tmp_path / "run", steps=1)
    assert go(tmp_path / "run", steps=1) == 0


def test_another_batch_size_is_refused_and_if_allowed_goes_on_in_the_data(
    tmp_path: Path, stop_after: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    larger = "train.gradient_accumulation_steps=4"
    stop_after(2, folder, "train.steps=5")
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(
        ConfigError,
        match=r"gradient_accumulation_steps \(2 → 4\).*allow_changed=\[optimizer\.clip_norm, train\.grad",
    ):
        go(folder, larger, "optimizer.clip_norm=null", "run.allow_changed=[optimizer.clip_norm]", steps=5)
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert go(folder, larger, "run.allow_changed=[train.gradient_accumulation_steps]", steps=5) == 0
    assert (
        "with other settings, as allowed: train.gradient_accumulation_steps (2 → 4)" in capfd.readouterr().err
    )
    assert [line["tokens"] for line in read_lines(folder / "metrics.jsonl")] == [256, 256, 512, 512, 512]
    with TensorStore.open([folder / "memascend.store"], read_only=True, direct_io="optional") as store:
        assert RunState.decode(store.run_state, "store").sequences == 2 * 4 + 3 * 8
    data = StepData(cast(TrainingSequences, Places()), 4, 2, done_steps=2, read=8)
    batches = data.of_step(3) + data.of_step(4)
    assert np.concatenate([batch.tokens.ravel() for batch in batches]).tolist() == list(range(8, 24))
    state = json.loads((folder / "status.json").read_text())
    assert (state["state"], state["step"]) == ("done", 5)
    # The new values are those of the run from now on.
    assert go(folder, larger, steps=5) == 0


@pytest.fixture
def jsonl_run(tmp_path: Path) -> tuple[Path, Path, Callable[..., int]]:
    """A finished run of two steps on a file, and what goes on with it."""
    config = hf_config()
    model, data = write_folder(tmp_path / "model", config, random_tensors(config)), tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"text": f"line {number} of the data " * 8}) + "\n" for number in range(40))
    )

    def again(*settings: str, steps: int = 3) -> int:
        files = (f"model.source={model}", "model.config={}", f"data.source={data}", "data.seq_len=64")
        return go(tmp_path / "run", *files, "run.export=false", *settings, steps=steps)

    assert again(steps=2) == 0
    return model, data, again


def test_other_contents_of_the_same_file_are_noticed_and_the_same_under_another_name_go_on(
    tmp_path: Path, jsonl_run: tuple[Path, Path, Callable[..., int]]
) -> None:
    model, data, again = jsonl_run
    text = data.read_text()
    data.write_text(text.replace("line 7 ", "line 77 "))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(
        ConfigError, match=r"data\.source \(.*data\.jsonl as it was → its contents as they are now\)"
    ):
        again()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    moved = tmp_path / "moved.jsonl"
    moved.write_text(text)
    assert again(f"data.source={moved}") == 0
    assert again("run.allow_changed=[data.source]", steps=4) == 0
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rope_theta": 1e6}))
    with pytest.raises(ConfigError, match=r"model\.source \(.*model as it was"):
        again(steps=5)
    with pytest.raises(
        ConfigError, match=r"data\.seq_len \(64 → 32\), model\.source|data\.seq_len \(64 → 32\)"
    ):
        again("data.seq_len=32", steps=5)


def test_streamed_sources_with_weights_go_on_exactly_and_what_changed_is_named(
    tmp_path: Path, stop_after: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memascend_jax.data.jsonl.BLOCK_BYTES", 200)
    monkeypatch.setattr("memascend_jax.data.chunks.CHUNK_BYTES", 500)
    config = hf_config()
    model = write_folder(tmp_path / "model", config, random_tensors(config))
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": f"{name} {number} of the data " * 3}) + "\n" for number in range(90))
        )
    sources = ", ".join(
        f"{{path: {tmp_path / f'{n}.jsonl'}, weight: {w}}}" for n, w in (("a", 0.7), ("b", 0.3))
    )
    settings = (
        *(f"model.source={model}", "model.config={}", "data.source=pydocs", f"data.sources=[{sources}]"),
        *("data.stream=always", "data.seq_len=64", "train.eval_every=4"),
    )
    assert go(tmp_path / "whole", *settings, steps=9) == 0
    stop_after(4, tmp_path / "run", "train.steps=9", *settings)
    with TensorStore.open(
        [tmp_path / "run" / "memascend.store"], read_only=True, direct_io="optional"
    ) as store:
        position = RunState.decode(store.run_state, "store").position
    assert set(position) == {"0", "1"}
    assert position["0"]["chunk"] > 0, "the run is not at the beginning of its data"
    before = (tmp_path / "b.jsonl").read_text()
    (tmp_path / "b.jsonl").write_text(before.replace("b 7 ", "b 77 "))
    with pytest.raises(ConfigError, match=r"data\.sources \(.*b\.jsonl as it was") as refused:
        go(tmp_path / "run", *settings, steps=9)
    assert "a.jsonl as it was" not in str(refused.value)
    (tmp_path / "b.jsonl").write_text(before)
    assert go(tmp_path / "run", *settings, steps=9) == 0
    check_same(tmp_path / "run", outcome(tmp_path / "whole"))
    assert (tmp_path / "run" / "token_cache").is_dir()


def test_a_wrong_record_far_on_ends_the_run_with_the_steps_before_it_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memascend_jax.data.jsonl.BLOCK_BYTES", 200)
    monkeypatch.setattr("memascend_jax.data.chunks.CHUNK_BYTES", 500)
    config, data = hf_config(), tmp_path / "data.jsonl"
    model = write_folder(tmp_path / "model", config, random_tensors(config))
    lines = [json.dumps({"text": f"{number} of the data " * 3}) for number in range(90)]
    # The block with it is read in the fourth chunk.
    order = ChunkOrder(np.full(-(-len("\n".join(lines)) // 200), 200, np.int64), 0)
    offset = int(order.blocks(3)[0]) * 200
    number = "\n".join(lines)[:offset].count("\n") + 1
    lines[number] = lines[number].replace("{", "[", 1)
    data.write_text("\n".join(lines) + "\n")
    settings = (
        *(f"model.source={model}", "model.config={}", f"data.source={data}", "data.stream=always"),
        *("data.seq_len=64", "data.eval_fraction=0", "run.export=false"),
    )
    with pytest.raises(DataError, match=rf"data\.jsonl:{number + 1}: "):
        go(tmp_path / "run", *settings, steps=9)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["step"] >= 1
    lines_before = [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert lines_before == list(range(1, status["step"] + 1))
    skip = ("data.bad_records=skip", "run.allow_changed=[data.bad_records]")
    assert go(tmp_path / "run", *settings, *skip, steps=9) == 0
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 10))


def test_a_state_that_does_not_fit_cannot_be_allowed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert go(folder, "run.export=false", steps=1) == 0
    # The warm-up was cut to the one step; that it is not any more needs no leave.
    assert go(folder, "run.export=false", steps=2) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for settings, words in (
        (
            ("model.config.intermediate_size=192",),
            r"mlp\.down_proj\.weight' is bfloat16\[64, 176\] in the store",
        ),
        (("model.config.num_hidden_layers=2",), r"layers\.2\..*is of no use to this run"),
        (("model.compute_dtype=float32",), r"(is missing|is of no use|not float32)"),
        (("optimizer.state_format=int8",), r"optimizer\.state_format=fp32, not int8"),
    ):
        with pytest.raises(ConfigError, match=words):
            go(folder, *settings, "run.allow_changed=true", steps=3)
    with pytest.raises(StoreError, match=r"there is no store at"):
        go(folder, "run.resume=required", f"offload.store=[{tmp_path}/none]", steps=3)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_settings_for_which_the_store_has_no_room_to_put_things_away_are_refused() -> None:
    found = Found(RunState(3, {}, 0), 4, "", ("/s",), "step", {}, scratch_bytes=380 << 10)
    check_scratch(found, 380 << 10)
    with pytest.raises(ConfigError, match=r"/s was made with 380\.00 KiB for .* a step needs 6\.00 MiB"):
        check_scratch(found, 6 << 20)


def test_a_store_keeps_its_durability(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert go(folder, "run.export=false", "offload.durability=checkpoint", steps=1) == 0
    with pytest.raises(
        ConfigError, match=r"made with durability checkpoint, which offload.durability=step does not"
    ):
        go(folder, "offload.durability=step", steps=2)
    assert go(folder, "run.export=false", steps=2) == 0
    assert json.loads((folder / "plan.json").read_text())["durability"] == "checkpoint"
