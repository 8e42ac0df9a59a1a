# SPDX-License-Identifier: Apache-2.0
"""The record batches of an Arrow file, found by their headers and read one by one.

``datasets`` writes the form for streams, which has no table of contents, and maps it; mapped pages would count as
resident memory. The headers say how long each batch is (https://arrow.apache.org/docs/format/Columnar.html,
"Encapsulated message format"), so that it is found without reading those before it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from memascend_jax.data.file_bytes import FileBytes
from memascend_jax.errors import DataError

FILE_MAGIC = b"ARROW1"
STREAM_MAGIC = b"\xff\xff\xff\xff"
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_LONGEST_HEADER_BYTES = 64 << 20


class ArrowBatches:
    """The batches of a file as groups of rows; only ``columns`` are made into records.

    Raises:
        DataError: the file is damaged, or has dictionaries.
    """

    def __init__(self, content: FileBytes, pyarrow: Any, columns: Sequence[str]) -> None:
        self._content, self._pyarrow = content, pyarrow
        self._last: tuple[int, Any] | None = None
        try:
            self._places = list(self._batches())
            self.names: list[str] = self._schema.names
            self.rows: list[int] = [rows for _, _, rows in self._places]
        except (struct.error, pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"cannot read the data file '{content.shown}' as Arrow: {error}; fetch it again"
            ) from error
        self._columns = [name for name in self.names if name in columns]
        self.sizes: list[int] = [nbytes for _, nbytes, _ in self._places]

    def read(self, group: int, start: int, stop: int) -> list[dict[str, Any]]:
        """Returns rows of a batch."""
        # Blocks of one batch often follow each other.
        if self._last is None or self._last[0] != group:
            self._last = (group, self._batch(group))
        batch = self._last[1].slice(start, stop - start)
        rows: list[dict[str, Any]] = batch.select(self._columns).to_pylist()
        return rows

    def close(self) -> None:
        """Lets go of the last batch."""
        self._last = None

    def _batch(self, group: int) -> Any:
        offset, nbytes, _ = self._places[group]
        message = self._pyarrow.ipc.read_message(self._pyarrow.py_buffer(self._content.read(offset, nbytes)))
        return self._pyarrow.ipc.read_record_batch(message, self._schema)

    def _batches(self) -> Iterator[tuple[int, int, int]]:
        """Yields (offset, bytes, rows) of every batch; keeps the schema."""
        content = self._content
        # The form for files is that for streams between its magic, and a table of contents that is not needed.
        at = 8 if content.read(0, len(FILE_MAGIC)) == FILE_MAGIC else 0
        while at < content.size:
            mark, length = struct.unpack("<II", content.read(at, 8))
            if mark != 0xFFFFFFFF:
                raise DataError(
                    f"cannot read the data file '{content.shown}' as Arrow: no message at byte {at:,}; it is damaged, "
                    "or was written by a version before 0.15"
                )
            if length == 0:
                return
            if length > min(_LONGEST_HEADER_BYTES, content.size - at):
                raise DataError(
                    f"cannot read the data file '{content.shown}' as Arrow: the message at byte {at:,} goes beyond the "
                    "end of the file, which is cut short; fetch it again"
                )
            kind, body, rows = _header(content.read(at + 8, length))
            nbytes = 8 + length + body
            if at + nbytes > content.size:
                raise DataError(
                    f"cannot read the data file '{content.shown}' as Arrow: the message at byte {at:,} has "
                    f"{nbytes:,} bytes, but {content.size - at:,} are left: it is cut short; fetch it again"
                )
            if kind == _SCHEMA:
                self._schema = self._pyarrow.ipc.read_schema(
                    self._pyarrow.py_buffer(content.read(at, nbytes))
                )
            elif kind == _DICTIONARY:
                raise DataError(
                    f"the data file '{content.shown}' has columns of dictionaries, which are not read; write it as "
                    "Parquet (datasets: to_parquet)"
                )
            elif kind == _BATCH:
                yield at, nbytes, rows
            at += nbytes


def _header(data: bytes) -> tuple[int, int, int]:
    """The kind of a message, the bytes of its body, and the rows of a batch: from its flatbuffer."""
    table = struct.unpack_from("<I", data, 0)[0]
    kind = _field(data, table, 1, "<B")
    body = _field(data, table, 3, "<q")
    if body < 0:
        raise struct.error(f"a body of {body} bytes")
    rows = 0
    if kind == _BATCH:
        where = _place(data, table, 2)
        # A RecordBatch begins with its length.
        rows = _field(data, where + struct.unpack_from("<I", data, where)[0], 0, "<q")
    return kind, body, rows


def _place(data: bytes, table: int, number: int) -> int:
    """Where a field of a table lies; 0: it has its default."""
    names = table - struct.unpack_from("<i", data, table)[0]
    length = struct.unpack_from("<H", data, names)[0]
    offset = struct.unpack_from("<H", data, names + 4 + 2 * number)[0] if 4 + 2 * number < length else 0
    return table + offset if offset else 0


def _field(data: bytes, table: int, number: int, form: str) -> int:
    where = _place(data, table, number)
    return int(struct.unpack_from(form, data, where)[0]) if where else 0
