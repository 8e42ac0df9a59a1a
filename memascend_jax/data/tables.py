# SPDX-License-Identifier: Apache-2.0
"""Parquet and Arrow files as sources: rows are records, columns their keys. Needs pyarrow (the extra ``parquet``).

A block is a span of rows of one row group, or of one record batch. Rows within a row group are found by reading it
from its beginning: small row groups (some thousand rows, as ``datasets`` writes them) are read fastest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from memascend_jax.data.file_bytes import FileBytes
from memascend_jax.data.records import EXPECTED, KINDS, Example, example_of
from memascend_jax.data.source import BLOCK_BYTES, Block, Fault
from memascend_jax.errors import DataError

#: What else a record may have.
_MORE_COLUMNS = ("input", "system", "history", "tools")
_COLUMNS = tuple(dict.fromkeys([key for keys in KINDS.values() for key in keys] + list(_MORE_COLUMNS)))
#: A row group is read from its beginning for each of its blocks.
_MOST_BLOCKS_OF_GROUP = 256
#: Rows that are alike take few bytes in a file, and many in memory.
_MOST_ROWS_OF_BLOCK = 2048


class Groups(Protocol):
    """A file's row groups.

    Attributes:
        names: of all columns.
        rows: of each group.
        sizes: of each group, bytes of the columns that are read.
    """

    names: list[str]
    rows: list[int]
    sizes: list[int]

    def read(self, group: int, start: int, stop: int) -> list[dict[str, Any]]:
        """Returns rows of a group."""

    def close(self) -> None:
        """Closes the file."""


class TableRows:
    """A file of rows.

    Args:
        content: the file, for its name and its digest.
        form: ``Parquet`` or ``Arrow``.
        groups: of the file.

    Raises:
        DataError: it has none of the columns that a record has.
    """

    def __init__(self, content: FileBytes, form: str, groups: Groups) -> None:
        self._content, self.form, self._groups = content, form, groups
        self.name = content.shown
        if groups.rows and not any(all(key in groups.names for key in keys) for keys in KINDS.values()):
            raise DataError(
                f"the data file '{self.name}' has the columns {', '.join(map(repr, groups.names))}, which make no "
                f"record. {EXPECTED}"
            )
        self._spans = list(_spans(groups))
        self._sizes = np.array([span.nbytes for span in self._spans], np.int64)
        self._fingerprint = content.fingerprint()

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        return self._sizes

    def load(self, block: int) -> Block:
        """Returns a span of rows, which are read when they are asked for."""
        span = self._spans[block]
        digest = hashlib.blake2b(self._fingerprint.encode(), digest_size=32, person=b"table")
        digest.update(f"{span.group}:{span.start}:{span.stop}".encode())
        return Block(digest.digest(), partial(self._items, span))

    def fingerprint(self) -> str:
        """Returns the file's."""
        return self._fingerprint

    def check_unchanged(self) -> None:
        """Raises ``DataError`` when the file is changed."""
        self._content.check_unchanged()

    def close(self) -> None:
        """Closes the file."""
        self._groups.close()
        self._content.close()

    def _items(self, span: _Span, kind: str) -> Iterator[Example | Fault]:
        try:
            rows = self._groups.read(span.group, span.start, span.stop)
        except Exception as error:  # pyarrow has its own errors, and raises OSError for a damaged file.
            raise DataError(f"cannot read the data file '{self.name}': {error}; fetch it again") from error
        for number, row in enumerate(rows, start=span.first_row + 1):
            where = f"{self.name}: row {number:,}"
            try:
                yield example_of(row, where, kind)
            except ValueError as error:
                yield Fault(where, str(error))


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows ``start`` to ``stop`` of a group; ``first_row`` is the first's number in the file, from 0."""

    group: int
    start: int
    stop: int
    first_row: int
    nbytes: int


def _spans(groups: Groups) -> Iterator[_Span]:
    before = 0
    for group, (rows, nbytes) in enumerate(zip(groups.rows, groups.sizes, strict=True)):
        wanted = max(-(-nbytes // BLOCK_BYTES), -(-rows // _MOST_ROWS_OF_BLOCK))
        blocks = min(rows, _MOST_BLOCKS_OF_GROUP, max(1, wanted))
        for block in range(blocks):
            start, stop = rows * block // blocks, rows * (block + 1) // blocks
            yield _Span(group, start, stop, before + start, nbytes // blocks)
        before += rows


def open_parquet(content: FileBytes) -> TableRows:
    """Returns the rows of a Parquet file.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    return TableRows(content, "Parquet", _ParquetGroups(content))


def open_arrow(content: FileBytes) -> TableRows:
    """Returns the rows of an Arrow file, of the form for streams or for files.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    from memascend_jax.data.arrow_batches import ArrowBatches

    return TableRows(content, "Arrow", ArrowBatches(content, pyarrow_for(content), _COLUMNS))


def pyarrow_for(content: FileBytes) -> Any:
    """Returns the module pyarrow.

    Raises:
        DataError: it is not installed; says how to.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"the data file '{content.shown}' is read by pyarrow, which is not installed: "
            "pip install 'memascend-jax[parquet]'"
        ) from error
    return pyarrow


class _ParquetGroups:
    """The row groups of a Parquet file."""

    def __init__(self, content: FileBytes) -> None:
        pyarrow_for(content)
        from pyarrow import parquet

        try:
            # Without pre_buffer and with a small buffer a column is read page by page, not whole.
            self._file = parquet.ParquetFile(
                content.path, memory_map=False, buffer_size=BLOCK_BYTES, pre_buffer=False
            )
        except Exception as error:  # pyarrow's own
            raise DataError(
                f"cannot read the data file '{content.shown}' as Parquet: {error}; fetch it again"
            ) from error
        self.names: list[str] = self._file.schema_arrow.names
        self._columns = [name for name in self.names if name in _COLUMNS]
        found = [self._file.metadata.row_group(index) for index in range(self._file.metadata.num_row_groups)]
        self.rows: list[int] = [group.num_rows for group in found]
        self.sizes = [self._bytes_of(group) for group in found]

    def read(self, group: int, start: int, stop: int) -> list[dict[str, Any]]:
        """Returns rows of a row group."""
        rows: list[dict[str, Any]] = []
        at = 0
        for batch in self._file.iter_batches(
            batch_size=max(1, stop - start), row_groups=[group], columns=self._columns, use_threads=False
        ):
            first, last = max(start, at), min(stop, at + batch.num_rows)
            if first < last:
                rows += batch.slice(first - at, last - first).to_pylist()
            at += batch.num_rows
            if at >= stop:
                break
        return rows

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _bytes_of(self, group: Any) -> int:
        columns = [group.column(index) for index in range(group.num_columns)]
        return sum(
            column.total_uncompressed_size
            for column in columns
            if column.path_in_schema.split(".")[0] in self._columns
        )
