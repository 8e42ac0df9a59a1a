# SPDX-License-Identifier: Apache-2.0
"""What ``optimizer.groups`` says of each parameter: whether it is trained, its learning rate, its decay. jax-free."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

from memascend_jax.config.sections import OptimizerSection, ParameterGroup
from memascend_jax.errors import ConfigError
from memascend_jax.models.adapters import is_adapter
from memascend_jax.models.shapes import TensorShape
from memascend_jax.training.update import TensorSettings

_NEAREST = 3
_LAYER = "layer."
#: Characters of a regular expression that no tensor's name has.
_SPECIAL = re.compile(r"\\[a-zA-Z]|[\\^$*+?()\[\]{}|]")


def tensor_settings(optimizer: OptimizerSection, tensors: Sequence[TensorShape]) -> dict[str, TensorSettings]:
    """Returns the settings of each parameter that is trained, by name.

    The first group whose ``match`` is found in a name decides; what it leaves out is the run's. The run's weight decay
    is not for norms and other vectors; a group's is for all that it matches. ``layer_decay`` multiplies the learning
    rate of a group as it does the run's.

    Raises:
        ConfigError: a group decides about no parameter, because none has such a name or earlier groups have them all;
            or every parameter is frozen.
    """
    groups = optimizer.groups
    chosen = {name: _first_match(groups, name) for name in _free(tensor.name for tensor in tensors)}
    for index, group in enumerate(groups):
        if index not in chosen.values():
            own = [tensor.name for tensor in tensors if tensor.name not in chosen]
            raise ConfigError(_without_effect(index, group, chosen, own))
    frozen = frozen_tensors(groups, chosen)
    if len(frozen) == len(chosen):
        raise ConfigError(
            f"optimizer.groups freezes all {len(chosen):,} {_what(chosen)}, so there is nothing to train; leave a "
            "group with frozen: true out, narrow its match, or put a group without it before it"
        )
    n_layers = len({tensor.stage for tensor in tensors if tensor.stage.startswith(_LAYER)})
    return {
        tensor.name: _settings(optimizer, chosen[tensor.name], tensor, n_layers)
        for tensor in tensors
        if tensor.name in chosen and tensor.name not in frozen
    }


def frozen_tensors(groups: Sequence[ParameterGroup], names: Iterable[str]) -> frozenset[str]:
    """Returns which of ``names`` are not trained: beside adapters all of the model's own."""
    names = list(names)
    free = _free(names)
    chosen = ((name, _first_match(groups, name)) for name in free)
    frozen = {name for name, index in chosen if index is not None and groups[index].frozen}
    return frozenset(frozen | (set(names) - set(free)))


def _free(names: Iterable[str]) -> list[str]:
    """Returns what the groups are about: the factors of adapters, or without any every tensor."""
    names = list(names)
    return [name for name in names if is_adapter(name)] or names


def _what(names: Iterable[str]) -> str:
    return "factors of the adapters" if any(map(is_adapter, names)) else "tensors of the model"


def _first_match(groups: Sequence[ParameterGroup], name: str) -> int | None:
    return next((index for index, group in enumerate(groups) if re.search(group.match, name)), None)


def _without_effect(
    index: int, group: ParameterGroup, names: Collection[str], beside: Collection[str]
) -> str:
    found = [name for name in names if re.search(group.match, name)]
    own = [name for name in beside if re.search(group.match, name)]
    if own and not found:
        more = ", …" if len(own) > 1 else ""
        return (
            f"optimizer.groups[{index}] decides about no parameter: match={group.match!r} is found only in tensors of "
            f"the model itself ({own[0]!r}{more}), which are frozen beside adapters (lora.rank); groups are about the "
            f"factors, such as {next(iter(names))!r}. Leave the group out, or train the model's own tensors without "
            "adapters (lora.rank=0)"
        )
    why = f"{len(found)} names, all of which an earlier group matches first; put it before them"
    if not found:
        why = f"no name; the nearest are {', '.join(map(repr, _nearest(group.match, names)))}"
    return f"optimizer.groups[{index}] decides about no parameter: match={group.match!r} is found in {why}"


def _nearest(match: str, names: Collection[str]) -> list[str]:
    """Returns the names of which a part is most like what ``match`` asks for, in their order."""
    wanted = _SPECIAL.sub("", match).lower()
    matcher = difflib.SequenceMatcher(b=wanted, autojunk=False)

    def likeness(name: str) -> float:
        parts = name.lower().split(".")
        spans = (
            ".".join(parts[start:end])
            for start in range(len(parts))
            for end in range(start + 1, len(parts) + 1)
        )
        best = 0.0
        for span in spans:
            matcher.set_seq1(span)
            best = max(best, matcher.ratio())
        return best

    return sorted(names, key=likeness, reverse=True)[:_NEAREST]


def _settings(
    optimizer: OptimizerSection, index: int | None, tensor: TensorShape, n_layers: int
) -> TensorSettings:
    group = None if index is None else optimizer.groups[index]
    decay, rate = (None, None) if group is None else (group.weight_decay, group.learning_rate)
    if decay is None:
        decay = optimizer.weight_decay if len(tensor.shape) > 1 else 0.0
    factor = 1.0 if rate is None else rate / optimizer.learning_rate
    if optimizer.layer_decay is not None:
        factor *= optimizer.layer_decay ** _distance(tensor.stage, n_layers)
    return TensorSettings(decay, factor)


def _distance(stage: str, n_layers: int) -> int:
    """Returns how far below the head a stage is: 0 for the head's, ``n_layers + 1`` for the embedding.

    As in BEiT and timm (``param_groups_layer_decay``), where the embedding counts as a layer below the first.
    Source of the idea: Howard and Ruder, "Universal Language Model Fine-tuning" (arXiv 1801.06146, section 3.2);
    Clark et al., "ELECTRA" (arXiv 2003.10555, appendix A).
    """
    if stage.startswith(_LAYER):
        return n_layers - int(stage.removeprefix(_LAYER))
    return n_layers + 1 if stage == "embed" else 0
