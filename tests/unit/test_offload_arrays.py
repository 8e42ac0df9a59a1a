# SPDX-License-Identifier: Apache-2.0
"""Arrays that are not in host memory: the ways of a device, taken on CPU, and leaves over several devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from offloading import TILE, PerLeaf, assert_same_bits, make_grads, make_params, make_store

from memascend_jax.optim import offload_arrays, offload_gradients
from memascend_jax.optim.offload import offload
from memascend_jax.optim.offload_gradients import look_at

_SHARDED = """
import sys
from pathlib import Path
import jax, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec
from offloading import TILE, make_grads, make_params, make_store
from memascend_jax.optim.offload import offload

assert len(jax.devices()) == 2
rows = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x"))
alone = make_params()
spread = {**alone, "layer": jax.tree.map(lambda leaf: jax.device_put(leaf, rows), alone["layer"])}
found = []
for number, params in enumerate((alone, spread)):
    with make_store(Path(sys.argv[1]) / str(number)) as store:
        tx = offload(optax.adamw(1e-2), store=store, tile_elements=TILE, clip_norm=1.0)
        grads = jax.tree.map(lambda grad, leaf: jax.device_put(grad, leaf.sharding), make_grads(alone, 0), params)
        new, _ = tx.apply(grads, tx.init(params), params)
        assert new["layer"]["kernel"].sharding == params["layer"]["kernel"].sharding
        found.append(jax.tree.map(np.asarray, new))
jax.tree.map(np.testing.assert_array_equal, *found)
"""


@pytest.mark.parametrize("base", [optax.adamw(1e-2), optax.contrib.muon(1e-2)], ids=["tiles", "whole"])
def test_pieces_of_device_arrays_come_and_go_with_the_same_bits(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_arrays, "_in_host_memory", lambda array: False)
    cuts: list[int] = []
    whole = offload_arrays._cut
    monkeypatch.setattr(
        offload_arrays, "_cut", lambda array, start, n: (cuts.append(n), whole(array, start, n))[1]
    )
    params = make_params()
    reference = PerLeaf(base, params, applies=True)
    with make_store(tmp_path) as store, offload(base, store=store, tile_elements=TILE) as tx:
        state = tx.init(params)
        for step in range(3):
            grads = make_grads(params, step)
            expected = reference.step(grads, params)
            params, state = tx.apply(grads, state, params)
            assert_same_bits(params, expected)
    assert (TILE in cuts) == ("adam" in str(state.inner).lower() and "Muon" not in str(state.inner))


def test_leaves_over_several_devices(tmp_path: Path) -> None:
    support = Path(__file__).parents[1] / "support"
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": ":".join([str(support), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", _SHARDED, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_norm_is_the_same_wherever_gradients_are(monkeypatch: pytest.MonkeyPatch) -> None:
    grads = [jnp.asarray(np.random.default_rng(0).normal(size=n), jnp.float32) for n in (0, 1, 5000)]
    expected = np.sqrt(sum(float(np.vdot(g, g)) for g in (np.asarray(leaf, np.float64) for leaf in grads)))
    here = look_at(grads)
    monkeypatch.setattr(offload_gradients, "_is_elsewhere", lambda array: True)
    there = look_at(grads)
    assert here.norm == pytest.approx(expected, rel=1e-7)
    assert there.norm == pytest.approx(expected, rel=1e-6)
    assert look_at([grads[2], grads[2].at[4999].set(jnp.nan)]).nonfinite == (1,)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float64])
def test_the_norm_of_other_types(dtype: Any) -> None:
    values = np.random.default_rng(0).normal(size=3000).astype(dtype)
    assert look_at([values]).norm == pytest.approx(float(np.linalg.norm(values.astype(np.float64))), rel=1e-6)
    values[7] = np.inf
    assert look_at([values]).nonfinite == (0,)
