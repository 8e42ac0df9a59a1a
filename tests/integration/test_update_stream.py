# SPDX-License-Identifier: Apache-2.0
"""The update beside the next forward: what it hands over, how it fails, and how it is given up."""

from __future__ import annotations

import numpy as np
import pytest
from streamed_run import streamed_run

from memascend_jax.errors import NonfiniteError
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.training import update
from memascend_jax.training.batch_rows import collect_rows
from memascend_jax.training.gradients import StepGradients

pytestmark = pytest.mark.integration


def read_all(folder):
    """Returns the run state and every tensor of the store's last generation."""
    with TensorStore.open([folder / "memascend.store"], direct_io="optional") as store:
        assert store.verify().faults == []
        return store.run_state, {name: store.get(name).tobytes() for name in store.names()}


def train_step(run, number):
    return run.session.train_step(number, run.data.of_step(number), run.data.of_step(number + 1))


def load_all(run):
    """Returns a copy of every stage's parameters, the rows that pad the last head tile left out."""
    found = {}
    for key, parts in run.plan.layout.stage_parts.items():
        stage = run.session.placement.load(key)
        rows = {part.local_name: part.shape[0] for part in parts}
        found[key] = {name: np.array(array)[: rows[name]].tobytes() for name, array in stage.arrays().items()}
        stage.release()
    return found


def test_a_step_and_an_evaluation_see_the_updated_parameters(tmp_path):
    """Whatever comes right after a step, the update still under way, computes what it computes when all is written."""
    results = []
    for wait in (False, True):
        with streamed_run(tmp_path / str(wait)) as run:
            train_step(run, 1)
            run.session.placement.begin_commit(b"1")
            if wait:
                run.session.placement.finish_commit()
            batches = run.data.of_step(1)
            rows = collect_rows(batches, run.plan.layout.config.vocab_size, run.data.of_step(2))
            loss, _ = run.session.model.loss_and_gradients(batches, rows)
            results.append((loss, run.session.model.evaluate(batches)))
            run.session.placement.finish_commit()
    assert results[0] == results[1]
    assert results[0][0] == pytest.approx(results[0][1][0] / results[0][1][1])


def test_a_stage_is_handed_over_without_a_read(tmp_path):
    with streamed_run(tmp_path) as run:
        train_step(run, 1)
        placement = run.session.placement
        before = placement.io_bytes()[0]
        handed_over = load_all(run)
        placement.finish_update()
        planned = sum(phase.read_bytes for phase in run.plan.traffic if phase.phase == "forward")
        assert placement.io_bytes()[0] - before <= planned
        placement.begin_commit(b"1")
        placement.finish_commit()
        assert load_all(run) == handed_over


class BrokenError(Exception):
    pass


#: With the update beside the next forward, and with that of the layers in the backward.
MODES = pytest.mark.parametrize(
    "mode",
    [["offload.update=exact"], ["offload.update=in_backward", "optimizer.clip_norm=null"]],
    ids=["exact", "in backward"],
)


@MODES
@pytest.mark.timeout(120)
@pytest.mark.parametrize("after", [0, 3])
def test_a_failing_update_is_raised_and_the_step_before_stays(tmp_path, monkeypatch, after, mode):
    calls = []
    real = update.update_tile

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) > after:
            raise BrokenError("no more")
        real(*args, **kwargs)

    # More layers than have slots for their gradients: who waits for one must learn that none comes back.
    mode = [*mode, "model.config.num_hidden_layers=12"]
    with pytest.raises(BrokenError), streamed_run(tmp_path, *mode) as run:
        train_step(run, 1)
        run.session.placement.begin_commit(b"1")
        run.session.placement.finish_commit()
        committed = {name: run.tensor(name).tobytes() for name in run.names()}
        # The rows ahead of the update are not the subject here.
        monkeypatch.setattr(run.session.placement, "overlaps_update", False)
        monkeypatch.setattr(update, "update_tile", failing)
        train_step(run, 2)
        run.session.placement.begin_commit(b"2")
        train_step(run, 3)
    state, tensors = read_all(tmp_path)
    assert state == b"1"
    assert all(tensors[name] == value for name, value in committed.items())


@MODES
def test_an_update_that_is_given_up_leaves_the_step_before(tmp_path, mode):
    with pytest.raises(KeyboardInterrupt), streamed_run(tmp_path, *mode) as run:
        train_step(run, 1)
        run.session.placement.begin_commit(b"1")
        run.session.placement.finish_commit()
        committed = {name: run.tensor(name).tobytes() for name in run.names()}
        train_step(run, 2)
        run.session.placement.begin_commit(b"2")
        raise KeyboardInterrupt
    state, tensors = read_all(tmp_path)
    assert state == b"1"
    assert all(tensors[name] == value for name, value in committed.items())


@MODES
def test_a_nonfinite_gradient_leaves_the_step_before(tmp_path, monkeypatch, mode):
    def nonfinite(gradients):
        raise NonfiniteError("the gradient is not finite")

    with streamed_run(tmp_path, *mode) as run:
        train_step(run, 1)
        run.session.placement.begin_commit(b"1")
        run.session.placement.finish_commit()
        committed = {name: run.tensor(name).tobytes() for name in run.names()}
        monkeypatch.setattr(StepGradients, "global_norm", nonfinite)
        with pytest.raises(NonfiniteError):
            train_step(run, 2)
        run.session.placement.cancel_update()
        run.session.placement.finish_commit()
    state, tensors = read_all(tmp_path)
    assert state == b"1"
    assert all(tensors[name] == value for name, value in committed.items())


def test_two_commits_in_a_row_wait_for_the_update_between_them(tmp_path):
    with streamed_run(tmp_path) as run:
        train_step(run, 1)
        run.session.placement.begin_commit(b"1")
        run.session.placement.begin_commit(b"1 and what was found out since")
        run.session.placement.finish_commit()
    assert read_all(tmp_path)[0] == b"1 and what was found out since"
