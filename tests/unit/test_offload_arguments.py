# SPDX-License-Identifier: Apache-2.0
"""Bad arguments of an offloaded transform are refused by name, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from offloading import TILE, make_store

from memascend_jax import PinnedArena, TensorStore
from memascend_jax.errors import ConfigError, RunError, StoreError
from memascend_jax.optim.offload import CouplingError, offload

BASE = optax.sgd(1e-2, momentum=0.9)
PARAMS = {"a": np.ones(70, np.float32)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorStore]:
    """A store that all tests use: none of them may leave anything in it."""
    with make_store(tmp_path_factory.mktemp("arguments")) as opened:
        yield opened


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"clip_norm": True}, "clip_norm must be a positive number, got True"),
        ({"clip_norm": "1"}, "clip_norm must be a positive number, got '1'"),
        ({"clip_norm": 1e-320}, r"got 1e-320 \(0.0 in float32\)"),
        ({"clip_norm": 1e39}, r"\(inf in float32\)"),
        ({"commit_every": 1.5}, "commit_every must be a whole number, got 1.5"),
        ({"commit_every": float("nan")}, "commit_every must be a whole number, got nan"),
        ({"commit_every": True}, "commit_every must be a whole number, got True"),
        ({"commit_every": "1"}, "commit_every must be a whole number, got '1'"),
        ({"tile_elements": 8192.0}, "tile_elements must be a whole number, got 8192.0"),
        ({"tile_elements": None}, "tile_elements must be a whole number, got None"),
        ({"overwrite": "x"}, "overwrite must be True or False"),
        ({"name": 5}, "name must be a text, got 5"),
        ({"grad_dtype": "nonsense"}, "grad_dtype must be an element type, got 'nonsense'"),
        ({"grad_dtype": jnp.float8_e4m3fn}, "grad_dtype must be one of"),
        ({"grad_dtype": np.int32}, "grad_dtype must be one of"),
        ({"grad_dtype": np.float64}, "grad_dtype must be one of"),
        ({"extra_args": [1]}, "extra_args must be"),
        ({"extra_args": {1: 2.0}}, "extra_args must be"),
        ({"arena": 5}, "arena must be a PinnedArena or None, got 5"),
    ],
)
def test_options_are_checked(arguments: dict[str, Any], words: str, store: TensorStore) -> None:
    with pytest.raises(ConfigError, match=words):
        offload(BASE, store=store, **arguments)


def test_a_closed_arena_is_refused(store: TensorStore) -> None:
    arena = PinnedArena(1 << 16, pin="none")
    arena.close()
    with pytest.raises(ConfigError, match="arena is closed"):
        offload(BASE, store=store, arena=arena).init(PARAMS)


def _unaligned() -> np.ndarray:
    return np.frombuffer(b"\0" * 281, np.uint8)[1:].view(np.float32)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"a": np.ones(70, ">f4")}, "parameter 'a' is a numpy array of >f4 that cannot be read"),
        ({"a": _unaligned()}, "parameter 'a' is a numpy array of float32 that cannot be read"),
        ({"a": np.array([None])}, "parameter 'a' is a numpy array of object"),
        ({"a": {"b": np.ones(2)}, "a/b": np.ones(2)}, "two leaves of the parameters have the name 'a/b'"),
    ],
)
def test_parameters_are_checked(params: Any, words: str, store: TensorStore) -> None:
    with pytest.raises(ConfigError, match=words):
        offload(BASE, store=store).init(params)
    assert store.names() == []


def test_extra_arguments_that_offload_was_not_told_of(store: TensorStore) -> None:
    base = optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau())
    with pytest.raises(ConfigError, match=r"argument: 'value'.*extra_args="):
        offload(base, store=store).init(PARAMS)


def test_a_wrapper_that_skips_is_refused_with_what_does_the_same(store: TensorStore) -> None:
    base = optax.MultiSteps(BASE, 2, should_skip_update_fn=optax.skip_not_finite)
    with pytest.raises(CouplingError, match='nonfinite="skip"'):
        offload(base, store=store)


def test_handles_and_calls_are_checked(store: TensorStore) -> None:
    tx = offload(BASE, store=store, name="calls", tile_elements=TILE)
    with pytest.raises(RunError, match="cannot be traced"):
        jax.jit(lambda: tx.init(PARAMS))()
    state = tx.init(PARAMS)
    for version in (None, np.zeros(3, np.int32), "1"):
        with pytest.raises(StoreError, match="version must be a whole number"):
            tx.apply(PARAMS, replace(state, version=version), PARAMS)
    with pytest.raises(StoreError, match="run_state must be bytes"):
        tx.commit(state, "text")
    for call in (
        lambda: tx.apply(PARAMS, state, PARAMS),
        lambda: tx.restore(PARAMS),
        lambda: tx.commit(state),
        lambda: tx.state_of(state, "a"),
    ):
        with pytest.raises(RunError, match="cannot be traced"):
            jax.jit(call)()
    with pytest.raises(RunError, match="cannot be traced"):
        jax.jit(tx.commit)(state)
    tx.apply(PARAMS, state, PARAMS)
    for name in list(store.names()):
        store.remove(name)


def test_results_have_the_sharding_of_the_parameters(store: TensorStore) -> None:
    device = jax.local_devices(backend="cpu")[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("x",))
    named = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    kinds = {memory.kind for memory in device.addressable_memories()}
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind=sorted(kinds)[0])
    params = {"a": jax.device_put(PARAMS["a"], named), "b": jax.device_put(PARAMS["a"], pinned)}
    tx = offload(optax.sgd(1e-2), store=store, name="sharded")
    new, _ = tx.apply(params, tx.init(params), params)
    updates, _ = tx.update(params, tx.restore(params), params)
    for result in (new, updates):
        assert result["a"].sharding == named
        assert result["b"].sharding == pinned
