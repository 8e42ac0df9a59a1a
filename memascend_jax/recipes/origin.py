# SPDX-License-Identifier: Apache-2.0
"""What a run begins with or goes on with: its store, a step of a checkpoint, or nothing.

The store comes first, for it has every step. Where it is gone, or was being overwritten in place when its last run
ended, the newest whole step of the run's own checkpoints takes its place. ``run.restore`` begins with any step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memascend_jax.checkpoints.saved_step import (
    SavedStep,
    check_model,
    find_steps,
    open_step,
    resolve_step,
)
from memascend_jax.checkpoints.verify_step import newest_whole_step
from memascend_jax.config import CONTENT_KEYS, Config, store_paths, training_changes
from memascend_jax.errors import ConfigError, DataError, StoreError
from memascend_jax.models.adapters import Adapters, model_tensors
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.recipes.checkpoint_space import checkpoint_folder
from memascend_jax.recipes.resume import Found, check_contents, refuse_changes
from memascend_jax.recipes.run_folder import RunFolder
from memascend_jax.recipes.run_store import find_run
from memascend_jax.storage.store_errors import DamagedStoreError, DirtyStoreError
from memascend_jax.training.run_state import RunState

#: In ``RunState.results``: the step that a run began with.
RESTORED = "restored_from"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the state comes from.

    Attributes:
        found: a run in the store.
        saved: a step to restore instead.
        own: whether that step is of this very run, whose files in ``run.dir`` go on too.
        requested: whether the user asked for it.
        notes: sentences that the user should read.
    """

    found: Found | None = None
    saved: SavedStep | None = None
    own: bool = False
    requested: bool = False
    notes: tuple[str, ...] = ()

    def state(self) -> RunState:
        """Returns the state of the run that the step was saved from, as it goes on here.

        Raises:
            StoreError: it is of another version.
        """
        assert self.saved is not None
        where = str(self.saved.path)
        state = RunState.decode(json.dumps(dict(self.saved.record.run_state)).encode(), where)
        results = {key: value for key, value in state.results.items() if key != "finished"}
        if self.requested:
            results[RESTORED] = where
        return replace(state, metrics_bytes=state.metrics_bytes if self.own else 0, results=results)


class _FoundStep(Found):
    """A step, compared with the configuration as a run in a store is."""

    @property
    def where(self) -> str:
        return f"the checkpoint {self.paths[0]}"

    @property
    def other_ways(self) -> str:
        return f"or another run.dir with run.restore={self.paths[0]} to begin a new run with its state"


def find_origin(config: Config) -> Origin:
    """Returns what the run that ``config`` describes goes on with; writes nothing.

    Raises:
        DirtyStoreError: the store holds a mixture of two steps and there is no checkpoint to go back to.
        StoreError, ConfigError: see ``run_store.find_run``; or ``run.restore`` is about another run than the store's.
        DataError: the step that was asked for is not there, or no step that there is is whole.
    """
    folder, own_steps = checkpoint_folder(config), find_steps(checkpoint_folder(config))
    dirty: DirtyStoreError | None = None
    missing: StoreError | None = None
    found = None
    try:
        found = find_run(config)
    except DirtyStoreError as error:
        dirty = error
    except DamagedStoreError as error:
        raise with_way_back(error, config) from error
    except StoreError as error:
        # Required, and not in the store: a checkpoint will do.
        if config.run.resume != "required" or not own_steps:
            raise
        missing = error
    if found is not None:
        _check_same_restore(config, found)
        _check_same_run(found, folder, own_steps)
        return Origin(found)
    if config.run.restore is not None:
        return _requested(config)
    if config.run.resume == "never":
        _check_no_steps(folder, own_steps)
        return Origin()
    saved, refused = newest_whole_step(folder)
    if saved is not None:
        return _own(config, saved, dirty, refused)
    if dirty is not None:
        raise _without_checkpoint(dirty, folder, refused)
    if missing is not None:
        raise missing
    if refused:
        raise DataError(
            f"there is no store to go on with, and of the checkpoints in '{folder}' none is whole: {_first(refused)}. "
            "To start anew choose another run.dir, or move the folder away"
        )
    return Origin()


