# SPDX-License-Identifier: Apache-2.0
"""A tile of training state in another state format. jax-free.

What a format keeps exactly stays as it is: between ``fp32`` and ``split`` no bit of a parameter, master or moment
changes, and no format loses anything when it becomes one of these. What the target has fewer bits for is rounded
stochastically by a counter, as the update of that format rounds it, so that the result is the same however a tensor is
cut and unbiased in the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax._native import _core
from memascend_jax.dtypes import BF16, to_dtype
from memascend_jax.optim.adamw import draw_key
from memascend_jax.optim.rounding import join_master, round_master, split_master
from memascend_jax.optim.state_format import (
    MASTER,
    MU,
    NU,
    RESIDUAL,
    SCALE_ELEMENTS,
    SCALES,
    StateFormat,
    itemsize,
)

_PLAIN_NAN = np.uint32(0x7FC00000)


@dataclass(frozen=True, slots=True)
class TileState:
    """Consecutive elements of one tensor in a format: ``param`` ``[n]``, and each leaf by suffix, without padding."""

    param: NDArray[Any]
    leaves: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExactState:
    """What a tile stands for: fp32 ``[n]`` each."""

    master: NDArray[np.float32]
    mu: NDArray[np.float32]
    nu: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rounding:
    """What stochastic rounding draws by: the run's seed and step, the tensor, and where in it the tile begins."""

    seed: int
    step: int
    tensor: str
    first_element: int = 0

    def key(self, field_name: str) -> int:
        """Returns the 64-bit key of one field; no update draws by it."""
        return draw_key(self.seed, self.step, f"{self.tensor}{field_name} converted")


def convert_tile(source: StateFormat, target: StateFormat, tile: TileState, draws: Rounding) -> TileState:
    """Returns ``tile`` of format ``source`` in format ``target``; the same arrays where nothing changes.

    Args:
        draws: its first element is a multiple of ``SCALE_ELEMENTS``.
    """
    if source == target:
        return tile
    return encode_tile(target, decode_tile(source, tile), draws)


def master_of(fmt: StateFormat, tile: TileState) -> NDArray[np.float32]:
    """Returns the fp32 masters ``[n]`` that a tile stands for; its moments need not be there."""
    if fmt.has_master:
        return tile.leaves[MASTER]
    return join_master(fmt, tile.param, tile.leaves.get(RESIDUAL))


def decode_tile(fmt: StateFormat, tile: TileState) -> ExactState:
    """Returns what ``tile`` stands for, without rounding."""
    if SCALES not in tile.leaves:
        return ExactState(master_of(fmt, tile), _widened(tile.leaves[MU]), _widened(tile.leaves[NU]))
    pairs = tile.leaves[SCALES].reshape(-1, 2)
    n = tile.param.size
    mu = _decode_bytes(tile.leaves[MU] & np.uint8(0x7F), -15, _repeated(pairs[:, 0], n))
    signs = (tile.leaves[MU] & np.uint8(0x80)).astype(np.uint32) << 24
    signed = (mu.view(np.uint32) | signs).view(np.float32)
    nu = _decode_bytes(tile.leaves[NU], -31, _repeated(pairs[:, 1], n))
    return ExactState(master_of(fmt, tile), signed, nu)


def encode_tile(fmt: StateFormat, exact: ExactState, draws: Rounding) -> TileState:
    """Returns ``exact`` in ``fmt``."""
    param, leaves = _encode_master(fmt, exact.master, draws)
    if any(leaf.suffix == SCALES for leaf in fmt.leaves):
        return TileState(param, {**leaves, **_encode_bytes(exact, draws)})
    moments = {MU: exact.mu, NU: exact.nu}
    for suffix, values in moments.items():
        if fmt.leaf(suffix).dtype == "bfloat16":
            moments[suffix] = _to_bf16(values, draws, suffix)
    return TileState(param, {**leaves, **moments})


