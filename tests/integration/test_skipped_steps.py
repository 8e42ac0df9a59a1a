# SPDX-License-Identifier: Apache-2.0
"""Steps whose loss or gradient is not finite: skipped with the state as it was, and float16 training around them."""

from __future__ import annotations

import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest
from streamed_run import streamed_run

from memascend_jax.config import load_config
from memascend_jax.errors import NonfiniteError, StoppedError
from memascend_jax.observe.metrics import read_lines
from memascend_jax.optim import loss_scale
from memascend_jax.recipes import finetune
from memascend_jax.training.gradients import StepGradients

pytestmark = pytest.mark.integration

FLOAT16 = "model.compute_dtype=float16"
POISONED = "model.layers.1.mlp.up_proj.weight"


def state_bytes(run):
    leaves = ["", *(leaf.suffix for leaf in run.plan.layout.format.leaves)]
    return {name + leaf: run.tensor(name + leaf).tobytes() for name in run.names() for leaf in leaves}


def step(run, number, data=None):
    """Trains step ``number``, on the batch of step ``data`` if given, and commits it."""
    data = data or number
    result = run.session.train_step(number, run.data.of_step(data), run.data.of_step(data + 1))
    run.session.placement.begin_commit(b"")
    return result


def poison(monkeypatch, value):
    """Makes one element of the gradient of one tensor of one layer ``value`` until the patch is undone."""
    put_stage = StepGradients.put_stage

    def poisoned(self, names, rounded, norms):
        found = [local for local, name in names.items() if name == POISONED]
        for local in found:
            rounded = {**rounded, local: rounded[local].at[0, 0].set(value)}
            norms = norms.at[sorted(rounded).index(local)].set(jnp.square(jnp.float32(value)))
        put_stage(self, names, rounded, norms)

    monkeypatch.setattr(StepGradients, "put_stage", poisoned)


@pytest.mark.parametrize("placement", ["ssd", "host", "memory"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ([FLOAT16], (2.0**16, 2.0**15)),
        ([FLOAT16, "optimizer.loss_scale=1024"], (1024.0, 1024.0)),
        (["optimizer.skip_nonfinite=true"], (1.0, 1.0)),
        (
            ["optimizer.skip_nonfinite=true", "optimizer.state_format=int8", "optimizer.clip_norm=null"],
            (1.0, 1.0),
        ),
    ],
    ids=["float16 dynamic", "float16 fixed", "bfloat16", "int8 without a clip"],
)
def test_a_step_that_is_not_finite_changes_no_bit(tmp_path, monkeypatch, placement, value, settings, scales):
    with streamed_run(tmp_path, *settings, f"offload.placement={placement}") as run:
        step(run, 1)
        before = state_bytes(run)
        with monkeypatch.context() as patch:
            poison(patch, value)
            skipped = step(run, 2)
        assert state_bytes(run) == before
        assert (
            POISONED in skipped.skipped
            and "1 of" in skipped.skipped
            and "model.layers.0" not in skipped.skipped
        )
        assert (skipped.loss_scale, skipped.scaling.value, skipped.scaling.skipped_steps) == (*scales, 1)
        after = step(run, 3)
        assert after.skipped is None and np.isfinite(after.grad_norm)
        assert after.scaling.skipped_steps == 1
        assert state_bytes(run) != before


@pytest.mark.parametrize("placement", ["ssd", "host"])
@pytest.mark.parametrize(
    "settings",
    [
        [FLOAT16, "optimizer.loss_scale=1024"],
        ["optimizer.skip_nonfinite=true", "optimizer.state_format=bf16"],
    ],
    ids=["float16", "bf16 state"],
)
def test_training_goes_on_as_if_the_skipped_step_had_not_been(tmp_path, monkeypatch, placement, settings):
    constant = ["optimizer.schedule=constant", "optimizer.warmup_steps=0", f"offload.placement={placement}"]
    ends = []
    for skips in (True, False):
        with streamed_run(tmp_path / str(skips), *settings, *constant) as run:
            step(run, 1)
            step(run, 2)
            if skips:
                with monkeypatch.context() as patch:
                    poison(patch, np.inf)
                    assert step(run, 3).skipped
            losses = [step(run, number + skips, data=number + 1).loss for number in (3, 4, 5)]
            ends.append((losses, state_bytes(run)))
    assert ends[0] == ends[1]


def test_without_being_told_to_skip_the_run_ends(tmp_path, monkeypatch):
    with streamed_run(tmp_path) as run:
        poison(monkeypatch, np.inf)
        with pytest.raises(NonfiniteError, match=POISONED):
            step(run, 1)


def test_a_scale_that_float16_cannot_hold_ends_the_run_after_many_skipped_steps(tmp_path):
    with streamed_run(tmp_path, FLOAT16, "optimizer.loss_scale=1e12", "offload.placement=memory") as run:
        before = state_bytes(run)
        for number in range(1, loss_scale.MOST_SKIPPED_IN_A_ROW + 1):
            assert "at loss scale 1e+12" in step(run, number).skipped
        with pytest.raises(NonfiniteError, match="32 steps before step 33 were skipped"):
            step(run, loss_scale.MOST_SKIPPED_IN_A_ROW + 1)
        assert state_bytes(run) == before


#: float16 has three bits more than bfloat16, whose losses stay within 1e-4 of an oracle with the same roundings.
FLOAT16_LOSS_TOLERANCE = 1e-3


