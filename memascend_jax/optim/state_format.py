# SPDX-License-Identifier: Apache-2.0
"""The bytes of optimizer state: which leaves a parameter has, in which dtype, and how they are tiled.

jax-free and pure. A parameter ``name`` of shape ``[out, in]`` keeps its name; its state leaves append
``#master``, ``#mu`` and ``#nu``. All leaves of a parameter are cut into the same tiles, so that the
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

#: Store blocks are at most this large; a tile of any leaf begins and ends on such a boundary.
BLOCK_BYTES = 4096

MASTER, MU, NU = "#master", "#mu", "#nu"


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Which leaves a parameter has on SSD.

    Attributes:
        name: the value of ``optimizer.state_format``.
        param_dtype: dtype that the forward reads.
        grad_dtype: dtype that a gradient is rounded to, once, when it leaves its stage.
        leaves: suffix and dtype of each state leaf. Without ``#master`` the parameter is its own master.
    """

    name: str
    param_dtype: str
    grad_dtype: str
    leaves: tuple[tuple[str, str], ...]

    @property
    def has_master(self) -> bool:
        return any(suffix == MASTER for suffix, _ in self.leaves)

    @property
    def stored_bytes(self) -> int:
        """Bytes per parameter on SSD, one place each."""
        return itemsize(self.param_dtype) + sum(itemsize(dtype) for _, dtype in self.leaves)

    @property
    def update_read_bytes(self) -> int:
        """Bytes per parameter that an update reads, the gradient not included."""
        own_master = 0 if self.has_master else itemsize(self.param_dtype)
        return own_master + sum(itemsize(dtype) for _, dtype in self.leaves)

    @property
    def update_write_bytes(self) -> int:
        """Bytes per parameter that an update writes: every leaf and the parameter."""
        return self.stored_bytes


@cache
def itemsize(dtype: str) -> int:
    """Returns the bytes of one element of ``dtype``."""
    return to_dtype(dtype).itemsize


def state_format(name: str, compute_dtype: str) -> StateFormat:
    """Returns the format called ``name`` for parameters computed in ``compute_dtype``.

    With bf16 compute the forward reads a bf16 parameter beside the fp32 master; with fp32 compute the
    parameter itself is the master and gradients stay fp32.

    Raises:
        ConfigError: the format is unknown or does not go with the compute dtype.
    """
    if name != "fp32":
        raise ConfigError(f"optimizer.state_format={name!r} is not known; this version has 'fp32'")
    moments = ((MU, "float32"), (NU, "float32"))
    if compute_dtype == "bfloat16":
        return StateFormat(name, "bfloat16", "bfloat16", ((MASTER, "float32"), *moments))
    if compute_dtype == "float32":
        return StateFormat(name, "float32", "float32", moments)
    raise ConfigError(
        f"model.compute_dtype={compute_dtype!r} does not go with state format {name!r}; "
        "use bfloat16 or float32"
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
