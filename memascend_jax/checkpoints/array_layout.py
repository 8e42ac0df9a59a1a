# SPDX-License-Identifier: Apache-2.0
"""How the arrays of a checkpoint lie in files: orbax's tree of zarr 3 arrays, uncompressed. Pure.

An array is a folder ``<group>.<tensor>`` with ``zarr.json`` and one file per chunk, which holds the elements as they
lie in memory and their CRC32C (zarr's ``crc32c`` codec): any zarr reader checks it. Chunks are whole rows and begin on
a disk block, so that they are written and read past the page cache; how a run cuts its tensors does not matter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memascend_jax.dtypes import BY_NAME, to_dtype
from memascend_jax.models.shapes import TensorShape
from memascend_jax.optim.state_format import BLOCK_BYTES, StateFormat
from memascend_jax.units import MIB

#: A chunk is at most about this large: what another reader has to hold at a time.
CHUNK_BYTES = 64 * MIB
#: Bytes of the checksum at the end of a chunk's file.
TRAILER_BYTES = 4
PARAMS = "params"
ZARR_FILE, TREE_FILE = "zarr.json", "_METADATA"


class ChunkSpan(NamedTuple):
    """A run of bytes within one chunk: ``offset`` in its file, ``skip`` in what was asked for."""

    chunk: int
    offset: int
    nbytes: int
    skip: int


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """One array of a checkpoint.

    Attributes:
        group: ``params``, or the name of a state leaf without its ``#``: ``master``, ``mu``.
        tensor: the parameter's name.
        dtype: our name of the elements' type.
        chunk_rows: indices of the first axis in a chunk; the last chunk's file is as long as the others.
    """

    group: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    chunk_rows: int

    @property
    def key(self) -> str:
        """The name of its folder, which is the one that orbax gives it."""
        return f"{self.group}.{self.tensor}"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return to_dtype(self.dtype).itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's elements; its file has the checksum too."""
        return self.chunk_rows * math.prod(self.shape[1:]) * self.itemsize

    @property
    def chunks(self) -> int:
        return -(-self.shape[0] // self.chunk_rows)

    @property
    def file_bytes(self) -> int:
        """Bytes of all chunks' files."""
        return self.chunks * (self.chunk_bytes + TRAILER_BYTES)

    def chunk_file(self, chunk: int) -> str:
        """Returns the path of a chunk within the array's folder."""
        return "/".join(["c", str(chunk), *["0"] * (len(self.shape) - 1)])

    def chunk_data_bytes(self, chunk: int) -> int:
        """Returns the bytes of a chunk that are elements of the array; zeros follow in the last one."""
        return min(self.chunk_bytes, self.elements * self.itemsize - chunk * self.chunk_bytes)

    def spans(self, start: int, n_elements: int) -> Iterator[ChunkSpan]:
        """Yields where the elements ``[start, start + n_elements)`` of the flattened array lie."""
        begin, end = start * self.itemsize, (start + n_elements) * self.itemsize
        at = begin
        while at < end:
            chunk, offset = divmod(at, self.chunk_bytes)
            nbytes = min(end - at, self.chunk_bytes - offset)
            yield ChunkSpan(chunk, offset, nbytes, at - begin)
            at += nbytes

    def to_json(self) -> dict[str, Any]:
        """Returns the contents of ``zarr.json``."""
        little = {} if self.itemsize == 1 else {"configuration": {"endian": "little"}}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [self.chunk_rows, *self.shape[1:]]},
            },
            "chunk_key_encoding": {"name": "default"},
            "fill_value": 0,
            "codecs": [{"name": "bytes", **little}, {"name": "crc32c"}],
        }


def array_from_json(group: str, tensor: str, values: Mapping[str, Any]) -> ArrayLayout:
    """Returns the layout that a ``zarr.json`` describes.

    Raises:
        ValueError: it is not one of those that ``ArrayLayout.to_json`` makes.
    """
    try:
        shape = tuple(int(extent) for extent in values["shape"])
        chunk = values["chunk_grid"]["configuration"]["chunk_shape"]
        found = ArrayLayout(group, tensor, shape, str(values["data_type"]), int(chunk[0]))
        same = found.dtype in BY_NAME and min(shape) > 0 and found.chunk_rows > 0
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"not the description of an array: {error!r}") from error
    if not same or found.to_json() != dict(values):
        raise ValueError("not an array as checkpoints of this program hold them")
    return found


def state_arrays(
    fmt: StateFormat,
    tensors: Sequence[TensorShape],
    frozen: Collection[str] = (),
    chunk_bytes: int = CHUNK_BYTES,
) -> list[ArrayLayout]:
    """Returns the arrays of a checkpoint of ``tensors`` in ``fmt``: parameters and every leaf of their state.

    Args:
        frozen: names of tensors that are not trained, and have no state.
    """
    arrays = []
    for tensor in tensors:
        arrays.append(_array(PARAMS, tensor.name, tensor.shape, fmt.param_dtype, chunk_bytes))
        for leaf in () if tensor.name in frozen else fmt.leaves:
            shape = tensor.shape
            if leaf.per > 1:
                # Without the padding that a store's tiles have, which depends on their size.
                shape = (-(-tensor.elements // leaf.per), leaf.width)
            arrays.append(_array(group_of(leaf.suffix), tensor.name, shape, leaf.dtype, chunk_bytes))
    return arrays


def group_of(suffix: str) -> str:
    """Returns the group of a state leaf: ``mu`` for ``#mu``."""
    return suffix.removeprefix("#")


def tree_text(arrays: Sequence[ArrayLayout]) -> str:
    """Returns orbax's description of the tree ``{group: {tensor: array}}``, the contents of ``_METADATA``."""
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    tree = {
        str((array.group, array.tensor)): {
            "key_metadata": [{"key": key, "key_type": 2} for key in (array.group, array.tensor)],
            "value_metadata": value,
        }
        for array in arrays
    }
    return json.dumps(
        {
            "tree_metadata": tree,
            "use_ocdbt": False,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    )


def _array(group: str, tensor: str, shape: tuple[int, ...], dtype: str, chunk_bytes: int) -> ArrayLayout:
    row_elements = math.prod(shape[1:])
    # Rows come in numbers whose elements fill whole blocks of any type, so that every chunk begins on one.
    together = BLOCK_BYTES // math.gcd(BLOCK_BYTES, row_elements)
    nbytes = math.prod(shape) * to_dtype(dtype).itemsize
    wanted = -(-shape[0] // -(-nbytes // chunk_bytes))
    rows = min(-(-wanted // together) * together, shape[0])
    return ArrayLayout(group, tensor, shape, dtype, rows)
