# SPDX-License-Identifier: Apache-2.0
"""A GGUF model in one file, or split into several: ``NAME-00001-of-0000N.gguf``.

The first part has the metadata; every part has the places of its own tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from memascend_jax.checkpoints.gguf_header import GgufHeader, GgufTensor
from memascend_jax.checkpoints.gguf_tensors import check_places
from memascend_jax.checkpoints.positioned_file import PositionedFile
from memascend_jax.errors import DataError

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.S)
#: As many as a name can number would only be a hostile one's.
_MOST_PARTS = 4096


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor and the file that it is in."""

    file: PositionedFile
    place: GgufTensor


class GgufParts:
    """The open files of a model.

    Attributes:
        header: of the first part, with the metadata.
        tensors: of all parts, by their GGUF names.

    Raises:
        DataError: parts are missing, or of another model; a tensor is in two of them, outside its file, or upon
            another. All faults of that kind are listed.
    """

    def __init__(self, path: Path) -> None:
        self.files: list[PositionedFile] = []
        try:
            self._headers = [self._open(path)]
            count = self._headers[0].metadata.get("split.count", 1)
            if isinstance(count, int) and count > 1:
                self._open_all(path, count)
            self.header = self._headers[0]
            self.tensors = self._joined(path)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Returns when every tensor is of a known type, inside its file, and not upon another; see ``check_places``."""
        for file, header in zip(self.files, self._headers, strict=True):
            check_places(file, header)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _open(self, path: Path) -> GgufHeader:
        self.files.append(PositionedFile(path))
        return GgufHeader(self.files[-1])

    def _open_all(self, path: Path, count: int) -> None:
        """Opens the other parts, in order; any part may have been named."""
        match = _NAME.fullmatch(path.name)
        if match is None or int(match["count"]) != count or count > _MOST_PARTS:
            raise DataError(
                f"cannot use the model '{path}': it is one of {count:,} parts, which are found by their names, as "
                f"NAME-00001-of-{count:05}.gguf; give them such names"
            )
        names = [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
        missing = [name for name in names if not (path.parent / name).is_file()]
        if missing:
            more = f" and {len(missing) - 8:,} more" if len(missing) > 8 else ""
            raise DataError(
                f"cannot use the model '{path}': of its {count:,} parts {', '.join(missing[:8])}{more} are missing. "
                "Fetch them too"
            )
        self.close()
        self.files.clear()
        self._headers = [self._open(path.parent / name) for name in names]
        faults = [
            f"{file.path.name} has split.no {header.metadata.get('split.no')!r}, split.count "
            f"{header.metadata.get('split.count')!r}"
            for number, (file, header) in enumerate(zip(self.files, self._headers, strict=True))
            if header.metadata.get("split.no") != number or header.metadata.get("split.count") != count
        ]
        if faults:
            raise DataError(
                f"cannot use the model '{path}': {'; '.join(faults[:8])}. Its parts do not belong together: fetch them "
                "again"
            )

    def _joined(self, path: Path) -> dict[str, PlacedTensor]:
        tensors: dict[str, PlacedTensor] = {}
        twice = []
        for file, header in zip(self.files, self._headers, strict=True):
            for place in header.tensors:
                if place.name in tensors:
                    twice.append(
                        f"'{place.name}' in {tensors[place.name].file.path.name} and {file.path.name}"
                    )
                tensors[place.name] = PlacedTensor(file, place)
        if twice:
            raise DataError(
                f"cannot use the model '{path}': tensors are in two parts: {'; '.join(twice[:8])}"
            )
        total = self.header.metadata.get("split.tensors.count", len(tensors))
        if len(self.files) > 1 and total != len(tensors):
            raise DataError(
                f"cannot use the model '{path}': its parts have {len(tensors):,} tensors, not the {total!r} that it "
                "says. Fetch them again"
            )
        return tensors
