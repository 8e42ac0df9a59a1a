# SPDX-License-Identifier: Apache-2.0
"""Whether a run can be gone on with as it is configured now: its settings, what they only name, and its tensors.

Everything is compared before anything is written. What changes the training is refused by name, with both values,
unless ``run.allow_changed`` names it; what the stored state does not fit cannot be allowed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memascend_jax.config import CONTENT_KEYS, Change, Config, not_allowed, to_dict, training_changes
from memascend_jax.errors import ConfigError
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.recipes.parameter_groups import frozen_tensors
from memascend_jax.storage.tensor_store import TensorSpec
from memascend_jax.training.run_state import RunState
from memascend_jax.units import counted, format_bytes

if TYPE_CHECKING:
    # Reading data takes long to import, and a plan reads none.
    from memascend_jax.data.dataset import Dataset

#: The digest of the training data among ``content_digests``; those of several sources have it before their names.
_TRAIN = "train"
#: With one of these changed the same data gives other sequences.
_SHAPES_DATA = ("data.", "train.seed", "model.config.vocab_size")
_LORA = "lora."
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Found:
    """A committed run in an existing store.

    Attributes:
        specs: the tensors that the store holds, by name.
        changes: the settings that change the training and are others now, those that only name contents left out.
        scratch_bytes: room in the store for what a step puts away.
    """

    state: RunState
    generation: int
    store_id: str
    paths: tuple[str, ...]
    durability: str
    specs: Mapping[str, TensorSpec]
    changes: tuple[Change, ...] = ()
    scratch_bytes: int = 0

    @property
    def where(self) -> str:
        return f"the store {', '.join(self.paths)}"

    @property
    def other_ways(self) -> str:
        """What a user can do who will not have the settings of before."""
        return (
            "another run.dir or offload.store to start anew, or remove the run: memascend store wipe "
            f"{' '.join(self.paths)}"
        )


def check_settings(found: Found, config: Config) -> Found:
    """Returns ``found`` with the settings that are others now, all of which may be.

    Raises:
        ConfigError: settings that change the training are others, and not allowed to; or the state is of another format
            or of other tensors, or the store of another durability, which cannot be allowed.
    """
    _check_format(found, config)
    _check_durability(found, config)
    _check_rank(found, config)
    changes = _without_growth(training_changes(found.state.config, config), found.state.config)
    # Other adapters are other frozen parameters too: the keys say more than the tensors' names.
    refuse_changes(found, config, [change for change in changes if change.key.startswith(_LORA)])
    _check_frozen(found, config)
    refuse_changes(found, config, [change for change in changes if change.key not in CONTENT_KEYS])
    return replace(found, changes=tuple(changes))


def check_contents(found: Found, config: Config, contents: Mapping[str, str]) -> Found:
    """Returns ``found`` with what the configuration names judged by its contents, not by its place.

    Args:
        contents: of now, as ``content_digests`` returns them.

    Raises:
        ConfigError: the model or the data are others, and not allowed to be.
    """
    settings = [change for change in found.changes if change.key not in CONTENT_KEYS]
    named = {change.key: change for change in found.changes if change.key in CONTENT_KEYS}
    before = found.state.contents
    changes = list(settings)
    for key, content in _content_of(config).items():
        follows = "model.config." if content == "model" else _SHAPES_DATA
        if content not in before or any(change.key.startswith(follows) for change in settings):
            changes += [named[key]] if key in named else []
        elif before[content] != contents.get(content) and not _only_follows(key, config, changes):
            changes.append(named.get(key, _same_place(key, config, before, contents)))
    if found.state.config["data"].get("eval_sequences") != config.data.eval_sequences:
        # Other sequences are held out because fewer or more are.
        changes = [change for change in changes if change.key != "data.eval_source" or change.key in named]
    refuse_changes(found, config, changes)
    return replace(found, changes=tuple(changes))


def check_tensors(found: Found, specs: Sequence[TensorSpec]) -> None:
    """Returns when the store holds exactly the tensors that a run needs.

    Raises:
        ConfigError: some are missing, or of another type or shape.
    """
    faults = [fault for spec in specs if (fault := _difference(found.specs.get(spec.name), spec)) is not None]
    faults += [
        f"'{name}' is of no use to this run" for name in found.specs.keys() - {spec.name for spec in specs}
    ]
    if faults:
        # Of a tensor whose state does not fit either the parameter says enough.
        faults.sort(key=lambda fault: ("#" in fault, fault))
        more = f" and {counted(len(faults) - _SHOWN, 'more', 'more')}" if len(faults) > _SHOWN else ""
        changed = f" (changed: {', '.join(map(str, found.changes))})" if found.changes else ""
        raise ConfigError(
            f"{found.where} holds a run at step {found.state.step} whose state does not fit this model{changed}: "
            f"{'; '.join(faults[:_SHOWN])}{more}; nothing was changed. Use the same model to go on, or another "
            "run.dir or offload.store to start anew"
        )


def check_scratch(found: Found, needed_bytes: int) -> None:
    """Returns when the store has room for what a step puts away: a smaller budget or a larger batch may need more.

    Raises:
        ConfigError: it has not, and a store does not grow.
    """
    if needed_bytes > found.scratch_bytes:
        raise ConfigError(
            f"{found.where} was made with {format_bytes(found.scratch_bytes)} for the gradients and stage inputs of a "
            f"step, but with these settings a step needs {format_bytes(needed_bytes)}; nothing was changed. Give the "
            "run as much offload.host_memory as before or more, or the batch that it had"
        )


def content_digests(shape: ModelConfig, data: Dataset) -> dict[str, str]:
    """Returns digests of the model's shape, and of the tokens that are trained and held out."""
    text = json.dumps(shape.identity(), sort_keys=True)
    digests = {"model": hashlib.sha256(text.encode()).hexdigest()}
    for name, digest in data.train.digests().items():
        digests[f"{_TRAIN}:{name}" if name else _TRAIN] = digest
    if data.held_out is not None:
        digests["held_out"] = data.held_out.digest()
    return digests


