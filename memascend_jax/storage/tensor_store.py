# SPDX-License-Identifier: Apache-2.0
"""``TensorStore``: tensors on SSD that change together or not at all.

What lives here is the public surface; the work is done by ``formatting`` (paths and members), ``tile_io`` (reads
and writes), ``commit`` (generations), ``elements`` and ``rows`` (copies), ``verify``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from memascend_jax.dtypes import dtype_name, to_dtype
from memascend_jax.errors import StoreError
from memascend_jax.storage import elements, formatting, opening, rows, verify
from memascend_jax.storage.batch import Batch
from memascend_jax.storage.bounce import Bounce
from memascend_jax.storage.capacity import bytes_needed
from memascend_jax.storage.commit import Committer
from memascend_jax.storage.commit_records import CommitRecords
from memascend_jax.storage.creation import CreationPlan, Weights
from memascend_jax.storage.device import PathLike, resolve_paths
from memascend_jax.storage.engine import ReusedBuffers
from memascend_jax.storage.inspection import describe
from memascend_jax.storage.ladder import Fallback, fallbacks, report
from memascend_jax.storage.options import IoArguments, IoCounters, IoOptions
from memascend_jax.storage.scratch import Scratch
from memascend_jax.storage.space import Space
from memascend_jax.storage.spec import TensorLayout, TensorSpec, layouts_of
from memascend_jax.storage.statistics import MemberStatistics
from memascend_jax.storage.store_errors import DirtyStoreError
from memascend_jax.storage.superblock import Durability
from memascend_jax.storage.ticket import Ticket
from memascend_jax.storage.tile_io import TileIo
from memascend_jax.storage.tile_table import UNWRITTEN, StoredTensor, TileTable
from memascend_jax.storage.verify import Fault, VerifyReport
from memascend_jax.storage.volume import Volume
from memascend_jax.storage.whole_number import ANY_SIZE, whole_number
from memascend_jax.storage.wipe import wipe
from memascend_jax.units import round_up

__all__ = [
    "Batch",
    "DirtyStoreError",
    "Fallback",
    "Fault",
    "IoCounters",
    "MemberStatistics",
    "Scratch",
    "StoreError",
    "TensorSpec",
    "TensorStore",
    "Ticket",
    "VerifyReport",
    "bytes_needed",
    "wipe",
]

DEFAULT_TILE_BYTES = 4 << 20


class TensorStore:
    """Tensors on one or more files or block devices, with step-atomic commits and a checksum per tile.

    Writes go to places that the last committed generation does not use, and ``commit`` makes all of them current at
    once: after a crash the store opens at exactly the last committed generation. (In ``durability="checkpoint"``
    tiles are overwritten in place; a crash before the next commit is recognised and the store refused.)

    Example::

        with TensorStore.create("/mnt/nvme", capacity="4GiB") as store:
            store.put("w", np.arange(10, dtype=np.float32))
            store.commit(b"step 1")
        with TensorStore.open("/mnt/nvme") as store:
            store.get("w"), store.run_state

    Threading: all methods may be called from any thread; a ``Batch`` belongs to one. Lifetime: memory given by
    address must stay alive and unchanged until the ticket's ``wait`` returns. ``close`` drains the I/O in flight.
    """

    def __init__(self, volume: Volume, options: IoOptions, *, read_only: bool) -> None:
        """Not for users: ``create`` and ``open`` build stores."""
        self._volume = volume
        self._read_only = read_only
        self._table = TileTable()
        self._space = Space(volume)
        self._io = TileIo(volume, self._table, check_reads=options.check_reads)
        self._committer = Committer(volume, self._table, self._io)
        self._io.before_overwrite = self._committer.mark_dirty
        self._records = CommitRecords(lambda: self._committer.run_state)
        self._bounce = Bounce(options.bounce_bytes, options.arena)
        self._has_arena = options.arena is not None
        self._scratch: dict[str, Scratch] = {}
        self._session = 0
        if read_only:
            self._io.write_refusal = f"store '{volume.path}' was opened read-only; open it again to write"

    @classmethod
    def create(
        cls,
        paths: PathLike | Sequence[PathLike],
        *,
        capacity: int | str | None = None,
        specs: Sequence[TensorSpec] = (),
        scratch_bytes: int = 0,
        durability: Durability = "step",
        block_bytes: int = 4096,
        weights: Weights | None = None,
        speeds: Sequence[float] | None = None,
        catalog_bytes: int | None = None,
        discard: bool = True,
        overwrite: bool = False,
        erase_foreign_data: bool | Collection[str] = False,
        continues: TensorStore | None = None,
        **io: Unpack[IoArguments],
    ) -> TensorStore:
        """Returns a new store whose space is reserved in full.

        Args:
            paths: one path per member: a directory (the file ``memascend.store`` in it), a file, or a block
                device.
            capacity: bytes for tensors (both places of each) and scratch, or a text such as ``"4GiB"``; None:
                what ``specs`` and ``scratch_bytes`` need, or without those the whole of the block devices.
            specs: tensors to declare, laid out in this order.
            scratch_bytes: part of the capacity kept for scratch extents.
            durability: ``step`` gives each tile two places; ``checkpoint`` overwrites in place in half the space.
            block_bytes: unit of disk space, a multiple of the devices' sector.
            weights: the share of each member, for SSDs of unequal speed; ``"measure"``: found by writing and
                reading a sample on each, which changes nothing; None: equal.
            speeds: instead of weights, the speed of each member in any unit.
            catalog_bytes: room for the catalog; None: enough for ``specs`` twice, or for the capacity.
            discard: tell the SSDs that what was on the members, as far as the store takes them, is no longer needed.
            overwrite: replace a store that exists at a path.
            erase_foreign_data: replace other data on a path: True, or the paths that may be erased.
            continues: the store that this one takes the place of, under the same ``store_id``.
            **io: see ``IoOptions``.

        Raises:
            StoreError: a path that cannot or must not become a member, a bad spec, or not enough space. Nothing
                of the user's has been changed then, and files that were made are removed.
        """
        options = IoOptions(**io)
        resolved = resolve_paths(paths)
        layouts = layouts_of(specs, block_bytes)
        plan = CreationPlan(
            layouts=layouts,
            capacity=capacity,
            scratch_bytes=scratch_bytes,
            durability=durability,
            block_bytes=block_bytes,
            catalog_bytes=catalog_bytes,
            weights=weights,
            speeds=speeds,
        )
        plan.check(resolved)
        erase = erase_foreign_data if isinstance(erase_foreign_data, bool) else set(erase_foreign_data)
        volume = formatting.create_volume(
            resolved,
            lambda members: plan.geometry(members, options.engine()),
            durability,
            block_bytes=block_bytes,
            discard=discard,
            whole_devices=plan.fills_devices,
            direct_io=options.direct_io,
            make_engine=options.engine(),
            overwrite=overwrite,
            erase_foreign_data=erase,
            store_id=None if continues is None else bytes.fromhex(continues.store_id),
        )
        store = None
        try:
            store = cls(volume, options, read_only=False)
            store._declare(layouts)
            store._committer.write_first()
            volume.write_superblocks(replace(volume.superblock, ready=True))
            store._begin_session(1)
        except BaseException:
            formatting.abandon(volume.members, volume)
            if store is not None:
                store._bounce.close()
            raise
        report(volume.path, store.fallbacks, store.notes)
        return store

    @classmethod
    def open(
        cls,
        paths: PathLike | Sequence[PathLike],
        *,
        read_only: bool = False,
        check_after_crash: bool = True,
        check_always: bool = False,
        **io: Unpack[IoArguments],
    ) -> TensorStore:
        """Returns the store at ``paths`` in its last committed generation.

        A store whose last writer did not close it is checked tile by tile first (``check_after_crash``); one whose
        newest catalog is damaged always is. Members may be given in any order.

        Args:
            read_only: change nothing, refuse writes, and let damaged data be looked at: nothing is checked.
            check_always: check every tile also of a store that was closed.
            **io: see ``IoOptions``.

        Raises:
            DirtyStoreError: tiles were overwritten in place after the last commit.
            StoreError: not a store, in use, members missing, or data that does not match its checksums.
        """
        options = IoOptions(**io)
        volume = formatting.open_volume(
            resolve_paths(paths),
            read_only=read_only,
            direct_io=options.direct_io,
            make_engine=options.engine(),
        )
        store = None
        try:
            store = cls(volume, options, read_only=read_only)
            recovered = opening.load_generation(volume, store._table, store._space, store._committer)
            if not read_only:
                opening.check_and_repair(
                    volume,
                    store._table,
                    store._committer,
                    store._bounce,
                    recovered,
                    check_after_crash,
                    check_always,
                )
                store._begin_session(recovered.session + 1)
        except BaseException:
            volume.close()
            if store is not None:
                store._bounce.close()
            raise
        report(volume.path, store.fallbacks, store.notes)
        return store

    @staticmethod
    def wipe(paths: PathLike | Sequence[PathLike], *, incomplete: bool = False) -> list[str]:
        """Removes the store at ``paths`` for good and returns the paths; see ``storage.wipe``."""
        return wipe(paths, incomplete=incomplete)

    def names(self) -> list[str]:
        """Returns the names of all tensors in the order they were declared."""
        self._io.check_open()
        return list(self._table.tensors)

    def spec(self, name: str) -> TensorSpec:
        """Returns what was declared of ``name``; raises ``StoreError`` when there is no such tensor."""
        return self._tensor(name).layout.spec

    def __contains__(self, name: object) -> bool:
        return name in self._table.tensors

    def tiles(self, name: str) -> int:
        """Returns how many tiles ``name`` has; an empty tensor has one."""
        return self._tensor(name).layout.tiles

    def tile_span(self, name: str, tile: int) -> tuple[int, int]:
        """Returns (first element, number of elements) of one tile."""
        layout = self._tensor(name).layout
        tile = whole_number(tile, f"the tile of tensor '{name}'", least=ANY_SIZE)
        if not 0 <= tile < layout.tiles:
            raise StoreError(f"tensor '{name}' has tiles 0 to {layout.tiles - 1}, not {tile}")
        return layout.tile_span(tile)

    def slot_bytes(self, n_elements: int, dtype: str) -> int:
        """Returns the room that memory needs to read or write ``n_elements``: the bytes rounded up to the block."""
        n_elements = whole_number(n_elements, "n_elements")
        return round_up(n_elements * to_dtype(dtype).itemsize, self._volume.geometry.block_bytes)

    def is_written(self, name: str) -> bool:
        """Returns whether every tile of ``name`` holds data."""
        return not bool((self._tensor(name).place == UNWRITTEN).any())

    @property
    def generation(self) -> int:
        """Number of the last committed generation; 0 in a new store. Grows with every commit, not always by one."""
        return self._committer.generation

    @property
    def run_state(self) -> bytes:
        """What the last ``commit`` was given."""
        return self._records.user

    @property
    def records(self) -> CommitRecords:
        """What ``memascend_jax.offload`` keeps with every commit, whoever commits."""
        return self._records

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._io.closed_reason is not None

    @property
    def dirty(self) -> bool:
        """Whether committed tiles were overwritten in place since the last commit."""
        return self._committer.dirty

    @property
    def store_id(self) -> str:
        """The store's identity, 32 hex digits, the same on all members."""
        return self._volume.superblock.store_id.hex()

    @property
    def paths(self) -> list[str]:
        """The members' paths in the order of their index."""
        return [member.path for member in self._volume.members]

    @property
    def capacity_bytes(self) -> int:
        """Bytes for tensors and scratch."""
        return self._volume.geometry.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that tensors take, both places counted, and those that the next commit frees."""
        return self._space.used_bytes

    @property
    def block_bytes(self) -> int:
        """Unit of disk space, bytes."""
        return self._volume.geometry.block_bytes

    @property
    def durability(self) -> Durability:
        """``step`` or ``checkpoint``."""
        return self._volume.superblock.durability

    @property
    def read_only(self) -> bool:
        """Whether the store was opened read-only."""
        return self._read_only

    @property
    def io_backend(self) -> str:
        """The engine in use: ``io_uring`` or ``threads``."""
        return self._volume.engine.backend

    @property
    def io_reason(self) -> str:
        """Why the engine is not io_uring; empty when it is."""
        return self._volume.engine.backend_reason

    @property
    def direct(self) -> bool:
        """Whether all members bypass the page cache."""
        return all(member.direct for member in self._volume.members)

    @property
    def notes(self) -> list[str]:
        """What the user should know about the members' file systems."""
        return [note for member in self._volume.members for note in member.notes]

    @property
    def fallbacks(self) -> list[Fallback]:
        """Which of the fastest ways of I/O are not in use, and why."""
        return fallbacks(self._volume, self._has_arena)

    def batch(self) -> Batch:
        """Returns an empty batch: reads and writes of page-aligned memory without a copy."""
        self._io.check_open()
        return Batch(self._io)

    def scratch(self, name: str, nbytes: int) -> Scratch:
        """Returns ``nbytes`` of the store, outside all generations, under a name that is not in use.

        Raises:
            StoreError: the name is taken, there is no space, or ``nbytes`` is no whole number from 0 on.
        """
        self._io.check_writable()
        if not isinstance(name, str):
            raise StoreError(f"the name of scratch must be a str, got {name!r} ({type(name).__name__})")
        nbytes = whole_number(nbytes, f"the bytes of scratch '{name}'")
        with self._io.lock:
            if name in self._scratch:
                raise StoreError(f"scratch '{name}' exists already; release it first")
            size = round_up(nbytes, self.block_bytes)
            address = self._space.allocate_scratch(name, size)
            scratch = Scratch(self._io, name, address, size, self.block_bytes)
            self._scratch[name] = scratch
            return scratch

    def release_scratch(self, name: str) -> None:
        """Gives the extent of scratch ``name`` back; waits for what is in flight on it."""
        self._io.check_open()
        with self._io.write_lock:
            self._io.settle_all()
            with self._io.lock:
                scratch = self._scratch.pop(name, None)
                if scratch is None:
                    raise StoreError(f"no scratch '{name}' in store '{self._volume.path}'")
                self._space.release_scratch(*scratch.extent)

    def declare(self, spec: TensorSpec) -> None:
        """Adds a tensor without data; it is on disk with the next ``commit``.

        Raises:
            StoreError: the name is taken, the spec is bad, or the store has no room for the tensor or, in its
                catalog, for what describes it. The store is as it was then.
        """
        self._io.check_writable()
        layout = TensorLayout(spec, self.block_bytes)
        with self._io.write_lock, self._io.lock:
            self._declare([layout])

    def remove(self, name: str) -> None:
        """Takes ``name`` out of the store; its space is free again after the next ``commit``."""
        self._io.check_writable()
        with self._io.write_lock:
            self._tensor(name)
            self._io.settle_all()
            with self._io.lock:
                self._take_out(self._table.tensors[name])

    def redeclare(self, removed: Iterable[str], specs: Sequence[TensorSpec]) -> None:
        """Takes the tensors ``removed`` out and adds those of ``specs``, without data, which may have their names.

        Raises:
            StoreError: there is no room, or another tensor has one of the names. Nothing is changed then.
        """
        self._io.check_writable()
        layouts = layouts_of(specs, self.block_bytes)
        with self._io.write_lock:
            self._io.settle_all()
            with self._io.lock:
                old = [self._tensor(name) for name in removed]
                gone = {tensor.name for tensor in old}
                for spec in specs:
                    if spec.name in self._table.tensors and spec.name not in gone:
                        raise StoreError(f"tensor '{spec.name}' exists already; remove it first")
                if layouts:
                    self._committer.check_room(layouts, [tensor.layout for tensor in old])
                placed = self._space.place(layouts)
                for tensor in old:
                    self._take_out(tensor)
                for tensor in placed:
                    self._table.add(tensor)
                self._committer.tensors_changed(layouts)

    def put(self, name: str, array: npt.ArrayLike) -> None:
        """Writes ``array`` as tensor ``name``, declared as needed; a tensor of another shape or type is replaced.

        Raises:
            StoreError: no room, a read-only tensor, or an element type that no tensor is stored in. A tensor that
                was there is still there then.
        """
        self._io.check_writable()
        values = np.asarray(array)
        try:
            dtype = dtype_name(values.dtype)
        except ValueError as error:
            raise StoreError(f"cannot put tensor '{name}': {error}") from None
        with self._io.write_lock:
            known = self._table.tensors.get(name)
            if known is None or (known.layout.spec.dtype, known.layout.spec.shape) != (dtype, values.shape):
                tile = max(DEFAULT_TILE_BYTES // values.dtype.itemsize, 1)
                spec = TensorSpec(name, dtype, values.shape, tile_elements=tile)
                self._put_in(TensorLayout(spec, self.block_bytes), known)
            self.write_elements(name, 0, values.reshape(-1))

    def get(self, name: str) -> npt.NDArray[Any]:
        """Returns tensor ``name`` as a new array, every checksum compared.

        Raises:
            StoreError: no such tensor, never written, or the data does not match its checksum.
        """
        layout = self._tensor(name).layout
        return self.read_elements(name, 0, layout.elements).reshape(layout.spec.shape)

    def write_elements(self, name: str, start: int, array: npt.ArrayLike) -> None:
        """Writes whole tiles of ``name`` from element ``start`` on, copied through bounded memory.

        Raises:
            StoreError: ``array`` has another element type, or does not begin and end at tiles.
        """
        tensor = self._tensor(name)
        values = np.asarray(array)
        if values.dtype != to_dtype(tensor.layout.spec.dtype):
            raise StoreError(
                f"cannot write {values.dtype} to tensor '{name}' of {tensor.layout.spec.dtype}; convert it first"
            )
        elements.write_elements(self._io, self._bounce, tensor, start, values.reshape(-1))

    def read_elements(
        self, name: str, start: int, n_elements: int, buffers: ReusedBuffers | None = None
    ) -> npt.NDArray[Any]:
        """Returns ``n_elements`` of the flattened ``name`` from ``start`` as an array, in memory of its own.

        The checksum of each tile (each group of rows of a row-accessed tensor) that is read whole is compared.

        Args:
            buffers: where the memory comes from, for one large piece after the other; None: it is new.
        """
        return elements.read_elements(self._io, self._tensor(name), start, n_elements, buffers)

    def read_rows(self, name: str, rows_wanted: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Fills ``out[i]`` with row ``rows_wanted[i]``; rows may repeat and come in any order.

        Args:
            rows_wanted: int64 ``[n]``, indices of the first axis.
            out: C-contiguous, the tensor's element type, ``n`` rows. Rows of whole blocks are read without a copy
                into memory that is aligned to 512 bytes, such as a slot of a ``PinnedArena``.

        Raises:
            StoreError: a row out of range, an unfit ``out``, or data that does not match its checksum.
        """
        rows.read_rows(self._io, self._bounce, self._tensor(name), rows_wanted, out)

    def commit(self, run_state: bytes = b"") -> int:
        """Makes everything written so far durable as one new generation, with ``run_state``; returns its number.

        Waits for all writes in flight. Raises ``StoreError`` when one of them failed, the disk fails now,
        ``run_state`` is neither bytes nor gives its own, or a state of ``memascend_jax.offload`` is half changed; whole
        ones are part of the generation.
        """
        self._io.check_writable()
        try:
            state = memoryview(run_state).tobytes()
        except TypeError:
            raise StoreError(
                f"run_state must be bytes, got {run_state!r:.80} ({type(run_state).__name__}); encode it first"
            ) from None
        with self._io.write_lock:
            generation = self._committer.commit(self._records.with_user(state))
            with self._io.lock:
                self._space.committed()
            return generation

    def rollback(self, names: Iterable[str]) -> None:
        """Makes what the last commit has of the tensors ``names`` their contents again; later writes of them are lost.

        Waits for all I/O in flight.

        Raises:
            StoreError: no such tensor, it was declared after the last commit, or the store overwrites in place.
        """
        self._committer.rollback([self._tensor(name) for name in names])

    def verify(self) -> VerifyReport:
        """Reads the newest contents of every tensor and returns which do not match their checksums."""
        self._io.check_open()
        with self._io.write_lock:
            self._io.settle_all()
            return verify.verify_tensors(self._volume, self._bounce, list(self._table.tensors.values()))

    def counters(self) -> IoCounters:
        """Returns what this session has moved so far."""
        counts = self._volume.engine.counters()
        return IoCounters(*(int(counts[name]) for name in IoCounters.__slots__))

    def statistics(self) -> list[MemberStatistics]:
        """Returns what each member has done in this session: bytes, requests, latencies, queue depth."""
        self._io.check_open()
        return self._volume.statistics()

    def inspect(self) -> dict[str, Any]:
        """Returns a description of the store, fit for JSON."""
        self._io.check_open()
        facts = describe(self._volume, self._table, self._space, self._committer)
        facts["fallbacks"] = [fallback.to_json() for fallback in self.fallbacks]
        return facts

    def close(self) -> None:
        """Waits for all I/O and closes the store; what was not committed is gone. Does nothing the second time."""
        if self._io.closed_reason is not None:
            return
        with self._io.write_lock, self._io.lock:
            self._io.settle_all()
            clean = self._io.write_refusal is None
            self._io.closed_reason = f"store '{self._volume.path}' is closed; open it again"
            try:
                if clean:
                    opening.end_session(self._volume, self._session)
            finally:
                self._volume.close()
                self._bounce.close()

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tensor(self, name: str) -> StoredTensor:
        self._io.check_open()
        tensor = self._table.tensors.get(name)
        if tensor is None:
            raise self._io.unknown(name)
        return tensor

    def _put_in(self, layout: TensorLayout, replaced: StoredTensor | None) -> None:
        """Declares ``layout`` in place of ``replaced``, which stays when there is no room."""
        if replaced is None:
            with self._io.lock:
                self._declare([layout])
            return
        self._io.settle_all()
        with self._io.lock:
            self._committer.check_room([layout], [replaced.layout])
            (placed,) = self._space.place([layout])
            self._take_out(replaced)
            self._table.add(placed)
            self._committer.tensors_changed([layout])

    def _take_out(self, tensor: StoredTensor) -> None:
        self._space.free_at_commit(self._table.remove(tensor.name))
        self._committer.tensors_changed(removed=[tensor.layout])

    def _declare(self, layouts: Sequence[TensorLayout]) -> None:
        for layout in layouts:
            if layout.spec.name in self._table.tensors:
                raise StoreError(f"tensor '{layout.spec.name}' exists already; remove it first")
        if layouts:
            self._committer.check_room(layouts)
        for tensor in self._space.place(layouts):
            self._table.add(tensor)
        self._committer.tensors_changed(layouts)

    def _begin_session(self, session: int) -> None:
        self._session = session
        opening.begin_session(self._volume, session)