def _encode_master(
    fmt: StateFormat, master: NDArray[np.float32], draws: Rounding
) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    residual = next((leaf for leaf in fmt.leaves if leaf.suffix == RESIDUAL), None)
    if residual is not None and itemsize(residual.dtype) == 1:
        return split_master(fmt, _to_24_bits(master, draws))
    if fmt.is_compact and residual is None:
        return _to_bf16(master, draws, MASTER), {}
    if fmt.has_master:
        return round_master(master, fmt.param_dtype), {MASTER: master}
    return split_master(fmt, master)


def _to_bf16(values: NDArray[np.float32], draws: Rounding, field_name: str) -> NDArray[Any]:
    source = np.ascontiguousarray(values)
    rounded = np.empty(source.shape, BF16)
    _core.to_bf16_stochastic(
        rounded.ctypes.data, source.ctypes.data, source.size, draws.first_element, draws.key(field_name)
    )
    return rounded


def _to_24_bits(master: NDArray[np.float32], draws: Rounding) -> NDArray[np.float32]:
    """The masters with their lowest 8 bits rounded away, up with the probability of what they are of 256."""
    bits = np.where(np.isnan(master), _PLAIN_NAN, master.view(np.uint32))
    # The bits that go lie where rounding to bfloat16 decides by 16 of them: it carries into a one, or it does not.
    carried = _to_bf16((((bits & 0xFF) << 8) | 0x10000).view(np.float32), draws, MASTER).view(np.uint16) - 1
    kept: NDArray[np.float32] = (((bits >> 8) + carried) << 8).astype(np.uint32).view(np.float32)
    return kept


def _encode_bytes(exact: ExactState, draws: Rounding) -> dict[str, NDArray[Any]]:
    """The 8-bit moments and their scales, by the kernel that makes them in every update.

    With both decays 0 the moments after an update are those of its gradient, which is why it is given the moments as
    gradients; the learning rate 0 leaves alone the parameters, which nobody reads.
    """
    n = exact.mu.size
    groups = -(-n // SCALE_ELEMENTS)
    scales = np.zeros((groups, 2), np.float32)
    encoded: dict[str, NDArray[Any]] = {}
    for column, (suffix, gradient) in enumerate(((MU, exact.mu), (NU, np.sqrt(exact.nu)))):
        moments = {MU: np.zeros(n, np.uint8), NU: np.zeros(n, np.uint8)}
        param, residual, made = (
            np.zeros(n, np.uint16),
            np.zeros(n, np.uint8),
            np.zeros((groups, 2), np.float32),
        )
        source = np.ascontiguousarray(gradient)
        _core.compact_update(
            state_format="int8",
            param=param.ctypes.data,
            residual=residual.ctypes.data,
            mu=moments[MU].ctypes.data,
            nu=moments[NU].ctypes.data,
            scales=made.ctypes.data,
            grad=source.ctypes.data,
            n=n,
            grad_dtype="float32",
            first_element=draws.first_element,
            random_key=draws.key(suffix),
            lr=0.0,
            b1=0.0,
            b2=0.0,
            eps=1.0,
            weight_decay=0.0,
            bias1=1.0,
            bias2=1.0,
        )
        encoded[suffix] = moments[suffix]
        scales[:, column] = made[:, column]
    return {**encoded, SCALES: scales.reshape(-1)}


def _decode_bytes(
    codes: NDArray[np.uint8], exponent: int, scales: NDArray[np.float32]
) -> NDArray[np.float32]:
    """``scale * (x - lowest)`` of native/src/compact_moments.hpp; ``exponent`` is that of the lowest number."""
    base = np.uint32((127 + exponent) << 3)
    lowest = np.array(base << 20, np.uint32).view(np.float32)
    magnitudes = ((codes.astype(np.uint32) + base) << 20).view(np.float32) - lowest
    decoded: NDArray[np.float32] = scales * magnitudes
    return decoded


def _repeated(scales: NDArray[np.float32], n: int) -> NDArray[np.float32]:
    return np.repeat(scales, SCALE_ELEMENTS)[:n]


def _widened(values: NDArray[Any]) -> NDArray[np.float32]:
    return values.astype(to_dtype("float32"), copy=False)
