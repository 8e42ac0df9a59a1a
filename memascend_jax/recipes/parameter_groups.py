# SPDX-License-Identifier: Apache-2.0
"""Which learning rate and weight decay each parameter gets, from ``optimizer.groups``. jax-free."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memascend_jax.config.sections import OptimizerSection, ParameterGroup
from memascend_jax.errors import ConfigError
from memascend_jax.models.shapes import TensorShape
from memascend_jax.training.update import TensorSettings


def tensor_settings(optimizer: OptimizerSection, tensors: Sequence[TensorShape]) -> dict[str, TensorSettings]:
    """Returns the settings of each parameter, by name.

    The first group whose ``match`` is found in a name decides; what it leaves out is the run's. The run's weight decay
    is not for norms and other vectors; a group's is for all that it matches.

    Raises:
        ConfigError: a group decides about no parameter, because none has such a name or earlier groups have them all.
    """
    chosen = {tensor.name: _first_match(optimizer.groups, tensor.name) for tensor in tensors}
    for index, group in enumerate(optimizer.groups):
        if index not in chosen.values():
            found = [name for name in chosen if re.search(group.match, name)]
            raise ConfigError(
                f"optimizer.groups[{index}] decides about no parameter: match={group.match!r} is found in "
                + (
                    f"{len(found)} names, all of which an earlier group matches first; put it before them"
                    if found
                    else f"no name; names are as {tensors[0].name!r} and {tensors[-1].name!r}"
                )
            )
    return {tensor.name: _settings(optimizer, chosen[tensor.name], tensor) for tensor in tensors}


def _first_match(groups: Sequence[ParameterGroup], name: str) -> int | None:
    return next((index for index, group in enumerate(groups) if re.search(group.match, name)), None)


def _settings(optimizer: OptimizerSection, index: int | None, tensor: TensorShape) -> TensorSettings:
    group = None if index is None else optimizer.groups[index]
    decay, rate = (None, None) if group is None else (group.weight_decay, group.learning_rate)
    if decay is None:
        decay = optimizer.weight_decay if len(tensor.shape) > 1 else 0.0
    return TensorSettings(decay, 1.0 if rate is None else rate / optimizer.learning_rate)
