# SPDX-License-Identifier: Apache-2.0
"""The open members of a store as one address space, with errors that name the path."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from errno import EIO

import numpy as np
import numpy.typing as npt

from memascend_jax.observe import trace
from memascend_jax.storage.checksum import crc32c_bytes
from memascend_jax.storage.device import Member
from memascend_jax.storage.engine import Engine, EngineFactory, EngineTicket, address_of, aligned_buffer
from memascend_jax.storage.io_trace import record_transfers
from memascend_jax.storage.layout import SESSION_OFFSET, SUPERBLOCK_OFFSETS, Int64Array, Striping
from memascend_jax.storage.statistics import MemberStatistics, Traffic, member_statistics
from memascend_jax.storage.store_errors import StoreIOError
from memascend_jax.storage.superblock import Superblock, encode_session

#: (member, offset, page-aligned bytes): one write of metadata.
Piece = tuple[int, int, npt.NDArray[np.uint8]]


class Volume:
    """Members in the order of their index, an engine over them and the mapping to them. Owns all three."""

    def __init__(self, members: Sequence[Member], superblock: Superblock, make_engine: EngineFactory) -> None:
        self.members = list(members)
        self.superblock = superblock
        self.geometry = superblock.geometry
        self.striping = Striping(superblock.geometry)
        self.engine: Engine = make_engine([member.fd for member in members])
        self._traffic = Traffic(len(self.members))

    @property
    def path(self) -> str:
        """The path that messages about the store as a whole name."""
        return self.members[0].path

    @property
    def paths(self) -> list[str]:
        """The paths of the members, as the user gave them."""
        return [member.path for member in self.members]

    def submit_read(
        self, extents: Int64Array, keepalive: object = None, urgent: bool = False
    ) -> EngineTicket:
        """Starts reading ``extents`` of (store address, memory address, nbytes), before others when ``urgent``."""
        return self._submit_read(self.striping.segments(extents), keepalive, urgent)

    def submit_write(self, extents: Int64Array, keepalive: object = None) -> EngineTicket:
        """Starts writing ``extents`` of (store address, memory address, nbytes)."""
        return self._submit_write(self.striping.segments(extents), keepalive)

    def read_metadata(self, member: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Returns ``nbytes`` (whole blocks) of one member."""
        into = aligned_buffer(nbytes)
        segments = np.array([[member, offset, address_of(into), nbytes]], np.int64)
        try:
            self._finish(self._submit_read(segments, into))
        except OSError as error:
            raise self.io_error("read the metadata of", error) from error
        return into

    def write_metadata(self, pieces: Sequence[Piece]) -> None:
        """Writes ``pieces`` and waits for them; ``flush`` makes them durable."""
        rows = [[member, offset, address_of(data), data.nbytes] for member, offset, data in pieces]
        try:
            self._finish(self._submit_write(np.array(rows, np.int64), [data for _, _, data in pieces]))
        except OSError as error:
            raise self.io_error("write the metadata of", error) from error

    def write_superblocks(self, superblock: Superblock, members: Sequence[int] | None = None) -> None:
        """Writes both copies of the superblock of ``members`` (None: all) as ``superblock`` says."""
        self.write_metadata(
            [
                (member, offset, self._block(self.superblock_of(superblock, member).encode(crc32c_bytes)))
                for member in (range(len(self.members)) if members is None else members)
                for offset in SUPERBLOCK_OFFSETS
            ]
        )
        self.superblock = superblock

    def write_session(self, session: int, closed: bool) -> None:
        """Writes the session mark of every member."""
        identity, block_bytes = self.superblock.store_id, self.geometry.block_bytes
        mark = self._block(encode_session(identity, session, closed, block_bytes, crc32c_bytes))
        self.write_metadata([(member, SESSION_OFFSET, mark) for member in range(len(self.members))])

    def flush(self) -> None:
        """Makes everything written durable on every member."""
        try:
            with trace.span(trace.WAIT, "for the flush of", self.path):
                self.engine.flush()
        except OSError as error:
            raise self.io_error("flush", error) from error

    def statistics(self) -> list[MemberStatistics]:
        """Returns what each member has done since it was opened."""
        measure = getattr(self.engine, "statistics", None)
        measured = None if measure is None else measure()
        return member_statistics(self.paths, self._traffic, measured)

    def locate(self, store_address: int) -> tuple[str, int]:
        """Returns (path, offset) of one byte of the store's address space."""
        member, offset = self.striping.locate(store_address)
        return self.members[member].path, offset

    def path_of(self, error: OSError) -> str:
        """Returns the path, as the user gave it, of the member that ``error`` is about."""
        for member in self.members:
            if error.filename is not None and os.path.realpath(member.path) == os.path.realpath(
                error.filename
            ):
                return member.path
        return self.path

    def io_error(self, action: str, error: OSError) -> StoreIOError:
        """Returns ``error`` of the engine as one that says what the store was doing."""
        path = self.path_of(error)
        return StoreIOError(f"cannot {action} store '{path}': {error.args[-1]}", error.errno or EIO, path)

    def _submit_read(self, segments: Int64Array, keepalive: object, urgent: bool = False) -> EngineTicket:
        self._traffic.add("read", segments)
        if urgent:
            return self.engine.submit_read(segments, keepalive, urgent=True)
        return self.engine.submit_read(segments, keepalive)

    def _submit_write(self, segments: Int64Array, keepalive: object) -> EngineTicket:
        self._traffic.add("write", segments)
        return self.engine.submit_write(segments, keepalive)

    def _finish(self, ticket: EngineTicket) -> None:
        """Waits for a transfer of metadata."""
        ticket.wait()
        if trace.current is not None:
            record_transfers(trace.current, None, [ticket], self.paths)

    def close(self) -> None:
        """Drains the I/O in flight and closes the members, which releases their locks."""
        self.engine.close()
        for member in self.members:
            member.close()

    @staticmethod
    def superblock_of(superblock: Superblock, member: int) -> Superblock:
        """Returns ``superblock`` as ``member`` carries it."""
        return dataclasses.replace(superblock, member=member)

    @staticmethod
    def _block(data: bytes) -> npt.NDArray[np.uint8]:
        block = aligned_buffer(len(data))
        block[:] = np.frombuffer(data, np.uint8)
        return block
