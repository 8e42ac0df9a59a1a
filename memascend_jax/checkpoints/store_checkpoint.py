# SPDX-License-Identifier: Apache-2.0
"""A model in a tensor store of its own: the weights, byte for byte, and what lies beside them; no training state.

Tensors keep their Hugging Face names. Files, such as the tokenizer, are tensors of bytes called ``#file/NAME``. The
store's run state is a record that says what the model is: see ``ModelRecord``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.checkpoints.model_files import ModelFiles
from memascend_jax.checkpoints.source import PIECE_BYTES, CheckpointTensor
from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import DataError
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import EMBED_NAME, check_tensors, tensor_shapes
from memascend_jax.optim.state_format import tile_elements
from memascend_jax.storage.device import PathLike
from memascend_jax.storage.engine import ReusedBuffers
from memascend_jax.storage.tensor_store import TensorSpec, TensorStore

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE_PREFIX = "#file/"
SCHEMA = 1
#: Bytes of a tile, about: the unit of checksums.
_TILE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """What the store of a model says of it.

    Attributes:
        config: the keys of Hugging Face's ``config.json``.
        source: what it was imported from, as the user called it.
        digest: of what it was imported from.
    """

    config: Mapping[str, Any]
    source: str
    digest: str
    model_schema: int = SCHEMA

    def encode(self) -> bytes:
        """Returns the bytes that ``decode`` reads."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, store: str) -> ModelRecord:
        """Returns the record in a store's run state.

        Raises:
            DataError: it is none, or a later version's.
        """
        if not is_model_record(data):
            raise DataError(
                f"the store '{store}' holds no model; memascend store inspect {store} says what it is"
            )
        values = json.loads(data)
        if values["model_schema"] != SCHEMA:
            raise DataError(
                f"the store '{store}' holds a model of version {values['model_schema']}, this program knows version "
                f"{SCHEMA}; use the version that wrote it"
            )
        try:
            return cls(**values)
        except TypeError as error:
            raise DataError(f"the store '{store}' has a damaged record of its model: {error}") from error


def is_model_record(run_state: bytes) -> bool:
    """Returns whether a store's run state says that it holds a model."""
    try:
        values = json.loads(run_state)
    except ValueError:
        return False
    return isinstance(values, dict) and "model_schema" in values


def model_specs(tensors: Mapping[str, CheckpointTensor], files: Mapping[str, bytes]) -> list[TensorSpec]:
    """Returns the store's tensors for a model and its files: written once, in one place."""
    weights = [
        TensorSpec(
            name,
            tensor.dtype,
            tensor.shape,
            tile_elements(tensor.shape, _TILE_BYTES // to_dtype(tensor.dtype).itemsize),
            row_access=name == EMBED_NAME,
            mutable=False,
        )
        for name, tensor in tensors.items()
    ]
    return [
        *weights,
        *(
            TensorSpec(FILE_PREFIX + name, "uint8", (len(content),), mutable=False)
            for name, content in files.items()
        ),
    ]


def file_array(content: bytes) -> NDArray[np.uint8]:
    """Returns a file as the store keeps it."""
    return np.frombuffer(content, np.uint8)


class StoreCheckpoint:
    """See ``source.Checkpoint``. Elements have the types that they were imported in."""

    def __init__(self, paths: PathLike | Sequence[PathLike]) -> None:
        self._store = TensorStore.open(paths, read_only=True, direct_io="optional")
        self._buffers = ReusedBuffers()
        try:
            where = ", ".join(self._store.paths)
            self._record = ModelRecord.decode(self._store.run_state, where)
            self._texts = ModelFiles(where, self._read_file, self._file_names)
            self.config: dict[str, Any] = dict(self._record.config)
            shape = ModelConfig.from_hf(self.config)
            found = {name: self._store.spec(name) for name in self._store.names() if "#" not in name}
            check_tensors({name: spec.shape for name, spec in found.items()}, shape, where)
            self.tensors = {
                tensor.name: CheckpointTensor(tensor.shape, found[tensor.name].dtype)
                for tensor in tensor_shapes(shape)
            }
        except BaseException:
            self._store.close()
            raise

    def pieces(self, name: str, max_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields the tensor in blocks of whole rows; see ``source.Checkpoint``."""
        tensor = self.tensors[name]
        columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        step = max(1, max_bytes // (columns * to_dtype(tensor.dtype).itemsize)) * columns
        total = prod(tensor.shape)
        for start in range(0, total, step):
            yield start, self._store.read_elements(name, start, min(step, total - start), self._buffers)

    @property
    def chat_template(self) -> str | None:
        return self._texts.chat_template

    @property
    def special_ids(self) -> dict[str, int | None]:
        return self._texts.special_ids

    @cached_property
    def digest(self) -> str:
        return self._record.digest

    def tokenizer(self) -> Tokenizer:
        return self._texts.tokenizer()

    def export_files(self) -> dict[str, bytes]:
        return self._texts.passed_on()

    def close(self) -> None:
        self._store.close()

    def _file_names(self) -> list[str]:
        names = self._store.names()
        return [name.removeprefix(FILE_PREFIX) for name in names if name.startswith(FILE_PREFIX)]

    def _read_file(self, name: str) -> bytes | None:
        if FILE_PREFIX + name not in self._store:
            return None
        return self._store.get(FILE_PREFIX + name).tobytes()
