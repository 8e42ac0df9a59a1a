# SPDX-License-Identifier: Apache-2.0
"""One update of an offloaded state: look at the gradients, stream every piece through its update, commit.

A step changes all or nothing: what fails half way is rolled back to the last commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from memascend_jax.errors import ConfigError, NonfiniteError
from memascend_jax.optim.offload_engine import OffloadEngine
from memascend_jax.optim.offload_gradients import look_at
from memascend_jax.optim.offload_handle import OffloadState
from memascend_jax.optim.offload_leaves import (
    NamedLeaves,
    check_same,
    check_untraced,
    named_leaves,
    without_variables,
)
from memascend_jax.optim.offload_trace import scalar_shape
from memascend_jax.optim.offload_update import PieceUpdates, Request, zero_update


def step(
    engine: OffloadEngine, grads: Any, state: Any, params: Any, extra: Mapping[str, Any], *, applies: bool
) -> Any:
    """Returns (updates or new parameters, new handle); see ``Offload``."""
    given_grads = named_leaves(grads, "gradients")
    named_leaves(state, "optimizer state")
    named_leaves(dict(extra), "extra arguments")
    given_params = None if params is None else named_leaves(params, "parameters")
    check_untraced()
    with engine.alone():
        numbers = engine.numbers(state)
        version, skipped = int(without_variables(state).version), int(without_variables(state).skipped)
        request = Request(
            _checked_grads(engine, given_grads),
            None if given_params is None else _checked_params(engine, given_params),
            _checked_extra(engine, extra),
            applies,
        )
        _check_params(engine, request)
        answer = given_grads if given_params is None else given_params
        clip, nonfinite = _looked_at(engine, request)
        if nonfinite and engine.options.nonfinite == "skip":
            return answer.rebuild(_unchanged(engine, request)), engine.keep(version, skipped + 1, numbers)
        _look_at_params(engine, request)
        update = PieceUpdates(engine, request, numbers, clip)
        with jax.default_device(engine.cpu):
            update.prepare()
            try:
                engine.live.begin_change()
                engine.stream.run(update.piece, writes_params=applies)
                results, values = update.finish()
                new_state = engine.keep(version + 1, skipped, values)
                engine.live.end_change()
                _commit_when_due(engine, new_state)
            except BaseException as error:
                _undo(engine, error, version)
                raise
        return answer.rebuild(results), new_state


def _commit_when_due(engine: OffloadEngine, state: OffloadState) -> None:
    every = engine.options.commit_every
    if every and engine.version - engine.live.committed_version >= every:
        engine.commit(state)


def _undo(engine: OffloadEngine, error: BaseException, version: int) -> None:
    """Goes back to ``version``, which the step began with, or to the last commit where the store was written."""
    live = engine.live
    if live.version == version and not engine.stream.wrote:
        live.end_change()
        return
    live.begin_change()
    if engine.store.closed:
        error.add_note(
            f"store '{engine.home.store_path}' was closed during the step: it holds its last commit"
        )
        return
    try:
        engine.roll_back()
    except Exception as failure:
        # The state says so itself to whoever uses it next.
        error.add_note(f"{live.broken} ({failure})")
        return
    if live.version < version:
        error.add_note(
            f"the optimizer state in store '{engine.home.store_path}' is that of its last commit again, version "
            f"{live.version:,}: with this update {version - live.version:,} before it were undone; call "
            "restore(params) and go on with the parameters of that version"
        )


def _checked_grads(engine: OffloadEngine, given: NamedLeaves) -> tuple[Any, ...]:
    """A frozen leaf's gradient is not looked at: it may be of any type, such as jax's float0."""
    frozen = {engine.names[update.leaf] for update in engine.updates if update.frozen}
    return check_same(
        given,
        "gradients",
        engine.names,
        engine.grad_shapes,
        engine.store,
        unchecked=frozen,
        may_be_names=False,
    )


def _checked_extra(engine: OffloadEngine, extra: Mapping[str, Any]) -> dict[str, np.ndarray]:
    names = engine.traced.extra_names
    missing = [name for name in names if name not in extra]
    if missing:
        raise ConfigError(f"the update needs the extra argument {missing[0]!r}, which offload was told of")
    for name in names:
        scalar_shape(name, extra[name])
    return {name: np.asarray(extra[name]) for name in names}


def _checked_params(engine: OffloadEngine, given: NamedLeaves) -> tuple[Any, ...]:
    values = check_same(given, "parameters", engine.names, engine.traced.leaf_shapes, engine.store)
    for leaf, (name, value) in enumerate(zip(engine.names, values, strict=True)):
        spec = engine.stored_params.get(leaf)
        expected = None if spec is None else spec.name
        if (value if isinstance(value, str) else None) != expected:
            given_as = f"the tensor '{value}'" if isinstance(value, str) else "an array"
            made_with = "an array" if expected is None else f"the tensor '{expected}' of the store"
            raise ConfigError(
                f"parameters: '{name}' is {given_as}, but the state was made with {made_with}; give what init was given"
            )
    return values


def _check_params(engine: OffloadEngine, request: Request) -> None:
    if request.params is not None:
        return
    for update in engine.updates:
        if (
            request.applies
            or engine.traced.param_input(update.leaf) in update.inputs
            or update.leaf in engine.fused
        ):
            raise ConfigError("this transform needs the parameters: call update(grads, state, params)")


def _looked_at(engine: OffloadEngine, request: Request) -> tuple[tuple[np.float32, np.float32] | None, bool]:
    """Returns (norm, longest norm) when gradients are clipped, and whether one of them is not finite.

    Raises:
        NonfiniteError: one is not, and such steps are neither skipped nor kept.
    """
    options = engine.options
    if options.clip_norm is None and options.nonfinite == "keep":
        return None, False
    leaves = [update.leaf for update in engine.updates if not update.frozen]
    facts = look_at([request.grads[leaf] for leaf in leaves])
    if facts.nonfinite and options.nonfinite == "raise":
        bad = [engine.names[leaves[index]] for index in facts.nonfinite]
        more = f" and of {len(bad) - 1:,} more" if len(bad) > 1 else ""
        raise NonfiniteError(
            f"the gradient of '{bad[0]}'{more} is inf or nan at update {engine.version + 1:,}; nothing was changed. "
            'Pass nonfinite="skip" to offload to go on without such steps, or "keep" to let them through as optax does'
        )
    clip = None if options.clip_norm is None else (np.float32(facts.norm), np.float32(options.clip_norm))
    return clip, bool(facts.nonfinite)


def _look_at_params(engine: OffloadEngine, request: Request) -> None:
    """Looks for inf and nan in the parameters first where the step could not be undone, or others with it; else each
    result is looked at as it is made, which costs no pass of its own.

    Raises:
        NonfiniteError: one has some, and such steps are not kept.
    """
    whole = engine.store.durability == "step" and engine.version == engine.live.committed_version
    if whole or request.params is None or engine.options.nonfinite == "keep":
        return
    leaves = [
        update.leaf
        for update in engine.updates
        if not update.frozen
        and not isinstance(request.params[update.leaf], str)
        and (request.applies or engine.traced.param_input(update.leaf) in update.inputs)
    ]
    facts = look_at([request.params[leaf] for leaf in leaves])
    if facts.nonfinite:
        raise NonfiniteError(
            f"the parameter '{engine.names[leaves[facts.nonfinite[0]]]}' is inf or nan before update "
            f'{engine.version + 1:,}; nothing was changed. nonfinite="keep" lets such ones through as optax does'
        )


def _unchanged(engine: OffloadEngine, request: Request) -> list[Any]:
    if request.applies:
        assert request.params is not None
        return list(request.params)
    return [zero_update(engine, request, update) for update in engine.updates]
