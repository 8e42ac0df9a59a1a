# SPDX-License-Identifier: Apache-2.0
"""The model of a checkpoint's step: a ``source.Checkpoint``, for a run that begins with its weights and for exports."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.array_layout import PARAMS, ZARR_FILE, ArrayLayout, group_of
from memascend_jax.checkpoints.model_files import CONFIG, ModelFiles
from memascend_jax.checkpoints.saved_step import MODEL_FILES, SavedStep
from memascend_jax.checkpoints.source import PIECE_BYTES, CheckpointTensor
from memascend_jax.checkpoints.tokenizer_files import has_tokenizer
from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import DataError
from memascend_jax.optim.format_conversion import TileState, master_of
from memascend_jax.optim.state_format import MASTER, RESIDUAL
from memascend_jax.storage.engine import aligned_buffer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class SavedModel:
    """See ``source.Checkpoint``. Elements are the fp32 masters, or the parameters where they are their own.

    Raises:
        DataError: arrays are missing or not whole; all that are found are told.
    """

    def __init__(self, saved: SavedStep) -> None:
        self.saved = saved
        self.files = ModelFiles(str(saved.path), self._read_file, self._file_names)
        fmt = saved.format
        suffixes = {leaf.suffix for leaf in fmt.leaves} & {MASTER, RESIDUAL}
        self._leaves = [leaf for leaf in fmt.leaves if leaf.suffix in suffixes]
        exact = "float32" if suffixes else fmt.param_dtype
        self.tensors = {
            tensor.name: CheckpointTensor(
                tensor.shape, fmt.param_dtype if tensor.name in saved.record.frozen else exact
            )
            for tensor in saved.tensors
        }
        self._arrays = saved.arrays

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.files.json(CONFIG) or self.saved.record.model)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the run that saved it had one: a random model has none."""
        return has_tokenizer(self.files)

    @property
    def chat_template(self) -> str | None:
        return self.files.chat_template

    @property
    def special_ids(self) -> dict[str, int | None]:
        return self.files.special_ids

    @cached_property
    def digest(self) -> str:
        """Of the record, the arrays' descriptions and the checksums that end their files."""
        digest = hashlib.sha256(json.dumps(self.saved.record.to_json(), sort_keys=True).encode())
        for layout in self._arrays.values():
            folder = self.saved.state_folder / layout.key
            digest.update((folder / ZARR_FILE).read_bytes())
            for chunk in range(layout.chunks):
                with (folder / layout.chunk_file(chunk)).open("rb") as file:
                    file.seek(layout.chunk_bytes)
                    digest.update(file.read())
        return digest.hexdigest()

    def pieces(self, name: str, max_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields the tensor in order, as fp32 unless it has no more bits; checksums are compared as it goes.

        Raises:
            DataError: a file's contents do not match their checksum.
        """
        dtype = to_dtype(self.tensors[name].dtype)
        # A step that begins on a block in every array, and on a group of scales.
        step = max(max_bytes // dtype.itemsize // 4096, 1) * 4096
        leaves = [] if name in self.saved.record.frozen else self._leaves
        has_master = any(leaf.suffix == MASTER for leaf in leaves)
        groups = [group_of(leaf.suffix) for leaf in leaves]
        wanted = groups if has_master else [PARAMS, *groups]
        readers = {group: self.saved.reader(group, name) for group in wanted}
        total = self._arrays[PARAMS, name].elements
        for start in range(0, total, step):
            read = {}
            for group, reader in readers.items():
                values = _aligned(reader.layout, min(step, total - start))
                reader.read(start, values)
                reader.check(start, values)
                read[group] = values
            if not leaves:
                yield start, read[PARAMS]
                continue
            param = read.get(PARAMS, np.empty(0, dtype))
            state = TileState(param, {leaf.suffix: read[group_of(leaf.suffix)] for leaf in leaves})
            yield start, master_of(self.saved.format, state)

    def tokenizer(self) -> Tokenizer:
        return self.files.tokenizer()

    def export_files(self) -> dict[str, bytes]:
        return self.files.passed_on()

    def close(self) -> None:
        """Nothing is open between reads."""

    def _file_names(self) -> list[str]:
        folder = self.saved.state_folder / MODEL_FILES
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

    def _read_file(self, name: str) -> bytes | None:
        path = self.saved.state_folder / MODEL_FILES / name
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"cannot read '{path}': {error.strerror}; use another step") from error
        digests = self.saved.digests
        fault = None
        if digests is not None:
            fault = digests.fault_of_file(self.saved.state_folder, f"{MODEL_FILES}/{name}")
        if fault is not None:
            raise DataError(f"the checkpoint '{self.saved.path}' is damaged: {fault}. Use another step")
        return content


def _aligned(layout: ArrayLayout, n: int) -> NDArray[Any]:
    """Memory for ``n`` elements that direct I/O can fill."""
    return aligned_buffer(n * layout.itemsize).view(to_dtype(layout.dtype))