def notes(found: Found, config: Config, total_steps: int) -> list[str]:
    """Returns what a user should know of the changes that a resumed run goes on with."""
    said = []
    if found.changes:
        said.append(f"going on with other settings, as allowed: {', '.join(map(str, found.changes))}")
    grown = [change for change in training_changes(found.state.config, config) if change.grows]
    if grown and config.optimizer.schedule != "constant":
        said.append(
            f"the run is longer than before: {', '.join(map(str, grown))}; the {config.optimizer.schedule} schedule "
            f"now ends at step {total_steps}, so the learning rate goes on from another value than the last one"
        )
    return said


def sequences_read(state: RunState) -> int:
    """Returns how many sequences a run has read; earlier versions, that do not say, read as many in every step."""
    if state.sequences is not None:
        return state.sequences
    train = state.config["train"]
    return int(state.step * train["micro_batch_size"] * train["gradient_accumulation_steps"])


def _without_growth(changes: Sequence[Change], saved: Mapping[str, Any]) -> list[Change]:
    """Leaves out that the run is longer, and a warm-up that nobody chose and that was cut to the shorter run."""
    grows = any(change.grows for change in changes)
    was_cut = grows and saved["optimizer"]["warmup_steps"] == saved["train"]["steps"]
    return [
        change
        for change in changes
        if not change.grows and not (was_cut and change.key == "optimizer.warmup_steps")
    ]


def refuse_changes(found: Found, config: Config, changes: Sequence[Change]) -> None:
    """Raises ``ConfigError`` with all of ``changes`` that the configuration does not allow."""
    refused = not_allowed(changes, config.run.allow_changed)
    if not refused:
        return
    keys = ", ".join(sorted({change.key for change in refused} | set(config.run.allow_changed)))
    raise ConfigError(
        f"{found.where} holds a run at step {found.state.step} that was started with other values of "
        f"{', '.join(map(str, refused))}; nothing was changed. Use the same values to go on, "
        f"run.allow_changed=[{keys}] to go on with the new ones, {found.other_ways}"
    )