def check_origin(
    origin: Origin,
    config: Config,
    shape: ModelConfig,
    adapters: Adapters | None,
    contents: Mapping[str, str],
) -> None:
    """Returns when the run may go on from the step, or begin with it; reads no weights.

    Args:
        shape, adapters: of the model that is trained.
        contents: of now, as ``resume.content_digests`` returns them.

    Raises:
        DataError: the step is of another model.
        ConfigError: it is of this run, whose settings change the training and are others now.
    """
    assert origin.saved is not None
    check_model(origin.saved, model_tensors(shape, adapters))
    held = origin.saved.adapters
    if held is not None and adapters is not None and held.scale != adapters.scale:
        raise DataError(
            f"the checkpoint '{origin.saved.path}' has adapters that are multiplied by {held.scale:g}, not by "
            f"{adapters.scale:g}, so that another model would be gone on with; nothing was changed. Use "
            f"lora.alpha={held.alpha:g} lora.rslora={str(held.rslora).lower()}"
        )
    if not origin.own:
        return
    state = origin.state()
    # The format is converted, and what is named is compared by its contents.
    changes = [
        change
        for change in training_changes(state.config, config)
        if not change.grows and change.key not in (*CONTENT_KEYS, "optimizer.state_format")
    ]
    found = _FoundStep(state, 0, "", (str(origin.saved.path),), "", {}, tuple(changes))
    refuse_changes(found, config, changes)
    check_contents(found, config, contents)


def with_way_back(error: DamagedStoreError, config: Config) -> DamagedStoreError:
    """Returns the error about a run's store with the checkpoint that the run can go on from, and how.

    Not done of itself: the steps since would be trained again, and a copy of the store may have them.
    """
    folder, paths = checkpoint_folder(config), " ".join(map(str, store_paths(config)))
    saved, refused = newest_whole_step(folder)
    if saved is not None and _is_of_folder(saved, RunFolder(config), _began_in(saved) or Path()):
        way = (
            f"The checkpoint of step {saved.record.step} in '{folder}' is whole: once the store is away (memascend "
            f"store wipe {paths}) the same command goes on from that step; a copy of the store, if there is one, has "
            "the steps since"
        )
    else:
        why = (
            f"of those in '{folder}' none is whole: {_first(refused)}" if refused else f"'{folder}' has none"
        )
        way = (
            f"There is no checkpoint to go on from: {why}. Without a copy of the store the run is lost; to begin anew "
            f"remove it (memascend store wipe {paths}) and choose another run.dir"
        )
    return DamagedStoreError(f"{error}; nothing was changed. {way}")


def _own(
    config: Config, saved: SavedStep, dirty: DirtyStoreError | None, refused: Mapping[int, str]
) -> Origin:
    started_in = _began_in(saved)
    if started_in is None:
        raise DataError(
            f"the checkpoint '{saved.path}' holds no run to go on with; move it away to start anew"
        )
    if not _is_of_folder(saved, RunFolder(config), started_in):
        raise ConfigError(
            f"'{saved.path.parent}' holds the checkpoints of another run than run.dir={config.run.dir!r}: of one that "
            f"began with run.dir={str(started_in)!r}; nothing was changed. Give the folder of that run, wherever it is "
            "now, to go on with it, another checkpoint.dir to start anew, or "
            f"run.restore={saved.path} to begin a new run with its state"
        )
    why = "there is no store" if dirty is None else "the store was being overwritten in place"
    notes = [
        f"{why}: going on from the checkpoint '{saved.path}'",
        *(
            f"warning: the checkpoint of step {step} is damaged, so that of step {saved.record.step} is used instead, "
            f"and the steps after it are trained again: {text}"
            for step, text in refused.items()
        ),
    ]
    return Origin(saved=saved, own=True, notes=tuple(notes))


