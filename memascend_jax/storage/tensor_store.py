# SPDX-License-Identifier: Apache-2.0
"""``TensorStore``: tensors on SSD that change together or not at all.

What lives here is the public surface; the work is done by ``formatting`` (paths and members), ``tile_io`` (reads
and writes), ``commit`` (generations), ``elements`` and ``rows`` (copies), ``verify``.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from memascend_jax.dtypes import dtype_name, to_dtype
from memascend_jax.errors import StoreError
from memascend_jax.storage import elements, formatting, rows, verify
from memascend_jax.storage.batch import Batch
from memascend_jax.storage.bounce import DEFAULT_BOUNCE_BYTES, Arena, Bounce
from memascend_jax.storage.capacity import data_bytes_needed, plan_store
from memascend_jax.storage.commit import Committer
from memascend_jax.storage.device import DirectIo, PathLike, resolve_paths
from memascend_jax.storage.engine import EngineFactory, native_engine
from memascend_jax.storage.extents import ExtentAllocator
from memascend_jax.storage.recovery import choose_generation
from memascend_jax.storage.scratch import Scratch
from memascend_jax.storage.spec import TensorLayout, TensorSpec, layouts_of
from memascend_jax.storage.store_errors import DirtyStoreError
from memascend_jax.storage.superblock import Durability
from memascend_jax.storage.tile_io import Ticket, TileIo
from memascend_jax.storage.tile_table import NO_PLACE, UNWRITTEN, StoredTensor, TileTable
from memascend_jax.storage.verify import Fault, VerifyReport
from memascend_jax.storage.volume import Volume
from memascend_jax.units import format_bytes, round_up

__all__ = ["Batch", "Fault", "IoCounters", "Scratch", "TensorSpec", "TensorStore", "Ticket", "VerifyReport"]

_log = logging.getLogger(__name__)

IoBackend = Literal["auto", "io_uring", "threads"]
DEFAULT_TILE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class IoCounters:
    """What this session has moved, metadata included: bytes and requests as given to the kernel."""

    read_bytes: int
    write_bytes: int
    read_requests: int
    write_requests: int


@dataclass(frozen=True, slots=True)
class IoOptions:
    """How a store does its I/O; none of it is in the format.

    Args:
        io_backend: ``auto`` takes io_uring where the kernel allows it, else threads; ``io_reason`` says why.
        direct_io: ``required`` refuses paths without O_DIRECT, ``optional`` falls back to the page cache.
        arena: a ``PinnedArena`` whose slots are read and written; its regions are registered with the kernel.
        queue_depth: requests in flight.
        request_bytes: largest single request, bytes.
        bounce_bytes: the store's own memory for copies, bytes, from the arena when there is one.
        check_reads: compare the checksum of every tile that a batch reads whole, when its ticket is waited for.
    """

    io_backend: IoBackend = "auto"
    direct_io: DirectIo = "required"
    arena: Arena | None = None
    queue_depth: int = 32
    request_bytes: int = 1 << 20
    bounce_bytes: int = DEFAULT_BOUNCE_BYTES
    check_reads: bool = False
    make_engine: EngineFactory | None = None

    def engine(self) -> EngineFactory:
        """Returns what builds the engine over the members' descriptors."""
        if self.make_engine is not None:
            return self.make_engine
        return functools.partial(
            native_engine,
            backend=self.io_backend,
            queue_depth=self.queue_depth,
            request_bytes=self.request_bytes,
            regions=() if self.arena is None else self.arena.regions(),
        )


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
        geometry = volume.geometry
        self._volume = volume
        self._read_only = read_only
        self._table = TileTable()
        self._io = TileIo(volume, self._table, check_reads=options.check_reads)
        self._committer = Committer(volume, self._table, self._io)
        self._io.before_overwrite = self._committer.mark_dirty
        self._bounce = Bounce(options.bounce_bytes, options.arena)
        self._request_bytes = options.request_bytes
        data_end = geometry.capacity_bytes - geometry.scratch_bytes
        self._space = ExtentAllocator(0, data_end, geometry.block_bytes)
        self._scratch_space = ExtentAllocator(data_end, geometry.capacity_bytes, geometry.block_bytes)
        self._scratch: dict[str, Scratch] = {}
        #: Extents of removed tensors, which the last committed generation may still refer to.
        self._freed: list[tuple[int, int]] = []
        self._session = 0
        if read_only:
            self._io.write_refusal = f"store '{volume.path}' was opened read-only; open it again to write"

    # ------------------------------------------------------------------ create and open

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
        weights: Sequence[int] | None = None,
        catalog_bytes: int | None = None,
        overwrite: bool = False,
        erase_foreign_data: bool | Collection[str] = False,
        **io: Any,
    ) -> TensorStore:
        """Returns a new store whose space is reserved in full.

        Args:
            paths: one path per member: a directory (the file ``memascend.store`` in it), a file, or a block
                device.
            capacity: bytes for tensors (both places of each) and scratch, or a text such as ``"4GiB"``; None:
                what ``specs`` and ``scratch_bytes`` need.
            specs: tensors to declare, laid out in this order.
            scratch_bytes: part of the capacity kept for scratch extents.
            durability: ``step`` gives each tile two places; ``checkpoint`` overwrites in place in half the space.
            block_bytes: unit of disk space, a multiple of the devices' sector.
            weights: the share of each member, for SSDs of unequal speed; None: equal.
            catalog_bytes: room for the catalog; None: enough for ``specs`` twice, or for the capacity.
            overwrite: replace a store that exists at a path.
            erase_foreign_data: replace other data on a path: True, or the paths that may be erased.
            **io: see ``IoOptions``.

        Raises:
            StoreError: a path that cannot or must not become a member, a bad spec, or not enough space. Nothing
                of the user's has been changed then, and files that were made are removed.
        """
        options = IoOptions(**io)
        resolved = resolve_paths(paths)
        layouts = layouts_of(specs, block_bytes)
        geometry = plan_store(
            layouts,
            capacity=capacity,
            scratch_bytes=scratch_bytes,
            durability=durability,
            block_bytes=block_bytes,
            weights=[1] * len(resolved) if weights is None else weights,
            catalog_bytes=catalog_bytes,
            members=len(resolved),
        )
        erase = erase_foreign_data if isinstance(erase_foreign_data, bool) else set(erase_foreign_data)
        volume = formatting.create_volume(
            resolved,
            geometry,
            durability,
            direct_io=options.direct_io,
            make_engine=options.engine(),
            overwrite=overwrite,
            erase_foreign_data=erase,
        )
        try:
            store = cls(volume, options, read_only=False)
            store._declare_all(layouts)
            store._committer.write_first()
            volume.write_superblocks(replace(volume.superblock, ready=True))
            store._begin_session(1)
        except BaseException:
            formatting.abandon(volume.members, volume)
            raise
        store._log_notes()
        return store

    @classmethod
    def open(
        cls,
        paths: PathLike | Sequence[PathLike],
        *,
        read_only: bool = False,
        check_after_crash: bool = True,
        **io: Any,
    ) -> TensorStore:
        """Returns the store at ``paths`` in its last committed generation.

        A store whose last writer did not close it is checked tile by tile first (``check_after_crash``); one whose
        newest catalog is damaged always is. Members may be given in any order.

        Args:
            read_only: change nothing, refuse writes, and let damaged data be looked at: nothing is checked.
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
        try:
            store = cls(volume, options, read_only=read_only)
            store._load(check_after_crash)
        except BaseException:
            volume.close()
            raise
        store._log_notes()
        return store

    # ------------------------------------------------------------------ what is in the store

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
        if not 0 <= tile < layout.tiles:
            raise StoreError(f"tensor '{name}' has tiles 0 to {layout.tiles - 1}, not {tile}")
        return layout.tile_span(tile)

    def slot_bytes(self, n_elements: int, dtype: str) -> int:
        """Returns the room that memory needs to read or write ``n_elements``: the bytes rounded up to the block."""
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
        return self._committer.run_state

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
        geometry = self._volume.geometry
        return geometry.capacity_bytes - geometry.scratch_bytes - self._space.free_bytes

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

    # ------------------------------------------------------------------ the fast path

    def batch(self) -> Batch:
        """Returns an empty batch: reads and writes of page-aligned memory without a copy."""
        return Batch(self._io)

    def scratch(self, name: str, nbytes: int) -> Scratch:
        """Returns ``nbytes`` of the store, outside all generations, under a name that is not in use.

        Raises:
            StoreError: the name is taken, or there is no space.
        """
        self._io.check_writable()
        with self._io.lock:
            if name in self._scratch:
                raise StoreError(f"scratch '{name}' exists already; release it first")
            size = round_up(nbytes, self.block_bytes)
            address = self._scratch_space.allocate(size)
            if address is None:
                address = self._space.allocate(size)
            if address is None:
                largest = max(self._scratch_space.largest_free_bytes, self._space.largest_free_bytes)
                raise StoreError(
                    f"no room for scratch '{name}' of {nbytes:,} bytes in store '{self._volume.path}': the largest "
                    f"free extent is {largest:,} bytes; create the store with more scratch_bytes"
                )
            scratch = Scratch(self._io, name, address, size, self.block_bytes)
            self._scratch[name] = scratch
            return scratch

    def release_scratch(self, name: str) -> None:
        """Gives the extent of scratch ``name`` back; waits for what is in flight on it."""
        with self._io.write_lock:
            self._io.settle_all()
            with self._io.lock:
                scratch = self._scratch.pop(name, None)
                if scratch is None:
                    raise StoreError(f"no scratch '{name}' in store '{self._volume.path}'")
                address, nbytes = scratch.extent
                in_scratch = address >= self.capacity_bytes - self._volume.geometry.scratch_bytes
                (self._scratch_space if in_scratch else self._space).release(address, nbytes)

    # ------------------------------------------------------------------ tensors by copy

    def declare(self, spec: TensorSpec) -> None:
        """Adds a tensor without data; it is on disk with the next ``commit``.

        Raises:
            StoreError: the name is taken, the spec is bad, or the store has no room for it.
        """
        self._io.check_writable()
        layout = TensorLayout(spec, self.block_bytes)
        with self._io.write_lock, self._io.lock:
            self._declare_all([layout])

    def remove(self, name: str) -> None:
        """Takes ``name`` out of the store; its space is free again after the next ``commit``."""
        self._io.check_writable()
        with self._io.write_lock:
            self._tensor(name)
            self._io.settle_all()
            with self._io.lock:
                self._freed += self._table.remove(name).extents()
                self._committer.tensors_changed()

    def put(self, name: str, array: npt.ArrayLike) -> None:
        """Writes ``array`` as tensor ``name``, declared as needed; a tensor of another shape or type is replaced.

        Raises:
            StoreError: no room, a read-only tensor, or an element type that no tensor is stored in.
        """
        values = np.asarray(array)
        try:
            dtype = dtype_name(values.dtype)
        except ValueError as error:
            raise StoreError(f"cannot put tensor '{name}': {error}") from None
        with self._io.write_lock:
            known = self._table.tensors.get(name)
            if known is not None and (known.layout.spec.dtype, known.layout.spec.shape) != (
                dtype,
                values.shape,
            ):
                self.remove(name)
                known = None
            if known is None:
                tile = max(DEFAULT_TILE_BYTES // values.dtype.itemsize, 1)
                self.declare(TensorSpec(name, dtype, values.shape, tile_elements=tile))
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

    def read_elements(self, name: str, start: int, n_elements: int) -> npt.NDArray[Any]:
        """Returns ``n_elements`` of the flattened ``name`` from ``start`` as a new array.

        The checksum of each tile (each group of rows of a row-accessed tensor) that is read whole is compared.
        """
        return elements.read_elements(self._io, self._tensor(name), start, n_elements)

    def read_rows(self, name: str, rows_wanted: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
        """Fills ``out[i]`` with row ``rows_wanted[i]``; rows may repeat and come in any order.

        Args:
            rows_wanted: int64 ``[n]``, indices of the first axis.
            out: C-contiguous, the tensor's element type, ``n`` rows.

        Raises:
            StoreError: a row out of range, an unfit ``out``, or data that does not match its checksum.
        """
        rows.read_rows(self._io, self._bounce, self._tensor(name), rows_wanted, out)

    # ------------------------------------------------------------------ generations

    def commit(self, run_state: bytes = b"") -> int:
        """Makes everything written so far durable as one new generation, with ``run_state``; returns its number.

        Waits for all writes in flight. Raises ``StoreError`` when one of them failed or the disk fails now.
        """
        self._io.check_writable()
        with self._io.write_lock:
            generation = self._committer.commit(bytes(run_state))
            with self._io.lock:
                for address, nbytes in self._freed:
                    self._space.release(address, nbytes)
                self._freed = []
            return generation

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

    def inspect(self) -> dict[str, Any]:
        """Returns a description of the store, fit for JSON."""
        self._io.check_open()
        geometry = self._volume.geometry
        layouts = [tensor.layout for tensor in self._table.tensors.values()]
        return {
            "store_id": self.store_id,
            "created_s": self._volume.superblock.created_s,
            "generation": self.generation,
            "dirty": self.dirty,
            "run_state_bytes": len(self.run_state),
            "durability": self.durability,
            "block_bytes": geometry.block_bytes,
            "capacity_bytes": geometry.capacity_bytes,
            "used_bytes": self.used_bytes,
            "scratch_bytes": geometry.scratch_bytes,
            "catalog_bytes": geometry.catalog_bytes,
            "bytes_written": self._committer.bytes_written_before + self.counters().write_bytes,
            "io_backend": self.io_backend,
            "io_reason": self.io_reason,
            "members": [
                {
                    "path": member.path,
                    "block_device": member.is_block_device,
                    "file_system": member.file_system,
                    "direct": member.direct,
                    "weight": geometry.weights[index],
                    "bytes": geometry.member_bytes(index),
                }
                for index, member in enumerate(self._volume.members)
            ],
            "tensors": [
                {
                    "name": layout.spec.name,
                    "dtype": layout.spec.dtype,
                    "shape": list(layout.spec.shape),
                    "bytes": layout.nbytes,
                    "tiles": layout.tiles,
                    "tile_elements": layout.tile_elements,
                    "mutable": layout.spec.mutable,
                    "row_access": layout.spec.row_access,
                    "written": self.is_written(layout.spec.name),
                }
                for layout in layouts
            ],
        }

    def close(self) -> None:
        """Waits for all I/O and closes the store; what was not committed is gone. Does nothing the second time."""
        if self._io.closed_reason is not None:
            return
        with self._io.write_lock:
            self._io.settle_all()
            clean = self._io.write_refusal is None
            self._io.closed_reason = f"store '{self._volume.path}' is closed; open it again"
            try:
                if clean:
                    self._volume.flush()
                    self._volume.write_session(self._session, closed=True)
                    self._volume.flush()
            finally:
                self._volume.close()
                self._bounce.close()

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _tensor(self, name: str) -> StoredTensor:
        self._io.check_open()
        tensor = self._table.tensors.get(name)
        if tensor is None:
            raise self._io.unknown(name)
        return tensor

    def _declare_all(self, layouts: Sequence[TensorLayout]) -> None:
        """Lays out first the first places of all, then the second ones: each run of tensors lies in one piece."""
        for layout in layouts:
            if layout.spec.name in self._table.tensors:
                raise StoreError(f"tensor '{layout.spec.name}' exists already; remove it first")
        taken: list[tuple[int, int]] = []
        try:
            first = [self._allocate(layout, taken) for layout in layouts]
            second = [
                self._allocate(layout, taken)
                if self.durability == "step" and layout.spec.mutable
                else NO_PLACE
                for layout in layouts
            ]
        except StoreError:
            for address, nbytes in taken:
                self._space.release(address, nbytes)
            raise
        for layout, *bases in zip(layouts, first, second, strict=True):
            self._table.add(StoredTensor(layout, (bases[0], bases[1])))
        self._committer.tensors_changed()

    def _allocate(self, layout: TensorLayout, taken: list[tuple[int, int]]) -> int:
        address = self._space.allocate(layout.place_bytes)
        if address is None:
            waiting = sum(nbytes for _, nbytes in self._freed)
            needed = data_bytes_needed([layout], self.durability)
            raise StoreError(
                f"no room for tensor '{layout.spec.name}' in store '{self._volume.path}': it takes {needed:,} bytes "
                f"({format_bytes(needed)}) in durability '{self.durability}', the store has "
                f"{self._space.free_bytes:,} free of {self.capacity_bytes:,} (largest extent "
                f"{self._space.largest_free_bytes:,}; the next commit frees {waiting:,}); create a larger store"
            )
        taken.append((address, layout.place_bytes))
        return address

    def _load(self, check_after_crash: bool) -> None:
        path = self._volume.path
        session, closed = formatting.read_session(self._volume)
        choice = choose_generation(self._committer.read_slots(), path)
        catalog = choice.catalog
        for tensor in catalog.tensors:
            for address, nbytes in tensor.extents():
                self._space.reserve(address, nbytes)
            self._table.add(tensor)
        self._table.load(catalog.place, catalog.checksums)
        self._committer.loaded(catalog)
        if self._read_only:
            return
        if catalog.dirty:
            raise DirtyStoreError(
                f"cannot resume from store '{path}': it was being overwritten in place after generation "
                f"{catalog.generation - 1:,} when the last run ended, so its data is of no single step; restore the "
                "last checkpoint into a new store, or use durability 'step'",
                catalog.generation - 1,
                catalog.run_state,
            )
        if not choice.trusted or (check_after_crash and not closed):
            self._check_all_tiles(choice.trusted)
        if choice.stale:
            self._committer.rewrite(choice.stale)
        if not formatting.superblocks_intact(self._volume):
            self._volume.write_superblocks(self._volume.superblock)
        self._begin_session(session + 1)

    def _check_all_tiles(self, trusted: bool) -> None:
        started = time.monotonic()
        tensors = list(self._table.tensors.values())
        report = verify.verify_tensors(self._volume, self._bounce, tensors)
        _log.info("checked %d tiles after a crash in %.1f s", report.tiles, time.monotonic() - started)
        if report.faults:
            why = "" if trusted else " and a newer generation's catalog is damaged"
            raise StoreError(
                f"cannot open store '{self._volume.path}' at generation {self.generation:,}: {len(report.faults):,} "
                f"of {report.tiles:,} tiles do not match their checksums{why}; first: {report.faults[0]}; restore the "
                "last checkpoint into a new store"
            )

    def _begin_session(self, session: int) -> None:
        """Marks the store as open for writing: the real aligned write that finds out what the path cannot do."""
        self._session = session
        self._volume.write_session(session, closed=False)
        self._volume.flush()
        if formatting.read_session(self._volume) != (session, False):
            raise StoreError(
                f"'{self._volume.path}' did not return what was just written to it; the device or file system is "
                "faulty"
            )

    def _log_notes(self) -> None:
        for note in self.notes:
            _log.warning("%s", note)
        if self.io_reason:
            _log.warning("store '%s' uses %s: %s", self._volume.path, self.io_backend, self.io_reason)
