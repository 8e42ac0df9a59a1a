# SPDX-License-Identifier: Apache-2.0
"""The store of a run: created with room for everything, or opened again where an earlier run left it."""

from __future__ import annotations

from pathlib import Path

from memascend_jax.config import Config, has_store, store_paths
from memascend_jax.errors import ConfigError, StoreError
from memascend_jax.memory.arena import PinnedArena
from memascend_jax.recipes.resume import Found, check_settings
from memascend_jax.storage.device import resolve_paths
from memascend_jax.storage.formatting import is_member
from memascend_jax.storage.store_errors import DamagedStoreError, dirty_store
from memascend_jax.storage.tensor_store import TensorStore, bytes_needed
from memascend_jax.training.plan import RunPlan
from memascend_jax.training.plan_memory import BOUNCE_BYTES
from memascend_jax.training.run_state import RunState
from memascend_jax.units import format_bytes


def find_run(config: Config) -> Found | None:
    """Returns the run that the configured store holds, or None when there is nothing to go on with.

    Raises:
        DirtyStoreError: its last run ended while it was overwritten in place.
        StoreError: none is there but one is required, or it holds something else.
        ConfigError: ``run.resume`` forbids to use the one that is there, or the store's run was started with other
            settings that change the training.
    """
    if not has_store(config):
        return None
    paths = [str(path) for path in store_paths(config)]
    exists = any(map(is_member, resolve_paths(paths)))
    resume = config.run.resume
    if not exists:
        if resume == "required":
            raise StoreError(f"run.resume=required, but there is no store at {', '.join(paths)}")
        return None
    with TensorStore.open(paths, read_only=True, direct_io=config.offload.direct_io) as store:
        generation, data, dirty = store.generation, store.run_state, store.dirty
        store_id, durability = store.store_id, store.durability
        specs = {name: store.spec(name) for name in store.names()}
        scratch_bytes = int(store.inspect()["scratch_bytes"])
    if not data and generation == 0:
        # Created, but interrupted before its first commit: nothing is lost by starting over.
        return None
    if not data:
        raise StoreError(
            f"the store {', '.join(paths)} holds tensors of something else (generation {generation}); nothing was "
            "changed. Choose another offload.store or run.dir"
        )
    if resume == "never":
        raise ConfigError(
            f"there is a run in the store {', '.join(paths)} and run.resume=never; nothing was changed. Choose "
            f"another offload.store or run.dir, or remove the run: memascend store wipe {' '.join(paths)}"
        )
    if dirty:
        raise dirty_store(paths, generation, data)
    state = RunState.decode(data, ", ".join(paths))
    found = Found(state, generation, store_id, tuple(paths), durability, specs, scratch_bytes=scratch_bytes)
    return check_settings(found, config)


def check_whole(config: Config) -> None:
    """Returns when every tile of the run's store is what was written: seconds, against days of training on what is not.

    Reads all of it, before anything of the run is written.

    Raises:
        DamagedStoreError: some tiles are not; with the first of them.
    """
    offload, paths = config.offload, [str(path) for path in store_paths(config)]
    with TensorStore.open(
        paths,
        read_only=True,
        io_backend=offload.io_backend,
        direct_io=offload.direct_io,
        bounce_bytes=BOUNCE_BYTES,
    ) as store:
        report, generation = store.verify(), store.generation
    if report.faults:
        raise DamagedStoreError(
            f"the disk returned other data than was written: {len(report.faults):,} of {report.tiles:,} tiles of store "
            f"'{', '.join(paths)}' at generation {generation:,} do not match their checksums; first: {report.faults[0]}"
        )


def durability_note(config: Config, plan: RunPlan, store: TensorStore) -> str | None:
    """Returns what the user must know of a durability that nobody asked for, or that nothing makes safe, or None."""
    if store.durability == "step":
        return None
    every = config.checkpoint.every
    lost = f"goes back to the last checkpoint, at most {every} steps" if every else "loses this run"
    if config.offload.durability != "plan":
        return (
            None if every else f"durability: checkpoint without checkpoint.every: a crash or power cut {lost}"
        )
    needed = bytes_needed(plan.specs, plan.scratch_bytes, "step")
    more = needed - bytes_needed(plan.specs, plan.scratch_bytes, store.durability)
    return (
        f"durability: checkpoint, as the disk is too small for step: a crash or power cut {lost}. "
        f"offload.durability=step would lose nothing; its store takes {format_bytes(needed)}, "
        f"{format_bytes(more)} more than this one"
    )


def open_store(config: Config, plan: RunPlan, arena: PinnedArena, *, resumed: bool) -> TensorStore:
    """Returns the run's store, created with every extent of ``plan`` reserved unless ``resumed``."""
    paths = [str(path) for path in store_paths(config)]
    offload = config.offload
    if resumed:
        return TensorStore.open(
            paths,
            io_backend=offload.io_backend,
            direct_io=offload.direct_io,
            arena=arena,
            bounce_bytes=BOUNCE_BYTES,
            # Just done, see ``check_whole``.
            check_after_crash=False,
        )
    for path in map(Path, paths):
        # Any other folder must be there already: the disk may not be mounted.
        if path.is_relative_to(config.run.dir):
            path.parent.mkdir(parents=True, exist_ok=True)
    return TensorStore.create(
        paths,
        specs=plan.specs,
        scratch_bytes=plan.scratch_bytes,
        durability=plan.durability,
        io_backend=offload.io_backend,
        direct_io=offload.direct_io,
        arena=arena,
        bounce_bytes=BOUNCE_BYTES,
        overwrite=any(map(is_member, resolve_paths(paths))),
    )