def _began_in(saved: SavedStep) -> Path | None:
    folder = saved.record.run_state.get("config", {}).get("run", {}).get("dir")
    return None if folder is None else Path(folder).expanduser()


def _first(refused: Mapping[int, str]) -> str:
    return next(iter(refused.values()))


def _is_of_folder(saved: SavedStep, folder: RunFolder, started_in: Path) -> bool:
    """Whether the step is of the run whose files are in ``folder``: by their ids, which move with them.

    Where either has none, as of an earlier version or without ``status.json``, by the store or the place.
    """
    run, store = folder.owners()
    saved_by = saved.record.run_state.get("run_id")
    if run and saved_by:
        return bool(run == saved_by)
    if store is not None and store == saved.record.run_id:
        return True
    return started_in.resolve() == folder.path.resolve()


def _check_same_run(found: Found, folder: Path, steps: Sequence[int]) -> None:
    """Another run's steps in ``checkpoint.dir`` would be mixed with those of this one, and removed for them."""
    ours = found.state.run_id
    for step in reversed(steps):
        try:
            theirs = open_step(folder / str(step)).record.run_state.get("run_id")
        except DataError:
            continue
        if ours and theirs and ours != theirs:
            raise ConfigError(
                f"'{folder}' holds the checkpoints of another run than {found.where} does; nothing was changed. Give "
                "another checkpoint.dir, or the one that this run had"
            )
        return


def _requested(config: Config) -> Origin:
    wanted, folder = str(config.run.restore), checkpoint_folder(config)
    saved = resolve_step(folder, int(wanted)) if wanted.isdecimal() else resolve_step(_path_of(config))
    _ = saved.arrays
    own = saved.path.parent.resolve() == folder.resolve()
    later = [step for step in find_steps(folder) if step > saved.record.step] if own else []
    if later:
        raise ConfigError(
            f"run.restore={wanted} goes back to step {saved.record.step}, but '{folder}' holds later steps "
            f"({', '.join(map(str, later))}), which would be in the way; nothing was changed. Move them away or remove "
            f"them first, or give another run.dir with run.restore={saved.path}"
        )
    note = f"beginning with the checkpoint '{saved.path}'"
    return Origin(saved=saved, own=own, requested=True, notes=(note,))


def _check_same_restore(config: Config, found: Found) -> None:
    """A run that began with a step goes on by the same command; any other is not replaced by one."""
    wanted = config.run.restore
    if wanted is None:
        return
    began = found.state.results.get(RESTORED)
    if began is not None:
        asked, had = _path_of(config).resolve(), Path(began).resolve()
        if asked in (had, had.parent):
            return
    paths = " ".join(map(str, store_paths(config)))
    raise ConfigError(
        f"{found.where} holds a run at step {found.state.step}, which run.restore={wanted} would replace; nothing was "
        f"changed. Leave run.restore out to go on with it, give another run.dir, or remove it: "
        f"memascend store wipe {paths}"
    )


def _path_of(config: Config) -> Path:
    """The folder that ``run.restore`` names."""
    wanted = str(config.run.restore)
    return checkpoint_folder(config) / wanted if wanted.isdecimal() else Path(wanted).expanduser()


def _check_no_steps(folder: Path, steps: Sequence[int]) -> None:
    if steps:
        raise ConfigError(
            f"run.resume=never, but '{folder}' holds the checkpoints of a run (steps {', '.join(map(str, steps))}); "
            "nothing was changed. Choose another run.dir or checkpoint.dir, or move the folder away"
        )


def _without_checkpoint(dirty: DirtyStoreError, folder: Path, refused: Mapping[int, str]) -> DirtyStoreError:
    why = (
        f"of those in '{folder}' none is whole: {_first(refused)}"
        if refused
        else f"there is none in '{folder}'"
    )
    return DirtyStoreError(
        f"{dirty}. There is no checkpoint to go back to either: {why}", dirty.generation, dirty.run_state
    )
