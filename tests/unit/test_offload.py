# SPDX-License-Identifier: Apache-2.0
"""The offloaded transform where users put it: their own loop, Flax, wrappers of optax, arrays of any kind."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from offloading import TILE, PerLeaf, assert_close, assert_same_bits, make_grads, make_params, make_store

import memascend_jax
from memascend_jax.optim.offload import offload

STEPS = 20
#: One program over many leaves rounds otherwise than one for each, by a unit in the last place of the parameter a step.
TOLERANCE = 1e-6


def _compare(
    base: Any, folder: Path, params: Any = None, *, tolerance: float | None = None, **options: Any
) -> str:
    """Steps ``base`` offloaded and plain, the same bits on each leaf, or to a tolerance; returns how it was done."""
    params = expected = make_params() if params is None else params
    reference = PerLeaf(base, params) if tolerance is None else None
    whole = base.init(params)
    with (
        make_store(folder) as store,
        offload(base, store=store, **{"tile_elements": TILE, **options}) as tx,
    ):
        state = tx.init(params)
        for step in range(STEPS):
            grads = make_grads(params, step)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            if reference is not None:
                assert_same_bits(updates, reference.step(grads, expected))
                expected = optax.apply_updates(expected, updates)
            else:
                wanted, whole = jax.jit(base.update)(grads, whole, expected)
                expected = optax.apply_updates(expected, wanted)
                assert_close(params, expected, tolerance or 0.0)
        return tx.describe()


class TestWrappers:
    def test_multi_steps(self, tmp_path: Path) -> None:
        base = optax.MultiSteps(optax.adamw(1e-3), 3).gradient_transformation()
        assert "2 leaves in tiles" in _compare(base, tmp_path)

    def test_multi_steps_object(self, tmp_path: Path) -> None:
        _compare(optax.MultiSteps(optax.sgd(1e-2, momentum=0.9), 2), tmp_path)

    def test_inject_hyperparams_follows_what_the_user_sets(self, tmp_path: Path) -> None:
        base = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2)
        params = make_params()
        reference, plain = params, base.init(params)
        with make_store(tmp_path) as store, offload(base, store=store, tile_elements=TILE) as tx:
            state = tx.init(params)
            for step in range(6):
                rate = 1e-2 / (step + 1)
                state.inner.hyperparams["learning_rate"] = jnp.asarray(rate)
                plain.hyperparams["learning_rate"] = jnp.asarray(rate)
                grads = make_grads(params, step)
                params, state = tx.apply(grads, state, params)
                updates, plain = jax.jit(base.update)(grads, plain, reference)
                reference = optax.apply_updates(reference, updates)
                assert_close(params, reference, TOLERANCE)
            assert float(state.inner.hyperparams["learning_rate"]) == pytest.approx(rate)

    def test_inject_hyperparams_with_a_schedule(self, tmp_path: Path) -> None:
        base = optax.inject_hyperparams(optax.adamw)(learning_rate=optax.cosine_decay_schedule(1e-2, 15))
        _compare(base, tmp_path, tolerance=TOLERANCE)

    def test_masked_sees_the_real_paths(self, tmp_path: Path) -> None:
        mask = {"layer": {"kernel": True, "bias": False}, "scale": False}
        described = _compare(
            optax.chain(optax.masked(optax.trace(0.9), mask), optax.scale(-0.1)),
            tmp_path,
            tolerance=TOLERANCE,
        )
        assert "1 frozen" not in described

    def test_partition_by_path(self, tmp_path: Path) -> None:
        def labels(params: Any) -> Any:
            return jax.tree_util.tree_map_with_path(
                lambda path, _: "adam" if "kernel" in jax.tree_util.keystr(path) else "sgd", params
            )

        base = optax.partition({"adam": optax.adam(1e-2), "sgd": optax.sgd(1e-1, momentum=0.9)}, labels)
        _compare(base, tmp_path, tolerance=TOLERANCE)

    def test_mask_by_number_of_axes(self, tmp_path: Path) -> None:
        base = optax.adamw(
            1e-2, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)
        )
        assert "2 leaves in tiles" in _compare(base, tmp_path)

    def test_schedule_and_chain(self, tmp_path: Path) -> None:
        schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 20)
        base = optax.chain(optax.clip(0.1), optax.scale_by_adam(), optax.scale_by_learning_rate(schedule))
        assert "2 leaves in tiles" in _compare(base, tmp_path)

    def test_bfloat16_parameters(self, tmp_path: Path) -> None:
        _compare(optax.adamw(1e-2), tmp_path, make_params(dtype=jnp.bfloat16))

    def test_moments_of_another_type(self, tmp_path: Path) -> None:
        _compare(optax.adamw(1e-2, mu_dtype=jnp.bfloat16), tmp_path)

    def test_whole_leaves_larger_than_a_tile(self, tmp_path: Path) -> None:
        params = {"a": jnp.ones((200, 150)), "b": jnp.ones((64, 80)), "c": jnp.full((40,), 2.0)}
        described = _compare(optax.contrib.muon(1e-2), tmp_path, params)
        assert "2 whole" in described


@pytest.mark.parametrize("module", [optax, memascend_jax], ids=["generic", "fused"])
def test_clip_norm_is_that_of_optax_over_what_is_not_frozen(module: Any, tmp_path: Path) -> None:
    params = make_params()
    base = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))
    reference, expected = base.init(params), params
    with make_store(tmp_path) as store:
        tx = offload(module.adamw(1e-3), store=store, tile_elements=TILE, clip_norm=0.5)
        state = tx.init(params)
        for step in range(STEPS):
            # Some are shorter than the limit.
            grads = make_grads(params, step, size=0.1 if step % 3 else 1e-4)
            params, state = tx.apply(grads, state, params)
            updates, reference = jax.jit(base.update)(grads, reference, expected)
            expected = optax.apply_updates(expected, updates)
            assert_close(params, expected, TOLERANCE)


def test_frozen_leaves_are_outside_the_norm(tmp_path: Path) -> None:
    params = {"live": jnp.ones(10), "still": jnp.ones(1000)}
    base = optax.partition(
        {"live": optax.sgd(1.0), "still": optax.set_to_zero()}, {"live": "live", "still": "still"}
    )
    with make_store(tmp_path) as store, offload(base, store=store, clip_norm=1.0) as tx:
        state = tx.init(params)
        grads = {"live": jnp.full(10, 0.1), "still": jnp.full(1000, 1e6)}
        params, state = tx.apply(grads, state, params)
    np.testing.assert_array_equal(np.asarray(params["live"]), np.float32(1) - np.full(10, 0.1, np.float32))


class TestFrozen:
    def _base(self) -> Any:
        labels = {"layer": {"kernel": "train", "bias": "freeze"}, "scale": "freeze"}
        return optax.partition({"train": optax.adam(1e-2), "freeze": optax.set_to_zero()}, labels)

    def test_they_cost_no_state_and_no_write(self, tmp_path: Path) -> None:
        params = make_params()
        with make_store(tmp_path) as store, offload(self._base(), store=store, tile_elements=TILE) as tx:
            state = tx.init(params)
            assert sorted(store.names()) == ["layer/kernel#mu", "layer/kernel#nu"]
            new, state = tx.apply(make_grads(params, 0), state, params)
            assert new["layer"]["bias"] is params["layer"]["bias"]
            assert not np.array_equal(new["layer"]["kernel"], params["layer"]["kernel"])
            updates, state = tx.update(make_grads(params, 1), state, params)
            assert not np.asarray(updates["layer"]["bias"]).any()
            assert state.state_of("layer/bias") == {}

    def test_state_of_a_leaf_whose_update_is_thrown_away_is_not_kept(self, tmp_path: Path) -> None:
        base = optax.chain(
            optax.adam(1e-2),
            optax.masked(optax.set_to_zero(), {"layer": {"kernel": False, "bias": True}, "scale": False}),
        )
        with make_store(tmp_path) as store, offload(base, store=store, tile_elements=TILE) as tx:
            state = tx.init(make_params())
            assert sorted(store.names()) == ["layer/kernel#mu", "layer/kernel#nu"]
            assert "Frozen(float32[70])" in repr(state.inner)

    def test_all_frozen_changes_nothing_and_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        params = make_params()
        with make_store(tmp_path) as store, offload(optax.set_to_zero(), store=store) as tx:
            state = tx.init(params)
            assert "all 3 parameters are frozen" in caplog.text
            new, state = tx.apply(make_grads(params, 0), state, params)
            assert_same_bits(new, params)
            assert store.names() == []


class TestParameters:
    def test_host_arrays_come_back_as_new_host_arrays(self, tmp_path: Path) -> None:
        on_device = make_params()
        params = jax.tree.map(lambda leaf: np.array(leaf), on_device)
        before = jax.tree.map(np.copy, params)
        with make_store(tmp_path) as store, offload(optax.adamw(1e-2), store=store, tile_elements=TILE) as tx:
            state = tx.init(params)
            new, state = tx.apply(make_grads(on_device, 0), state, params)
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(new))
        assert_same_bits(params, before)
        expected = PerLeaf(optax.adamw(1e-2), on_device, applies=True).step(
            make_grads(on_device, 0), on_device
        )
        assert_same_bits(new, expected)

    @pytest.mark.parametrize("module", [optax, memascend_jax], ids=["generic", "fused"])
    @pytest.mark.parametrize("name", ["adamw", "lion"])
    def test_names_in_the_store_are_updated_there(self, module: Any, name: str, tmp_path: Path) -> None:
        params = expected = make_params()
        names = {"layer": {"kernel": "kernel", "bias": "bias"}, "scale": "scale"}
        reference = PerLeaf(getattr(optax, name)(1e-3), params, applies=True)
        with make_store(tmp_path) as store:
            declared = memascend_jax.TensorSpec("kernel", "float32", (130, 70), tile_elements=TILE)
            store.declare(declared)
            store.write_elements("kernel", 0, np.asarray(params["layer"]["kernel"]).reshape(-1))
            store.put("bias", params["layer"]["bias"])
            store.put("scale", params["scale"])
            tx = offload(getattr(module, name)(1e-3), store=store, tile_elements=TILE)
            state = tx.init(names)
            for step in range(STEPS):
                grads = make_grads(params, step)
                expected = reference.step(grads, expected)
                result, state = tx.apply(grads, state, names)
                assert result == names
                found = {
                    "layer": {"kernel": store.get("kernel"), "bias": store.get("bias")},
                    "scale": store.get("scale"),
                }
                (assert_same_bits if module is optax else lambda a, b: assert_close(a, b, TOLERANCE))(
                    found, jax.tree.map(np.asarray, expected)
                )

    def test_whole_leaves_in_the_store(self, tmp_path: Path) -> None:
        kernel = make_params()["layer"]["kernel"]
        base = optax.adafactor(1e-2, min_dim_size_to_factor=16)
        expected = PerLeaf(base, {"k": kernel}, applies=True).step({"k": kernel}, {"k": kernel})
        with make_store(tmp_path) as store:
            store.put("kernel", kernel)
            tx = offload(base, store=store, tile_elements=TILE)
            tx.apply({"k": kernel}, tx.init({"k": "kernel"}), {"k": "kernel"})
            np.testing.assert_array_equal(store.get("kernel"), np.asarray(expected["k"]))

    def test_gradients_of_another_type(self, tmp_path: Path) -> None:
        params = make_params()
        grads = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_grads(params, 0))
        for name, base in (("generic", optax.adamw(1e-3)), ("fused", memascend_jax.adamw(1e-3))):
            with make_store(tmp_path / name) as store:
                tx = offload(base, store=store, tile_elements=TILE, grad_dtype=jnp.bfloat16)
                new, _ = tx.apply(grads, tx.init(params), params)
            expected = PerLeaf(optax.adamw(1e-3), params, applies=True).step(grads, params)
            if name == "generic":
                assert_same_bits(new, expected)
            else:
                wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads)
                wider = PerLeaf(optax.adamw(1e-3), params, applies=True).step(wide, params)
                assert_close(new["layer"], wider["layer"], TOLERANCE)

    def test_results_may_be_donated(self, tmp_path: Path) -> None:
        params = make_params()
        double = jax.jit(lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree), donate_argnums=0)
        with make_store(tmp_path) as store, offload(optax.adam(1e-2), store=store, tile_elements=TILE) as tx:
            new, _ = tx.apply(make_grads(params, 0), tx.init(params), params)
            expected = jax.tree.map(lambda leaf: 2 * np.array(leaf), new)
            assert_same_bits(jax.tree.map(np.asarray, double(new)), expected)

    def test_a_bare_array(self, tmp_path: Path) -> None:
        params = jnp.arange(10.0)
        with make_store(tmp_path) as store, offload(optax.adam(1e-2), store=store) as tx:
            state = tx.init(params)
            assert store.names() == ["param#mu", "param#nu"]
            new, state = tx.apply(params, state, params)
        expected, _ = jax.jit(optax.adam(1e-2).update)(params, optax.adam(1e-2).init(params), params)
        assert_same_bits(new, params + expected)


class _Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.last = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.norm(self.first(x))))


class TestFlax:
    def _losses(self, tx: Any) -> list[float]:
        model = _Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        x = jnp.asarray(np.random.default_rng(1).normal(size=(64, 16)), jnp.float32)

        @nnx.jit
        def loss_and_grads(model: _Net) -> Any:
            return nnx.value_and_grad(lambda model: ((model(x)[:, 0] - x.sum(1)) ** 2).mean())(model)

        losses = []
        for _ in range(STEPS):
            loss, grads = loss_and_grads(model)
            optimizer.update(model, grads)
            losses.append(float(loss))
        assert int(optimizer.step[...]) == STEPS
        return losses

    @pytest.mark.parametrize("module", [optax, memascend_jax], ids=["generic", "fused"])
    def test_nnx_optimizer(self, module: Any, tmp_path: Path) -> None:
        with make_store(tmp_path) as store:
            losses = self._losses(offload(module.adamw(1e-2), store=store, tile_elements=TILE))
            assert "first/kernel#mu" in store.names()
        np.testing.assert_allclose(losses, self._losses(optax.adamw(1e-2)), rtol=1e-5)
        assert losses[-1] < losses[0] / 2

    def test_nnx_state_with_variables(self, tmp_path: Path) -> None:
        model = _Net(nnx.Rngs(0))
        params = nnx.state(model, nnx.Param)
        with make_store(tmp_path) as store, offload(optax.adam(1e-2), store=store) as tx:
            new, state = tx.apply(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
            assert jax.tree.structure(new) == jax.tree.structure(params)
            nnx.update(model, new)
            assert set(state.state_of("first/kernel")) == {"mu", "nu"}

    def test_train_state(self, tmp_path: Path) -> None:
        params = make_params()
        reference = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))
        with make_store(tmp_path) as store:
            tx = offload(optax.adam(1e-2), store=store, tile_elements=TILE)
            train = TrainState.create(apply_fn=None, params=params, tx=tx)
            for step in range(3):
                grads = make_grads(params, step)
                train = train.apply_gradients(grads=grads)
                reference = reference.apply_gradients(grads=grads)
            # Its arrays may be passed into a jitted function with everything else.
            assert int(jax.jit(lambda train: train.opt_state.version + train.step)(train)) == 6
            assert_close(train.params, reference.params, TOLERANCE)


class TestHandle:
    def test_it_is_small_and_tells_what_it_is(self, tmp_path: Path) -> None:
        params = make_params()
        with make_store(tmp_path) as store, offload(optax.adamw(1e-2), store=store, tile_elements=TILE) as tx:
            state = tx.init(params)
            assert sum(np.size(leaf) for leaf in jax.tree.leaves(state)) < 8
            assert "version 0" in repr(state)
            assert "4 arrays (71.64 KiB)" in repr(state)
            assert "0/count=0" in repr(state)
            assert int(optax.tree_utils.tree_get(state, "count")) == 0
            _, state = tx.update(make_grads(params, 0), state, params)
            found = state.state_of("layer/kernel")
            assert {name: array.shape for name, array in found.items()} == {"mu": (130, 70), "nu": (130, 70)}
            np.testing.assert_allclose(
                found["mu"], 0.1 * np.asarray(make_grads(params, 0)["layer"]["kernel"]), rtol=1e-6
            )
            assert set(state.state_of("scale")) == {"0/mu/scale", "0/nu/scale"}
            with pytest.raises(KeyError, match="no parameter 'kernel'"):
                state.state_of("kernel")

    def test_it_survives_tree_functions_and_pickle(self, tmp_path: Path) -> None:
        params = make_params()
        with make_store(tmp_path) as store, offload(optax.adamw(1e-2), store=store, tile_elements=TILE) as tx:
            state = tx.init(params)
            state = jax.tree.map(lambda leaf: leaf, pickle.loads(pickle.dumps(state)))
            _, state = tx.apply(make_grads(params, 0), state, params)
            assert int(state.version) == 1

    def test_orbax_keeps_it(self, tmp_path: Path) -> None:
        checkpoint = pytest.importorskip("orbax.checkpoint")
        params = make_params()
        with (
            make_store(tmp_path / "store") as store,
            offload(optax.adamw(1e-2), store=store, tile_elements=TILE) as tx,
        ):
            params, state = tx.apply(make_grads(params, 0), tx.init(params), params)
            with checkpoint.StandardCheckpointer() as saver:
                saver.save(tmp_path / "kept", {"params": params, "state": state})
                saver.wait_until_finished()
                kept = saver.restore(tmp_path / "kept", {"params": params, "state": state})
            params, state = tx.apply(make_grads(params, 1), kept["state"], kept["params"])
            assert int(state.version) == 2
