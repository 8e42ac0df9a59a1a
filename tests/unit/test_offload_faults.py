# SPDX-License-Identifier: Apache-2.0
"""Steps of an offloaded transform are atomic, handles go with one store and version, and bad input is told by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from offloading import TILE, PerLeaf, assert_same_bits, make_grads, make_params, make_store
from stores import ANY_DISK, abandon

import memascend_jax
from memascend_jax import PinnedArena, TensorStore
from memascend_jax.errors import ConfigError, NonfiniteError, RunError, StoreError
from memascend_jax.optim.offload import CouplingError, offload
from memascend_jax.optim.offload_update import PieceUpdates

BASE = optax.adamw(1e-2)


def _kept(store: TensorStore) -> dict[str, np.ndarray]:
    return {name: store.get(name) for name in store.names()}


def _same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


class TestAtomic:
    @pytest.mark.parametrize("module", [optax, memascend_jax], ids=["generic", "fused"])
    def test_a_step_that_fails_half_way_changes_nothing(
        self, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        params = make_params()
        with make_store(tmp_path) as store:
            tx = offload(module.adamw(1e-2), store=store, tile_elements=TILE)
            params, state = tx.apply(make_grads(params, 0), tx.init(params), params)
            before = _kept(store)
            whole, calls = PieceUpdates.piece, []

            def fail_later(self: Any, piece: Any, lease: Any) -> None:
                calls.append(piece)
                if len(calls) == 4:
                    raise KeyboardInterrupt
                whole(self, piece, lease)

            monkeypatch.setattr(PieceUpdates, "piece", fail_later)
            with pytest.raises(KeyboardInterrupt):
                tx.apply(make_grads(params, 1), state, params)
            monkeypatch.undo()
            assert _same(_kept(store), before)
            # The old handle is still good, and the step gives what it would have given.
            new, state = tx.apply(make_grads(params, 1), state, params)
            assert int(state.version) == 2
        reference = PerLeaf(BASE, make_params(), applies=True)
        if module is optax:
            expected = reference.step(make_grads(params, 0), make_params())
            assert_same_bits(new, reference.step(make_grads(params, 1), expected))

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_commit_that_fails_leaves_the_version_that_is_on_disk(
        self, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        params = make_params()
        with make_store(tmp_path) as store:
            tx = offload(BASE, store=store, tile_elements=TILE)
            state = tx.init(params)
            before = _kept(store)
            commit = store.commit

            def fail(run_state: bytes = b"") -> int:
                if when == "after":
                    commit(run_state)
                raise KeyboardInterrupt

            monkeypatch.setattr(store, "commit", fail)
            with pytest.raises(KeyboardInterrupt):
                tx.update(make_grads(params, 0), state, params)
            monkeypatch.undo()
            if when == "before":
                assert _same(_kept(store), before)
                tx.update(make_grads(params, 0), state, params)
            else:
                with pytest.raises(StoreError, match="version 0, older"):
                    tx.update(make_grads(params, 0), state, params)
                assert int(tx.restore(params).version) == 1

    def test_a_crash_leaves_the_last_commit(self, tmp_path: Path) -> None:
        params = make_params()
        store = TensorStore.create(tmp_path, capacity="64MiB", **ANY_DISK)
        tx = offload(BASE, store=store, tile_elements=TILE, commit_every=2)
        state = tx.init(params)
        history = [params]
        for step in range(3):
            params, state = tx.apply(make_grads(params, step), state, params)
            history.append(params)
        abandon(store)
        with TensorStore.open(tmp_path, **ANY_DISK) as store:
            tx = offload(BASE, store=store, tile_elements=TILE)
            state = tx.restore(params)
            assert int(state.version) == 2
            again, state = tx.apply(make_grads(params, 2), state, history[2])
            assert_same_bits(again, history[3])

    def test_restored_numbers_are_exact(self, tmp_path: Path) -> None:
        base = optax.chain(
            optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.0, 7)),
            optax.add_noise(0.1, 0.5, key=jax.random.key(3)),
        )
        params = make_params()
        with make_store(tmp_path) as store:
            tx = offload(base, store=store, tile_elements=TILE)
            state = tx.init(params)
            for step in range(3):
                params, state = tx.apply(make_grads(params, step), state, params)
            expected, _ = tx.apply(make_grads(params, 3), state, params)
            store.rollback(store.names())
        with TensorStore.open(tmp_path, **ANY_DISK) as store:
            tx = offload(base, store=store, tile_elements=TILE)
            state = tx.restore(params)
            assert int(state.version) == 4
            assert int(state.inner[0].count) == 4
            assert np.isfinite(np.asarray(expected["scale"]))

    def test_commit_on_request_keeps_the_users_bytes(self, tmp_path: Path) -> None:
        params = make_params()
        with make_store(tmp_path) as store:
            tx = offload(BASE, store=store, tile_elements=TILE, commit_every=None)
            params, state = tx.apply(make_grads(params, 0), tx.init(params), params)
            generation = store.generation
            tx.commit(state, b"epoch 1")
            assert store.generation == generation + 1
            params, state = tx.apply(make_grads(params, 1), state, params)
            tx.commit(state)
        with TensorStore.open(tmp_path, **ANY_DISK) as store:
            tx = offload(BASE, store=store, tile_elements=TILE)
            assert int(tx.restore(params).version) == 2
            assert tx.run_state == b"epoch 1"

    def test_two_states_share_a_store(self, tmp_path: Path) -> None:
        params = make_params()
        with make_store(tmp_path) as store:
            one = offload(BASE, store=store, tile_elements=TILE, name="generator")
            two = offload(optax.lion(1e-3), store=store, tile_elements=TILE, name="critic")
            _, first = one.apply(make_grads(params, 0), one.init(params), params)
            second = two.init(params)
            for step in range(2):
                _, second = two.apply(make_grads(params, step), second, params)
            assert "generator/layer/kernel#mu" in store.names()
            with pytest.raises(StoreError, match="called 'generator', not 'critic'"):
                two.update(make_grads(params, 0), first, params)
        with TensorStore.open(tmp_path, **ANY_DISK) as store:
            versions = [
                int(offload(base, store=store, tile_elements=TILE, name=name).restore(params).version)
                for base, name in ((BASE, "generator"), (optax.lion(1e-3), "critic"))
            ]
            assert versions == [1, 2]

    def test_a_store_that_overwrites_in_place_cannot_undo_and_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        params = make_params()
        with make_store(tmp_path, durability="checkpoint") as store:
            tx = offload(BASE, store=store, tile_elements=TILE)
            state = tx.init(params)
            whole, calls = PieceUpdates.piece, []

            def fail_later(self: Any, piece: Any, lease: Any) -> None:
                calls.append(piece)
                if len(calls) == 3:
                    raise ZeroDivisionError
                whole(self, piece, lease)

            monkeypatch.setattr(PieceUpdates, "piece", fail_later)
            with pytest.raises(ZeroDivisionError) as caught:
                tx.apply(make_grads(params, 0), state, params)
            monkeypatch.undo()
            assert "mixture of two steps" in caught.value.__notes__[0]
            with pytest.raises(StoreError, match="mixture"):
                tx.apply(make_grads(params, 0), state, params)


class TestHandles:
    def test_one_of_another_store_is_refused(self, tmp_path: Path) -> None:
        params = make_params()
        with make_store(tmp_path / "a") as one, make_store(tmp_path / "b") as two:
            state = offload(BASE, store=one).init(params)
            tx = offload(BASE, store=two)
            tx.init(params)
            with pytest.raises(StoreError, match=re.escape(f"belongs to store '{one.paths[0]}'")):
                tx.update(make_grads(params, 0), state, params)

    def test_an_older_one_is_refused(self, tmp_path: Path) -> None:
        params = make_params()
        with make_store(tmp_path) as store:
            tx = offload(BASE, store=store)
            old = tx.init(params)
            _, state = tx.update(make_grads(params, 0), old, params)
            with pytest.raises(StoreError, match=r"is of version 0, older than that in store .* version 1"):
                tx.update(make_grads(params, 0), old, params)
            with pytest.raises(StoreError, match="older"):
                old.state_of("scale")
            tx.update(make_grads(params, 0), state, params)

    def test_one_of_another_transform_is_refused(self, tmp_path: Path) -> None:
        params = make_params()
        with make_store(tmp_path) as store:
            state = offload(optax.lion(1e-3), store=store).init(params)
            tx = offload(BASE, store=store, name="other")
            home = tx.init(params).home
            with pytest.raises(StoreError, match="called '', not 'other'"):
                tx.update(make_grads(params, 0), state, params)
            wrong = replace(state, home=home)
            with pytest.raises(StoreError, match="of another transform or of other parameters"):
                tx.update(make_grads(params, 0), wrong, params)
            with pytest.raises(StoreError, match="is a tuple, not what init"):
                tx.update(make_grads(params, 0), BASE.init(params), params)

    def test_a_state_that_is_there_is_not_overwritten_unasked(self, tmp_path: Path) -> None:
        params = make_params()
        with make_store(tmp_path) as store:
            tx = offload(BASE, store=store)
            tx.update(make_grads(params, 0), tx.init(params), params)
            kept = _kept(store)
            with pytest.raises(
                StoreError, match=r"has an optimizer state already \('layer/bias#mu' and 3 more\)"
            ):
                offload(BASE, store=store).init(params)
            assert _same(_kept(store), kept)
            with pytest.raises(StoreError, match="another transform"):
                offload(optax.adamax(1e-3, b1=0.5), store=store, tile_elements=TILE).restore(params)
            again = offload(BASE, store=store, overwrite=True)
            assert int(again.init(params).version) == 0
            assert not store.get("layer/kernel#mu").any()

    def test_restore_needs_a_state(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store, pytest.raises(StoreError, match="no offloaded state called ''"):
            offload(BASE, store=store).restore(make_params())

    def test_a_full_store_is_found_by_init_which_leaves_nothing(self, tmp_path: Path) -> None:
        with TensorStore.create(tmp_path, capacity="128KiB", **ANY_DISK) as store:
            with pytest.raises(StoreError, match="no room for tensor"):
                offload(BASE, store=store).init(make_params())
            assert store.names() == []

    def test_before_init(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store, pytest.raises(StoreError, match="no state yet"):
            offload(BASE, store=store).update(make_params(), None, make_params())


class TestJit:
    def test_init_and_update_inside_jit_say_what_to_do(self, tmp_path: Path) -> None:
        params = make_params()
        with make_store(tmp_path) as store:
            tx = offload(BASE, store=store)
            with pytest.raises(RunError, match=r"called inside jax\.jit"):
                jax.jit(tx.init)(params)
            state = tx.init(params)
            with pytest.raises(RunError, match="gradients given to an offloaded optimizer are traced"):
                jax.jit(tx.update)(make_grads(params, 0), state, params)
            with pytest.raises(RunError, match="jit what computes loss and gradients"):
                jax.grad(lambda p: jnp.sum(tx.update(p, state, p)[0]["scale"]))(params)
            tx.update(make_grads(params, 0), state, params)


class TestGradients:
    def _grads(self, bad: float) -> Any:
        grads = make_grads(make_params(), 0)
        kernel = np.array(grads["layer"]["kernel"])
        kernel[77, 3] = bad
        return {**grads, "layer": {**grads["layer"], "kernel": jnp.asarray(kernel)}}

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_one_that_is_not_finite_is_named_and_nothing_changes(self, bad: float, tmp_path: Path) -> None:
        params = make_params()
        with make_store(tmp_path) as store:
            tx = offload(BASE, store=store, tile_elements=TILE)
            state = tx.init(params)
            before = _kept(store)
            with pytest.raises(NonfiniteError, match="gradient of 'layer/kernel' is inf or nan at update 1"):
                tx.update(self._grads(bad), state, params)
            assert _same(_kept(store), before)
            tx.update(make_grads(params, 0), state, params)

    def test_skip(self, tmp_path: Path) -> None:
        params = make_params()
        with make_store(tmp_path) as store:
            tx = offload(BASE, store=store, tile_elements=TILE, nonfinite="skip", clip_norm=1.0)
            state = tx.init(params)
            before = _kept(store)
            new, state = tx.apply(self._grads(np.nan), state, params)
            assert_same_bits(new, params)
            updates, state = tx.update(self._grads(np.inf), state, params)
            assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(updates))
            assert _same(_kept(store), before)
            assert (int(state.version), int(state.skipped)) == (0, 2)
            _, state = tx.update(make_grads(params, 0), state, params)
            assert (int(state.version), int(state.inner[0].count)) == (1, 1)

    def test_keep_is_what_optax_does(self, tmp_path: Path) -> None:
        params = make_params()
        with make_store(tmp_path) as store:
            tx = offload(BASE, store=store, tile_elements=TILE, nonfinite="keep")
            new, _ = tx.apply(self._grads(np.nan), tx.init(params), params)
        assert_same_bits(new, PerLeaf(BASE, params, applies=True).step(self._grads(np.nan), params))

    @pytest.mark.parametrize(
        "base",
        [
            optax.adamw(lambda count: jnp.where(count < 2, 1e-3, jnp.nan)),
            memascend_jax.adamw(lambda count: jnp.where(count < 2, 1e-3, jnp.nan)),
            optax.inject_hyperparams(optax.adamw)(lambda count: jnp.where(count < 2, 1e-3, jnp.nan)),
        ],
        ids=["generic", "fused", "injected"],
    )
    def test_a_schedule_that_returns_nan_is_told_and_nothing_changes(self, base: Any, tmp_path: Path) -> None:
        params = make_params()
        with make_store(tmp_path) as store:
            tx = offload(base, store=store, tile_elements=TILE)
            state = tx.init(params)
            for step in range(2):
                params, state = tx.apply(make_grads(params, step), state, params)
            before = _kept(store)
            with pytest.raises(NonfiniteError, match=r"schedule|learning_rate"):
                tx.apply(make_grads(params, 2), state, params)
            assert _same(_kept(store), before)
            assert int(tx.restore(params).version) == 2


class TestParameters:
    def _tx(self, store: TensorStore) -> tuple[Any, Any]:
        tx = offload(BASE, store=store)
        return tx, tx.init(make_params())

    def test_others_than_at_init_are_named(self, tmp_path: Path) -> None:
        params = make_params()
        with make_store(tmp_path) as store:
            tx, state = self._tx(store)
            fewer = {"layer": params["layer"]}
            with pytest.raises(ConfigError, match=r"the gradients are not the 3 leaves .* without 'scale'"):
                tx.update(fewer, state, params)
            renamed = {
                "layer": {"kernal": params["layer"]["kernel"], "bias": params["layer"]["bias"]},
                "scale": 1.0,
            }
            with pytest.raises(ConfigError, match=r"with 'layer/kernal' \(was it 'layer/kernel'\?\)"):
                tx.update(renamed, state, params)
            reshaped = {**params, "scale": jnp.ones(2)}
            with pytest.raises(
                ConfigError, match=r"parameters: 'scale' is float32\[2\].*made for float32\[\]"
            ):
                tx.update(params, state, reshaped)
            narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
            with pytest.raises(ConfigError, match=r"gradients: 'layer/bias' is bfloat16\[70\]"):
                tx.update(narrow, state, params)
            with pytest.raises(ConfigError, match="needs the parameters"):
                tx.update(params, state)
            tx.update(params, state, params)

    def test_an_empty_tree_is_refused(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store, pytest.raises(ConfigError, match="no parameters to optimize"):
            offload(BASE, store=store).init({})

    def test_zero_size_and_scalar_leaves(self, tmp_path: Path) -> None:
        params = {
            "none": jnp.zeros((0, 4)),
            "one": jnp.float32(2.0),
            "single": jnp.ones((1, 1)),
            "two": jnp.ones(2),
        }
        for name, base in (("generic", BASE), ("fused", memascend_jax.adamw(1e-2))):
            with make_store(tmp_path / name) as store:
                tx = offload(base, store=store)
                state = tx.init(params)
                assert sorted(store.names()) == ["two#mu", "two#nu"]
                reference = PerLeaf(BASE, params)
                for step in range(3):
                    grads = make_grads(params, step)
                    updates, state = tx.update(grads, state, params)
                    if base is BASE:
                        assert_same_bits(updates, reference.step(grads, params))
                    assert updates["none"].shape == (0, 4)

    def test_integer_leaves_are_refused_unless_frozen(self, tmp_path: Path) -> None:
        params = {"w": jnp.ones(4), "ids": jnp.arange(4)}
        with make_store(tmp_path) as store:
            with pytest.raises(ConfigError, match="parameter 'ids' is int32: only floating-point leaves"):
                offload(BASE, store=store).init(params)
            assert store.names() == []
            frozen = optax.partition(
                {"train": optax.adam(1e-2), "freeze": optax.set_to_zero()}, {"w": "train", "ids": "freeze"}
            )
            tx = offload(frozen, store=store)
            # What jax.grad(..., allow_int=True) gives for integers.
            grads = {"w": jnp.ones(4), "ids": np.zeros(4, jax.dtypes.float0)}
            new, _ = tx.apply(grads, tx.init(params), params)
            assert new["ids"] is params["ids"]

    def test_what_is_no_array_is_refused(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            with pytest.raises(ConfigError, match="parameter 'w' is of type object"):
                offload(BASE, store=store).init({"w": object()})
            with pytest.raises(StoreError, match="no tensor 'nowhere'"):
                offload(BASE, store=store).init({"w": "nowhere"})


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"clip_norm": 0.0}, "clip_norm must be a positive number, got 0.0"),
            ({"clip_norm": -1.0}, "clip_norm must be a positive number"),
            ({"clip_norm": float("nan")}, "clip_norm must be a positive number"),
            ({"nonfinite": "ignore"}, "nonfinite must be"),
            ({"commit_every": 0}, "commit_every must be at least 1"),
            ({"tile_elements": 1000}, "tile_elements must be a multiple of 4,096"),
            ({"extra_args": {"value_fn": len}}, "extra argument 'value_fn' of the update is no number"),
        ],
    )
    def test_bad_ones_are_refused(self, arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
        with make_store(tmp_path) as store, pytest.raises(ConfigError, match=words):
            offload(BASE, store=store, **arguments)

    def test_what_is_no_transform_or_store(self, tmp_path: Path) -> None:
        with make_store(tmp_path) as store, pytest.raises(ConfigError, match="takes an optax transform"):
            offload(0.1, store=store)
        with pytest.raises(ConfigError, match="store must be an open TensorStore"):
            offload(BASE, store=str(tmp_path))
        with (
            TensorStore.open(tmp_path, read_only=True, **ANY_DISK) as store,
            pytest.raises(ConfigError, match="read-only"),
        ):
            offload(BASE, store=store)

    def test_an_arena_lends_the_slots_or_says_what_they_need(self, tmp_path: Path) -> None:
        params = make_params()
        arena = PinnedArena(1 << 20, pin="none")
        with make_store(tmp_path, arena=arena, bounce_bytes=128 << 10) as store:
            used = arena.in_use_bytes
            with offload(BASE, store=store, arena=arena, tile_elements=TILE) as tx:
                tx.update(make_grads(params, 0), tx.init(params), params)
                assert arena.in_use_bytes - used == tx.host_bytes == 2 * 2 * 4 * TILE
            assert arena.in_use_bytes == used
            small = PinnedArena(4096, pin="none")
            with pytest.raises(
                ConfigError, match=r"no room for the slots of the optimizer state, 64\.00 KiB"
            ):
                offload(BASE, store=store, arena=small, tile_elements=TILE, name="small").init(params)


class TestCoupling:
    @pytest.mark.parametrize(
        ("base", "culprit", "remedy"),
        [
            (
                optax.chain(optax.clip_by_global_norm(1.0), BASE),
                "clip_by_global_norm",
                "pass clip_norm= to offload",
            ),
            (optax.apply_if_finite(BASE, 3), "apply_if_finite", 'nonfinite="skip"'),
            (
                optax.masked(optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0)), lambda p: True),
                "clip_by_global_norm",
                "clip_norm=",
            ),
            (
                optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), BASE), 2),
                "clip_by_global_norm",
                "clip_norm=",
            ),
        ],
    )
    def test_it_is_found_inside_wrappers_at_construction(
        self, base: Any, culprit: str, remedy: str, tmp_path: Path
    ) -> None:
        with make_store(tmp_path) as store, pytest.raises(CouplingError, match=re.escape(remedy)) as caught:
            offload(base, store=store)
        assert caught.value.culprit == culprit

    def test_a_transform_of_the_users_own(self, tmp_path: Path) -> None:
        def by_largest() -> Any:
            def update(updates: Any, state: Any, params: Any = None) -> Any:
                largest = jnp.max(jnp.stack([jnp.abs(leaf).max() for leaf in jax.tree.leaves(updates)]))
                return jax.tree.map(lambda leaf: leaf / largest, updates), state

            return optax.GradientTransformation(lambda _: optax.EmptyState(), update)

        with make_store(tmp_path) as store, pytest.raises(CouplingError, match="by_largest couples leaves"):
            offload(by_largest(), store=store)

    def test_labels_for_one_pytree_are_checked_by_init(self, tmp_path: Path) -> None:
        labels = {"layer": {"kernel": "a", "bias": "a"}, "scale": "b"}
        clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
        with make_store(tmp_path) as store:
            tx = offload(optax.partition({"a": clipped, "b": optax.sgd(0.1)}, labels), store=store)
            with pytest.raises(CouplingError, match="the update of 'layer/bias' depends on 'layer/kernel'"):
                tx.init(make_params())
            # A group of one leaf couples nothing.
            alone = optax.partition({"a": optax.sgd(0.1), "b": clipped}, labels)
            state = offload(alone, store=store).init(make_params())
            assert int(state.version) == 0


def test_rollback_is_of_the_named_tensors_alone(tmp_path: Path) -> None:
    values = np.arange(10, dtype=np.float32)
    with make_store(tmp_path) as store:
        for name in ("a", "b"):
            store.put(name, values)
        store.commit()
        for name in ("a", "b"):
            store.put(name, values + 1)
        store.put("new", values)
        store.rollback(["a"])
        np.testing.assert_array_equal(store.get("a"), values)
        np.testing.assert_array_equal(store.get("b"), values + 1)
        with pytest.raises(StoreError, match="cannot roll tensor 'new' back: no generation has it"):
            store.rollback(["new"])
        store.put("a", values + 2)
        store.commit()
    with TensorStore.open(tmp_path, **ANY_DISK) as store:
        np.testing.assert_array_equal(store.get("a"), values + 2)
        store.put("a", values + 3)
        store.rollback(["a"])
        np.testing.assert_array_equal(store.get("a"), values + 2)
        assert not store.verify().faults
