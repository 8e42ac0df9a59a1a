# SPDX-License-Identifier: Apache-2.0
"""The arrays of an offloaded state exist once: whoever steps, commits, fails or begins again, numbers go with them."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from offloading import TILE, assert_close, make_store
from stores import ANY_DISK, abandon

import memascend_jax
from memascend_jax import TensorStore
from memascend_jax.errors import ConfigError, NonfiniteError, StoreError
from memascend_jax.optim.offload import offload
from memascend_jax.optim.offload_update import PieceUpdates

#: One compiled function for all tests, and several groups of pieces.
BASE = optax.adam(1e-2)
PARAMS = {"a": np.ones(3 * TILE, np.float32), "b": np.full(70, 2.0, np.float32)}


def _tx(store: TensorStore, base: Any = BASE, **options: Any) -> Any:
    return offload(base, store=store, **{"tile_elements": TILE, **options})


def _grads(step: int = 0) -> dict[str, np.ndarray]:
    return jax.tree.map(lambda leaf: np.full_like(leaf, 0.1 * (step + 1)), PARAMS)


def _steps(tx: Any, state: Any, n: int = 3, params: Any = PARAMS) -> tuple[Any, Any]:
    for step in range(n):
        params, state = tx.apply(_grads(step), state, params)
    return params, state


def _mu(store: TensorStore, prefix: str = "") -> float:
    return float(np.abs(store.get(f"{prefix}a#mu")).max())


def _fail_at(monkeypatch: pytest.MonkeyPatch, call: int, error: type[BaseException] = OSError) -> None:
    whole, calls = PieceUpdates.piece, []

    def fail_later(self: Any, piece: Any, lease: Any) -> None:
        calls.append(piece)
        if len(calls) == call:
            raise error
        whole(self, piece, lease)

    monkeypatch.setattr(PieceUpdates, "piece", fail_later)


class TestRestore:
    def test_it_goes_back_to_the_last_commit(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            tx = _tx(store, commit_every=None)
            _, newer = _steps(tx, tx.init(PARAMS))
            state = tx.restore(PARAMS)
            assert (int(state.version), int(state.inner[0].count), _mu(store)) == (0, 0, 0.0)
            with pytest.raises(StoreError, match="newer"):
                tx.apply(_grads(), newer, PARAMS)
            _steps(tx, state, 1)

    def test_a_store_that_overwrites_refuses_to_go_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with make_store(tmp_path, durability="checkpoint") as store:
            tx = _tx(store)
            _, state = _steps(tx, tx.init(PARAMS), 1)
            _fail_at(monkeypatch, 3)
            with pytest.raises(OSError) as caught:
                tx.apply(_grads(), state, PARAMS)
            assert "mixture" in caught.value.__notes__[0]
            monkeypatch.undo()
            for again in (tx, _tx(store)):
                with pytest.raises(StoreError, match="overwrites in place"):
                    again.restore(PARAMS)
            with pytest.raises(StoreError, match=r"cannot commit: .* mixture"):
                store.commit()
            with pytest.raises(StoreError, match="mixture"):
                tx.apply(_grads(), state, PARAMS)

    def test_a_refused_one_leaves_a_whole_state_whole(self, tmp_path: Path) -> None:
        with make_store(tmp_path, durability="checkpoint") as store:
            tx = _tx(store, commit_every=None)
            params, state = _steps(tx, tx.init(PARAMS), 2)
            with pytest.raises(StoreError, match=r"cannot go back to version 0 .* version 2 that the last"):
                tx.restore(PARAMS)
            tx.commit(_steps(tx, state, 1, params)[1])
            assert int(tx.restore(PARAMS).version) == 3

    @pytest.mark.parametrize(
        "other", [optax.radam(1e-2), optax.adamw(1e-2), optax.lion(1e-2)], ids=["radam", "adamw", "lion"]
    )
    def test_another_transform_is_refused(self, other: Any, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            _tx(store).init(PARAMS)
            with pytest.raises(StoreError, match="of another transform"):
                _tx(store, other).restore(PARAMS)
            assert int(_tx(store, optax.adam(0.5, b1=0.8)).restore(PARAMS).version) == 0
            assert int(_tx(store, memascend_jax.adam(1e-3)).restore(PARAMS).version) == 0

    def test_a_subset_of_the_leaves_is_refused(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            _tx(store).init(PARAMS)
            with pytest.raises(StoreError, match="made for 2 leaves, these are 1"):
                _tx(store).restore({"a": PARAMS["a"]})

    def test_another_size_of_tiles_is_told(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            _tx(store).init(PARAMS)
            with pytest.raises(StoreError, match="made with tile_elements=4096, not 8192"):
                _tx(store, tile_elements=2 * TILE).restore(PARAMS)

    def test_a_schedule_may_take_other_numbers(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            _tx(store, optax.adam(optax.cosine_decay_schedule(1e-2, 10))).init(PARAMS)
            _tx(store, optax.adam(optax.linear_schedule(1e-3, 0.0, 99))).restore(PARAMS)

    def test_a_record_of_an_earlier_release_is_read(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            tx = _tx(store)
            _steps(tx, tx.init(PARAMS), 2)
            record = dict(store.records.committed[""])
            store.records.set("", {key: record[key] for key in ("version", "skipped", "values")})
            store.commit(b"old")
        with TensorStore.open(tmp_path, **ANY_DISK) as store:
            tx = _tx(store)
            state = tx.restore(PARAMS)
            assert (int(state.version), tx.run_state) == (2, b"old")
            _steps(tx, state, 1)
            _tx(store, overwrite=True).init(PARAMS)


class TestCommits:
    def test_each_takes_all_states_along(self, tmp_path: Path) -> None:
        store = TensorStore.create(tmp_path, capacity="16MiB", **ANY_DISK)
        one, two = _tx(store, name="a", commit_every=None), _tx(store, name="b")
        first, second = one.init(PARAMS), two.init(PARAMS)
        _, first = _steps(one, first, 2)
        _, second = _steps(two, second, 1)
        kept = _mu(store, "a/")
        _steps(one, first, 1)
        abandon(store)
        with TensorStore.open(tmp_path, **ANY_DISK) as store:
            state = _tx(store, name="a").restore(PARAMS)
            assert (int(state.version), int(state.inner[0].count), _mu(store, "a/")) == (2, 2, kept)

    def test_a_failed_step_goes_back_to_the_commit_of_another_state(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with make_store(tmp_path) as store:
            one, two = _tx(store, name="a", commit_every=None), _tx(store, name="b")
            _, first = _steps(one, one.init(PARAMS), 2)
            two.init(PARAMS)
            kept = _mu(store, "a/")
            _fail_at(monkeypatch, 3)
            with pytest.raises(OSError):
                one.apply(_grads(), first, PARAMS)
            monkeypatch.undo()
            assert (int(one.restore(PARAMS).version), _mu(store, "a/")) == (2, kept)
            _steps(one, first, 1)

    def test_a_plain_commit_keeps_the_states(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            tx = _tx(store, commit_every=None)
            _steps(tx, tx.init(PARAMS), 2)
            store.commit(b"step 2")
            assert (store.run_state, tx.run_state) == (b"step 2", b"step 2")
        with TensorStore.open(tmp_path, **ANY_DISK) as store:
            # Before anyone asks for the state, too.
            store.commit()
            assert int(_tx(store).restore(PARAMS).version) == 2

    def test_one_in_the_middle_of_an_update_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with make_store(tmp_path) as store:
            tx = _tx(store)
            state = tx.init(PARAMS)
            whole, refused = PieceUpdates.piece, []

            def commits(self: Any, piece: Any, lease: Any) -> None:
                for call in (
                    store.commit,
                    lambda: tx.commit(state),
                    lambda: tx.apply(_grads(), state, PARAMS),
                ):
                    with pytest.raises(StoreError) as caught:
                        call()
                    refused.append(str(caught.value))
                whole(self, piece, lease)

            monkeypatch.setattr(PieceUpdates, "piece", commits)
            tx.apply(_grads(), state, PARAMS)
            assert "under way" in refused[0] and "in use by another thread" in refused[1]
            store.commit()

    def test_threads_on_one_handle_make_one_step(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            tx = _tx(store)
            state = tx.init(PARAMS)
            found: list[Any] = []

            def step() -> None:
                try:
                    found.append(int(tx.apply(_grads(), state, PARAMS)[1].version))
                except StoreError as error:
                    found.append(str(error))

            threads = [threading.Thread(target=step) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert found.count(1) == 1
            assert all(entry == 1 or "another thread" in entry or "older" in entry for entry in found)


class TestOneState:
    def test_a_second_transform_notices_the_steps_of_the_first(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            one, two = _tx(store), _tx(store)
            first = one.init(PARAMS)
            second = two.restore(PARAMS)
            _, first = one.apply(_grads(), first, PARAMS)
            with pytest.raises(StoreError, match="version 0, older"):
                two.apply(_grads(), second, PARAMS)
            two.apply(_grads(), first, PARAMS)

    def test_a_handle_of_a_state_that_was_replaced_is_refused(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            one, two = _tx(store), _tx(store, overwrite=True)
            old = one.init(PARAMS)
            new = two.init(PARAMS)
            for tx, words in ((one, "was replaced"), (two, "another was made")):
                with pytest.raises(StoreError, match=words):
                    tx.apply(_grads(), old, PARAMS)
            two.apply(_grads(), new, PARAMS)

    def test_what_cannot_begin_leaves_the_good_state(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            tx = _tx(store)
            params, state = _steps(tx, tx.init(PARAMS))
            with pytest.raises(StoreError, match="has an optimizer state already"):
                tx.init(PARAMS)
            with pytest.raises(StoreError, match="of other parameters"):
                tx.restore({"a": PARAMS["a"]})
            assert int(_steps(tx, state, 1, params)[1].version) == 4


class TestOverwrite:
    def test_without_room_the_old_state_stays(self, tmp_path: Path) -> None:
        with TensorStore.create(tmp_path, capacity="512KiB", **ANY_DISK) as store:
            tx = _tx(store)
            _, state = _steps(tx, tx.init(PARAMS), 2)
            with pytest.raises(StoreError, match="no room"):
                _tx(store, overwrite=True).init({"a": np.ones(1 << 20, np.float32)})
            _steps(tx, state, 1)

    def test_tensors_that_are_not_the_states_own_are_kept(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            store.put("w#mu", np.ones(5, np.float32))
            with pytest.raises(StoreError, match="'w#mu' is there already and belongs to no"):
                _tx(store, overwrite=True).init({"w": np.ones(5, np.float32)})
            _tx(store, name="x").init({"w": np.ones(5, np.float32)})
            with pytest.raises(StoreError, match="is of the state called 'x'"):
                _tx(store, overwrite=True).init({"x": {"w": np.ones(5, np.float32)}})
            assert store.get("w#mu").sum() == 5

    def test_tensors_of_leaves_that_are_no_more_go(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            _tx(store).init(PARAMS)
            _tx(store, overwrite=True).init({"a": PARAMS["a"]})
            assert store.names() == ["a#mu", "a#nu"]

    def test_an_interruption_leaves_the_old_state(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with make_store(tmp_path) as store:
            tx = _tx(store)
            _, state = _steps(tx, tx.init(PARAMS), 1)
            kept = _mu(store)

            def fail(*args: Any) -> Any:
                raise KeyboardInterrupt

            monkeypatch.setattr(store, "commit", fail)
            with pytest.raises(KeyboardInterrupt):
                _tx(store, overwrite=True).init(PARAMS)
            monkeypatch.undo()
            assert _mu(store) == kept
            _steps(tx, state, 1)

    def test_a_failure_after_tensors_were_removed_is_undone_by_opening_the_store_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with make_store(tmp_path) as store:
            tx = _tx(store)
            _, state = _steps(tx, tx.init(PARAMS), 2)
            kept = _mu(store)

            def fail(*args: Any) -> Any:
                raise OSError

            monkeypatch.setattr("memascend_jax.optim.offload_engine.write_initial_state", fail)
            with pytest.raises(OSError):
                _tx(store, overwrite=True, tile_elements=2 * TILE).init(PARAMS)
            monkeypatch.undo()
            with pytest.raises(StoreError):
                tx.apply(_grads(), state, PARAMS)
            with pytest.raises(StoreError, match="cannot commit"):
                store.commit()
        with TensorStore.open(tmp_path, **ANY_DISK) as store:
            tx = _tx(store)
            state = tx.restore(PARAMS)
            assert (int(state.version), _mu(store)) == (2, kept)
            _steps(tx, state, 1)


class TestFailures:
    def test_an_interrupted_undo_is_not_taken_for_a_whole_state(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with make_store(tmp_path) as store:
            tx = _tx(store)
            state = tx.init(PARAMS)

            def interrupted(names: Any) -> None:
                raise KeyboardInterrupt

            _fail_at(monkeypatch, 3)
            monkeypatch.setattr(store, "rollback", interrupted)
            with pytest.raises(KeyboardInterrupt):
                tx.apply(_grads(), state, PARAMS)
            monkeypatch.undo()
            with pytest.raises(StoreError, match="mixture"):
                tx.apply(_grads(), state, PARAMS)
            with pytest.raises(StoreError, match="mixture"):
                store.commit()
            state = tx.restore(PARAMS)
            assert _mu(store) == 0.0
            _steps(tx, state, 1)

    def test_bad_arguments_cost_no_steps(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            tx = _tx(store, commit_every=5, nonfinite="keep")
            params, state = _steps(tx, tx.init(PARAMS))
            gone = jnp.ones(70)
            gone.delete()
            for grads, given, words in (
                (_grads(), {**params, "b": gone}, "the parameter 'b' was deleted"),
                ({**_grads(), "b": gone}, params, "the gradient 'b' was deleted"),
                ({**_grads(), "b": "text"}, params, "gradients: 'b' is the text"),
            ):
                with pytest.raises(ConfigError, match=words):
                    tx.apply(grads, state, given)
            assert int(_steps(tx, state, 1, params)[1].version) == 4

    @pytest.mark.parametrize("durability", ["step", "checkpoint"])
    def test_bad_parameters_cost_no_steps(self, durability: str, tmp_path: Path) -> None:
        bad = PARAMS["b"].copy()
        bad[69] = np.inf
        with make_store(tmp_path, durability=durability) as store:
            tx = _tx(store, commit_every=5)
            params, state = _steps(tx, tx.init(PARAMS))
            with pytest.raises(NonfiniteError, match="parameter 'b' is inf or nan before update 4; nothing"):
                tx.apply(_grads(), state, {**params, "b": bad})
            assert int(_steps(tx, state, 1, params)[1].version) == 4

    def test_a_number_that_is_bad_everywhere_is_found_before_anything_is_written(
        self, tmp_path: Path
    ) -> None:
        base = optax.inject_hyperparams(optax.sgd)(1e-2, momentum=0.9)
        with make_store(tmp_path) as store:
            tx = _tx(store, base, commit_every=5)
            params, state = _steps(tx, tx.init(PARAMS))
            state.inner.hyperparams["learning_rate"] = jnp.float32(np.inf)
            with pytest.raises(NonfiniteError, match="learning rate"):
                tx.apply(_grads(), state, params)
            state.inner.hyperparams["learning_rate"] = jnp.float32(1e-2)
            assert int(_steps(tx, state, 1, params)[1].version) == 4

    def test_steps_that_are_lost_are_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with make_store(tmp_path) as store:
            tx = _tx(store, commit_every=5)
            _, state = _steps(tx, tx.init(PARAMS))
            _fail_at(monkeypatch, 3)
            with pytest.raises(OSError) as caught:
                tx.apply(_grads(), state, PARAMS)
            assert "version 0: with this update 3 before it were undone" in caught.value.__notes__[0]

    @pytest.mark.parametrize("base", [BASE, memascend_jax.adam(1e-2)], ids=["generic", "fused"])
    @pytest.mark.parametrize("index", [0, 1, 2 * TILE + 5])
    def test_a_parameter_that_is_not_finite_is_named(self, base: Any, index: int, tmp_path: Path) -> None:
        params = {**PARAMS, "a": PARAMS["a"].copy()}
        params["a"][index] = np.nan
        with make_store(tmp_path) as store:
            tx = _tx(store, base)
            with pytest.raises(NonfiniteError, match=f"the parameter 'a' is nan at its element {index:,}"):
                tx.apply(_grads(), tx.init(params), params)

    def test_a_closed_store_says_so(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            tx = _tx(store)
            state = tx.init(PARAMS)
        for call in (lambda: tx.apply(_grads(), state, PARAMS), lambda: tx.init(PARAMS)):
            with pytest.raises(StoreError, match="is closed"):
                call()
        with pytest.raises(ConfigError, match="is closed"):
            _tx(store)


def test_names_are_those_of_init(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        for name in ("w1", "w2"):
            store.put(name, np.ones(70, np.float32))
        names, arrays = {"a": "w1", "b": "w2"}, {"a": np.ones(70, np.float32), "b": np.ones(70, np.float32)}
        with pytest.raises(ConfigError, match="'b' is the tensor 'w1' of the store, and so is 'a'"):
            _tx(store).init({"a": "w1", "b": "w1"})
        tx = _tx(store)
        state = tx.init(names)
        for given, words in (
            (arrays, "'a' is an array, but the state was made with the tensor 'w1'"),
            ({"a": "w2", "b": "w1"}, "'a' is the tensor 'w2', but"),
        ):
            with pytest.raises(ConfigError, match=words):
                tx.apply(arrays, state, given)
        with pytest.raises(StoreError, match="its parameter 'a' is the tensor 'w1', not 'w2'"):
            _tx(store).restore({"a": "w2", "b": "w1"})
        tx.apply(arrays, state, names)
        other = _tx(store, name="other")
        with pytest.raises(ConfigError, match="but the state was made with an array"):
            other.apply(arrays, other.init(arrays), names)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("dtypes", [("bfloat16",) * 2, ("float16",) * 2, ("float32", "bfloat16")])
def test_clip_norm_takes_gradients_of_any_type(name: str, dtypes: tuple[str, str], tmp_path: Path) -> None:
    # A small eps is zero in float16, where small gradients then give inf, in optax too.
    base = optax.adamw(1e-2, eps=1e-3) if name == "adamw" else optax.sgd(1e-2)
    params = {key: jnp.linspace(-1, 1, 60).astype(dtype) for key, dtype in zip("ab", dtypes, strict=True)}
    with make_store(tmp_path) as store:
        tx = _tx(store, base, clip_norm=0.5)
        new, _ = tx.apply(params, tx.init(params), params)
    plain = optax.chain(optax.clip_by_global_norm(0.5), base)
    updates, _ = jax.jit(plain.update)(params, plain.init(params), params)
    # optax sums the norm in the gradients' type, which is coarse.
    assert_close(new, optax.apply_updates(params, updates), 0.02)
    assert jax.tree.map(lambda leaf: leaf.dtype, new) == jax.tree.map(lambda leaf: leaf.dtype, params)


def test_a_count_at_its_limit_stays_there_as_in_optax(tmp_path: Path) -> None:
    limit = np.iinfo(np.int32).max
    found = []
    with make_store(tmp_path) as store:
        for name, base in (("generic", BASE), ("fused", memascend_jax.adam(1e-2))):
            tx = _tx(store, base, name=name)
            state = tx.init(PARAMS)
            inner = (state.inner[0]._replace(count=jnp.int32(limit)), *state.inner[1:])
            new, state = tx.apply(_grads(), replace(state, inner=inner), PARAMS)
            assert int(state.inner[0].count) == limit
            found.append(new)
    assert_close(*found, 1e-6)