def _check_format(found: Found, config: Config) -> None:
    """Another form of the state is no change that a run can be resumed with: the store holds other tensors."""
    held, asked = found.state.config["optimizer"]["state_format"], config.optimizer.state_format
    if held != asked:
        raise ConfigError(
            f"{found.where} holds a run with optimizer.state_format={held}, not {asked}; nothing was "
            f"changed. Use optimizer.state_format={held} to go on, put the run into the other "
            f"(memascend store convert {' '.join(found.paths)} --state-format {asked}), or another run.dir or "
            "offload.store to start anew"
        )


def _check_rank(found: Found, config: Config) -> None:
    """Factors of another rank are other tensors; those of other targets may have been named differently only."""
    held, asked = found.state.config.get("lora", {}).get("rank", 0), config.lora.rank
    if held != asked:
        raise ConfigError(
            f"{found.where} holds a run at step {found.state.step} with lora.rank={held}, not {asked}, whose tensors "
            f"are others; nothing was changed. Use lora.rank={held} to go on, or another run.dir or offload.store to "
            "start anew, from an export of this run (memascend export --merge) if it is to begin where this one is"
        )


def _check_durability(found: Found, config: Config) -> None:
    """A store keeps the durability it was made with; who asks for the safer one must not be left without."""
    if config.offload.durability == "step" and found.durability != "step":
        raise ConfigError(
            f"{found.where} was made with durability {found.durability}, which offload.durability=step does not "
            "change; nothing was changed. Use offload.durability=plan or checkpoint to go on, or another run.dir or "
            "offload.store to start anew"
        )


def _check_frozen(found: Found, config: Config) -> None:
    """What was frozen has no state to go on with; what was not would leave its own unused."""
    parameters = [name for name in found.specs if "#" not in name]
    held = {name for name in parameters if not found.specs[name].mutable}
    asked = frozen_tensors(config.optimizer.groups, parameters)
    faults = [
        f"{counted(len(names), 'tensor', 'tensors')} {what}: {_listed(names)}"
        for names, what in (
            (sorted(held - asked), "frozen in it would be trained, but have no master and no moments"),
            (sorted(asked - held), "trained in it would be frozen, which would leave their state unused"),
        )
        if names
    ]
    if faults:
        raise ConfigError(
            f"{found.where} holds a run at step {found.state.step} with another set of frozen parameters. "
            f"{'; '.join(faults)}. Nothing was changed. Use the same optimizer.groups to go on, or another run.dir or "
            "offload.store to start anew, from an export of this run (memascend export) if it is to begin where this "
            "one is"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _content_of(config: Config) -> dict[str, str]:
    """Which digest of ``content_digests`` a key's value stands for."""
    return {"model.source": "model", _trained_on(config): _TRAIN, "data.eval_source": "held_out"}


def _trained_on(config: Config) -> str:
    return "data.sources" if config.data.sources else "data.source"


def _only_follows(key: str, config: Config, changes: Sequence[Change]) -> bool:
    """Whether held-out data is other data because what it is a part of is."""
    follows = key == "data.eval_source" and config.data.eval_source is None
    return follows and any(change.key == _trained_on(config) for change in changes)


def _same_place(key: str, config: Config, before: Mapping[str, str], contents: Mapping[str, str]) -> Change:
    place = to_dict(config)[key.partition(".")[0]][key.partition(".")[2]]
    if key == "data.sources":
        digests = {name: digest for name, digest in contents.items() if name.startswith(f"{_TRAIN}:")}
        others = [name.partition(":")[2] for name, digest in digests.items() if before.get(name) != digest]
        place = ", ".join(others or [entry["path"] for entry in place])
    shown = f"a part of {_trained_on(config)}" if place is None else place
    return Change(key, f"{shown} as it was", "its contents as they are now")


def _difference(held: TensorSpec | None, wanted: TensorSpec) -> str | None:
    if held is None:
        return f"'{wanted.name}' is missing"
    if (held.dtype, held.shape) != (wanted.dtype, wanted.shape):
        return f"'{wanted.name}' is {held.dtype}{list(held.shape)} in the store, not {wanted.dtype}{list(wanted.shape)}"
    if held.tile_elements != wanted.tile_elements:
        return f"'{wanted.name}' has tiles of {held.tile_elements} elements, not {wanted.tile_elements}"
    return None
