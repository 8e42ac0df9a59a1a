# SPDX-License-Identifier: Apache-2.0
"""What every file of a step held when it was saved, by its path: the CRC32C of each, and of the record of the run.

The checksum at the end of a chunk's file says that the file is whole, not that it is in its place: two files of one
size that were exchanged both match their own. So the checksums are written down by name, in a file of ``state`` which
has a checksum itself. The file comes before orbax's own last ones, so those are known by what is in them instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from memascend_jax._native import _core
from memascend_jax.errors import DataError

DIGESTS_FILE = "_digests.json"
_SCHEMA = 1
_MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class StepDigests:
    """CRC32C values as numbers.

    Attributes:
        record, metrics: of the values that were given to orbax, see ``digest_of_values``.
        files: by path within ``state``; of a chunk's file that of its elements, which ends the file.
    """

    record: int
    metrics: int
    files: Mapping[str, int] = field(default_factory=dict)

    def to_text(self) -> str:
        """Returns what ``read_digests`` reads."""
        values = {
            "schema": _SCHEMA,
            "algorithm": "crc32c",
            "record": self.record,
            "metrics": self.metrics,
            "files": dict(self.files),
        }
        return json.dumps({**values, "checksum": digest_of_values(values)})

    def faults_of_values(self, record: Any, metrics: Any) -> Iterator[str]:
        """Yields in which of the two a step holds other values than were saved."""
        for what, kept, values in (("record", self.record, record), ("metrics", self.metrics, metrics)):
            if digest_of_values(values) != kept:
                yield f"its {what} holds other values than were saved"

    def fault_of_file(self, state: Path, name: str) -> str | None:
        """Returns what is wrong with the small file ``name`` in ``state``, or None; reads all of it."""
        try:
            found = crc32c((state / name).read_bytes())
        except OSError as error:
            return f"'{name}' cannot be read ({error.strerror})"
        kept = self.files.get(name)
        if kept is None:
            return f"'{name}' is not one of the files that were saved"
        if found != kept:
            return f"'{name}' is damaged: the CRC32C of its contents is {found:08x}, that of what was saved {kept:08x}"
        return None


def read_digests(state: Path) -> StepDigests:
    """Returns what was written down in ``state``.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = state / DIGESTS_FILE
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("it is too large")
        values = json.loads(path.read_text(encoding="utf-8"))
        kept = values.pop("checksum")
        if digest_of_values(values) != kept:
            raise ValueError("it does not match its own checksum")
        if values["schema"] != _SCHEMA:
            raise ValueError(f"it is of version {values['schema']}, this program reads version {_SCHEMA}")
        return StepDigests(values["record"], values["metrics"], values["files"])
    except FileNotFoundError:
        why = "it is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = str(error) or repr(error)
    raise DataError(
        f"the checkpoint '{state.parent}' is damaged: the checksums of its files, '{path}', cannot be used: {why}. Use "
        "another step"
    )


def digest_of_values(values: Any) -> int:
    """Returns the CRC32C of JSON values, however they are written down."""
    # Twice: keys become text, and tuples lists, as they will be when they are read.
    plain = json.loads(json.dumps(values))
    return crc32c(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())


def crc32c(data: bytes) -> int:
    """Returns the CRC32C of ``data``."""
    values = np.frombuffer(data, np.uint8)
    return int(_core.crc32c(values.ctypes.data, values.size, 0))
