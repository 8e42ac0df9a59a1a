# SPDX-License-Identifier: Apache-2.0
"""What happens between finding a store's members and using it: recovery, checks, repairs, the session mark."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from memascend_jax.errors import StoreError
from memascend_jax.storage import formatting
from memascend_jax.storage.bounce import Bounce
from memascend_jax.storage.commit import Committer
from memascend_jax.storage.commit_records import split_run_state
from memascend_jax.storage.recovery import choose_generation
from memascend_jax.storage.space import Space
from memascend_jax.storage.store_errors import dirty_store
from memascend_jax.storage.tile_table import TileTable
from memascend_jax.storage.verify import verify_tensors
from memascend_jax.storage.volume import Volume

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What the disk said of the generation now in memory, and of those before it."""

    session: int
    #: Whether the last writer closed the store.
    closed: bool
    #: Whether no later generation can have existed.
    trusted: bool
    stale: tuple[tuple[int, int], ...]


def load_generation(volume: Volume, table: TileTable, space: Space, committer: Committer) -> Recovered:
    """Fills ``table``, ``space`` and ``committer`` from the newest generation on disk. Writes nothing.

    Raises:
        StoreError: no generation can be read, or the members disagree.
    """
    session, closed = formatting.read_session(volume)
    choice = choose_generation(committer.read_slots(), volume.path)
    space.reserve(choice.catalog.tensors)
    for tensor in choice.catalog.tensors:
        table.add(tensor)
    table.load(choice.catalog.place, choice.catalog.checksums)
    committer.loaded(choice.catalog)
    return Recovered(session, closed, choice.trusted, choice.stale)


def check_and_repair(
    volume: Volume,
    table: TileTable,
    committer: Committer,
    bounce: Bounce,
    recovered: Recovered,
    check_after_crash: bool,
    check_always: bool,
) -> None:
    """Makes sure that the loaded generation is whole, then makes every copy on disk agree with it.

    Nothing is written before everything has been checked.

    Raises:
        DirtyStoreError: tiles were overwritten in place after the last commit.
        StoreError: tiles that do not match their checksums.
    """
    if committer.dirty:
        _, user = split_run_state(committer.run_state)
        raise dirty_store([member.path for member in volume.members], committer.generation, user)
    if not recovered.trusted or check_always or (check_after_crash and not recovered.closed):
        _check_all_tiles(volume, table, committer.generation, bounce, recovered.trusted)
    if recovered.stale:
        committer.rewrite(recovered.stale)
    if not formatting.superblocks_intact(volume):
        volume.write_superblocks(volume.superblock)


def begin_session(volume: Volume, session: int) -> None:
    """Marks the store as open for writing: the real aligned write that finds out what the path cannot do.

    Raises:
        StoreError: the disk refuses it or returns something else.
    """
    volume.write_session(session, closed=False)
    volume.flush()
    if formatting.read_session(volume) != (session, False):
        raise StoreError(
            f"'{volume.path}' did not return what was just written to it; the device or file system is faulty"
        )


def end_session(volume: Volume, session: int) -> None:
    """Marks the store as closed by its writer."""
    volume.flush()
    volume.write_session(session, closed=True)
    volume.flush()


def _check_all_tiles(
    volume: Volume, table: TileTable, generation: int, bounce: Bounce, trusted: bool
) -> None:
    started = time.monotonic()
    report = verify_tensors(volume, bounce, list(table.tensors.values()))
    _log.info("checked %d tiles in %.1f s", report.tiles, time.monotonic() - started)
    if report.faults:
        why = "" if trusted else ", and the catalog that would hold a newer one is damaged"
        raise StoreError(
            f"cannot open store '{volume.path}' at generation {generation:,}: {len(report.faults):,} of "
            f"{report.tiles:,} tiles do not match their checksums{why}; first: {report.faults[0]}; remove the store "
            f"and start again: memascend store wipe {' '.join(member.path for member in volume.members)}"
        )
