# SPDX-License-Identifier: Apache-2.0
"""The bytes of optimizer state: which leaves a parameter has, in which dtype, and how they are tiled.

jax-free and pure. A parameter ``name`` of shape ``[out, in]`` keeps its name; its state leaves append ``#master`` or
``#residual``, ``#mu``, ``#nu`` and ``#scales``. All leaves of a parameter are cut into the same tiles, so that the
optimizer's unit of work is one tile of each leaf.

What does not live here: the arithmetic (``optim.adamw``) and where the bytes are (``storage``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from memascend_jax.dtypes import to_dtype
from memascend_jax.errors import ConfigError
from memascend_jax.units import round_up

#: Store blocks are at most this large; a tile of any leaf begins and ends on such a boundary.
BLOCK_BYTES = 4096
#: Elements that share the scales of their 8-bit moments, counted from the tensor's first; the native core's number.
SCALE_ELEMENTS = 256

MASTER, RESIDUAL, MU, NU, SCALES = "#master", "#residual", "#mu", "#nu", "#scales"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a parameter's state.

    Attributes:
        suffix: what its name appends to the parameter's.
        dtype: of its values.
        per: elements of the parameter that ``width`` values belong to: one value each, but for scales.
        width: values of such a group.
    """

    suffix: str
    dtype: str
    per: int = 1
    width: int = 1

    def values(self, n_elements: int) -> int:
        """Returns the values of the first ``n_elements`` of a tile."""
        return -(-n_elements // self.per) * self.width

    def stride(self, tile_elements: int) -> int:
        """Returns the values from the beginning of one tile of the leaf to that of the next: whole blocks."""
        if self.per == 1:
            return tile_elements
        size = itemsize(self.dtype)
        return round_up(self.values(tile_elements) * size, BLOCK_BYTES) // size

    def total(self, n_elements: int, tile_elements: int) -> int:
        """Returns the values of a tensor of ``n_elements``; tiles but the last are padded to ``stride``."""
        whole = max(-(-n_elements // tile_elements) - 1, 0)
        return whole * self.stride(tile_elements) + self.values(n_elements - whole * tile_elements)

    def span(self, tile: int, n_elements: int, tile_elements: int) -> tuple[int, int]:
        """Returns first value and values of ``tile`` of a tensor of ``n_elements``, padding included."""
        start = tile * self.stride(tile_elements)
        return start, min(self.stride(tile_elements), self.total(n_elements, tile_elements) - start)

    @property
    def bytes_per_element(self) -> float:
        return itemsize(self.dtype) * self.width / self.per


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Which leaves a parameter has on SSD.

    Attributes:
        name: the value of ``optimizer.state_format``.
        param_dtype: dtype that the forward reads.
        grad_dtype: dtype that a gradient is rounded to, once, when it leaves its stage.
        leaves: the state. Without ``#master`` the parameter is its own master, or with ``#residual`` its upper half.
    """

    name: str
    param_dtype: str
    grad_dtype: str
    leaves: tuple[Leaf, ...]

    @property
    def has_master(self) -> bool:
        """Whether the update writes the parameter without reading it."""
        return any(leaf.suffix == MASTER for leaf in self.leaves)

    @property
    def is_compact(self) -> bool:
        """Whether a kernel of its own updates it: every format but ``fp32``."""
        return self.name != "fp32"

    @property
    def stored_bytes(self) -> float:
        """Bytes per parameter on SSD, one place each; of ``int8`` no whole number."""
        return itemsize(self.param_dtype) + sum(leaf.bytes_per_element for leaf in self.leaves)

    def leaf(self, suffix: str) -> Leaf:
        """Returns the leaf called ``suffix``; raises ``KeyError`` where the format has none."""
        found = [leaf for leaf in self.leaves if leaf.suffix == suffix]
        if not found:
            raise KeyError(f"state format {self.name} has no leaf {suffix!r}")
        return found[0]


@cache
def itemsize(dtype: str) -> int:
    """Returns the bytes of one element of ``dtype``."""
    return to_dtype(dtype).itemsize


#: The formats other than fp32; each goes with bf16 parameters and gradients.
_COMPACT: dict[str, tuple[Leaf, ...]] = {
    "split": (Leaf(RESIDUAL, "uint16"), Leaf(MU, "float32"), Leaf(NU, "float32")),
    "split_bf16": (Leaf(RESIDUAL, "uint16"), Leaf(MU, "bfloat16"), Leaf(NU, "bfloat16")),
    "bf16": (Leaf(MU, "bfloat16"), Leaf(NU, "bfloat16")),
    "int8": (
        Leaf(RESIDUAL, "uint8"),
        Leaf(MU, "uint8"),
        Leaf(NU, "uint8"),
        Leaf(SCALES, "float32", per=SCALE_ELEMENTS, width=2),
    ),
}
STATE_FORMATS = ("fp32", *_COMPACT)


def state_format(name: str, compute_dtype: str) -> StateFormat:
    """Returns the format called ``name`` for parameters computed in ``compute_dtype``.

    With bf16 or fp16 compute the forward reads a parameter of that dtype beside the fp32 master of ``fp32``; with fp32
    compute the parameter itself is the master and gradients stay fp32. The other formats hold bf16 parameters.

    Raises:
        ConfigError: the format is unknown or does not go with the compute dtype.
    """
    if name not in STATE_FORMATS:
        known = ", ".join(STATE_FORMATS)
        raise ConfigError(f"optimizer.state_format={name!r} is not known; known are {known}")
    if name != "fp32":
        if compute_dtype != "bfloat16":
            raise ConfigError(
                f"model.compute_dtype={compute_dtype!r} does not go with optimizer.state_format={name}, whose "
                "parameters are bfloat16; use bfloat16, or optimizer.state_format=fp32"
            )
        return StateFormat(name, "bfloat16", "bfloat16", _COMPACT[name])
    moments = (Leaf(MU, "float32"), Leaf(NU, "float32"))
    if compute_dtype in ("bfloat16", "float16"):
        return StateFormat(name, compute_dtype, compute_dtype, (Leaf(MASTER, "float32"), *moments))
    if compute_dtype == "float32":
        return StateFormat(name, "float32", "float32", moments)
    raise ConfigError(
        f"model.compute_dtype={compute_dtype!r} is not known; known are bfloat16, float16, float32"
    )


def tile_elements(shape: Sequence[int], target: int) -> int:
    """Returns the tile size in elements for a tensor of ``shape``: near ``target``, whole rows if possible.

    A tile of more than one row is a whole number of rows, and every tile but the last is a multiple of
    ``BLOCK_BYTES`` elements' worth for all dtypes of one byte and more, so that any leaf's tile begins on a
    block and the gradient rows of an embedding fall into exactly one tile.
    """
    total = math.prod(shape)
    if total <= target:
        return max(total, 1)
    row = math.prod(shape[1:]) if len(shape) > 1 else 1
    step = row * (BLOCK_BYTES // math.gcd(BLOCK_BYTES, row))
    if step > target:
        # Rows too long to align whole ones: tiles of plain block multiples.
        step = BLOCK_BYTES
    return max(step, target // step * step)