@pytest.mark.parametrize("tied", ["true", "false"])
def test_float16_training_follows_float32_training(tmp_path, tied):
    losses, masters = {}, {}
    for dtype in ("float16", "float32"):
        with streamed_run(
            tmp_path / dtype, f"model.compute_dtype={dtype}", f"model.config.tie_word_embeddings={tied}"
        ) as run:
            losses[dtype] = run.train(20)
            leaf = "#master" if dtype == "float16" else ""
            masters[dtype] = {name: run.tensor(name + leaf) for name in run.names()}
            if dtype == "float16":
                for name, master in masters[dtype].items():
                    np.testing.assert_array_equal(run.tensor(name), master.astype(np.float16))
                assert run.session.train_step.scaling == loss_scale.ScaleState(2.0**16, good_steps=20)
    np.testing.assert_allclose(losses["float16"], losses["float32"], rtol=FLOAT16_LOSS_TOLERANCE)
    assert losses["float16"] != losses["float32"]


#: Relative error of a tensor's gradient; bfloat16 with an eighth of the precision has up to 1e-2.
FLOAT16_GRADIENT_TOLERANCE = 3e-3


def first_step(folder, *settings):
    """Returns the norm of the first gradient, and the first moments after it."""
    with streamed_run(folder, *settings, "offload.placement=memory") as run:
        norm = step(run, 1).grad_norm
        return norm, {name: run.tensor(name + "#mu") for name in run.names()}


def test_the_scale_keeps_gradients_from_vanishing_and_is_taken_out_again(tmp_path):
    norm, mu = first_step(tmp_path / "float32", "model.compute_dtype=float32")
    errors = {}
    for scale in (2.0**-24, 2.0**14):
        got_norm, got = first_step(tmp_path / str(scale), FLOAT16, f"optimizer.loss_scale={scale}")
        errors[scale] = [abs(got_norm / norm - 1)]
        errors[scale] += [np.linalg.norm(got[name] - mu[name]) / np.linalg.norm(mu[name]) for name in mu]
    assert max(errors[2.0**14]) < FLOAT16_GRADIENT_TOLERANCE
    assert min(errors[2.0**-24]) > 0.1


EXACT = ("step", "loss", "learning_rate", "grad_norm", "loss_scale", "skipped_steps", "tokens")


def test_a_resumed_run_goes_on_with_its_scale(tmp_path, monkeypatch, capfd):
    """From a scale that overflows by itself the run comes down to one that does not, whether stopped or not."""
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 2.0**32)
    lines = {}
    for stops in (False, True):
        folder = tmp_path / str(stops)
        config = load_config(
            ["tiny_random"],
            [
                f"run.dir={folder}",
                FLOAT16,
                "optimizer.loss_scale=dynamic",
                "offload.direct_io=optional",
                "train.steps=24",
            ],
        )
        if stops:
            after_step = finetune._after_step

            def stop_at_four(job, session, trainer, state, after_step=after_step):
                if state.step == 4:
                    os.kill(os.getpid(), signal.SIGTERM)
                return after_step(job, session, trainer, state)

            with monkeypatch.context() as patch, pytest.raises(StoppedError):
                patch.setattr(finetune, "_after_step", stop_at_four)
                finetune.run(config)
        assert finetune.run(config) == 0
        lines[stops] = [{key: line[key] for key in EXACT} for line in read_lines(folder / "metrics.jsonl")]
    assert lines[True] == lines[False]
    scales = [line["loss_scale"] for line in lines[True]]
    skipped = [line["skipped_steps"] for line in lines[True]]
    assert scales[:6] == [2.0 ** (32 - number) for number in range(6)]
    assert 5 < skipped[-1] < 20 and skipped == sorted(skipped)
    assert scales[-1] == 2.0 ** (32 - skipped[-1])
    assert [line["grad_norm"] is None for line in lines[True]] == [True] * skipped[-1] + [False] * (
        24 - skipped[-1]
    )
    said = capfd.readouterr()
    assert "warning: step 1 is skipped: the gradient of" in said.err
    assert "at loss scale 4.29497e+09, which is 2.14748e+09 from now on" in said.err
    assert "skipped steps" in said.out


def test_groups_train_their_tensors_with_their_own_rate_and_decay(tmp_path):
    """The first step alone, whose gradients are those of the run without groups."""
    common = [
        "optimizer.learning_rate=1e-3",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
        "optimizer.clip_norm=null",
    ]
    groups = (
        "optimizer.groups=[{match: 'layers[.]0[.]', learning_rate: 0},"
        " {match: down_proj, weight_decay: 50.0}, {match: embed, learning_rate: 1e-2}]"
    )
    with streamed_run(tmp_path / "plain", *common, "offload.placement=memory") as run:
        before = {name: run.tensor(name + "#master") for name in run.names()}
        step(run, 1)
        plain = {name: run.tensor(name + "#master") for name in run.names()}
    for update in ("exact", "in_backward"):
        settings = [*common, groups, f"offload.update={update}"]
        with streamed_run(tmp_path / update, *settings) as run:
            assert step(run, 1).learning_rate == 1e-3
            # Rows of the next step are updated ahead of their tiles, and must agree with them.
            ahead = run.session.model.rows_ahead
            rows, values = ahead._rows, ahead._values
            np.testing.assert_array_equal(run.tensor("model.embed_tokens.weight")[rows], values)
            for name, value in before.items():
                master = run.tensor(name + "#master")
                expected, rtol = plain[name], 0.0
                if "layers.0." in name:
                    expected = value
                elif "down_proj" in name:
                    expected, rtol = plain[name] - np.float32(0.05) * value, 1e-4
                elif "embed" in name:
                    expected, rtol = value + 10 * (plain[name] - value), 1e-2
                np.testing.assert_allclose(master, expected, rtol=rtol, atol=1e-2 * rtol, err_msg=name)
                assert ("layers.0." in name) == np.array_equal(master, value), name
