# SPDX-License-Identifier: Apache-2.0
"""The compiled functions of a step: the model's stage functions with accumulation, rounding and norms fused in.

Each is compiled once per shape. A gradient is rounded to ``grad_dtype`` where it leaves its stage, and norm² is
computed of the rounded values, one fp32 partial per tensor. norm² is nonfinite when and only when a gradient is (or
when it is so large that it would overflow), so it serves as the nonfinite flag too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from numpy.typing import NDArray

from memascend_jax.models.matmul import round_to
from memascend_jax.models.model_stages import ModelStages

Arrays = dict[str, jax.Array]


class StageFunctions:
    """Jitted stage functions of one model and gradient dtype.

    All arrays are committed to ``device``, those made here too: jit compiles anew for arguments that are not.
    """

    def __init__(self, stages: ModelStages, grad_dtype: str, device: jax.Device | None = None) -> None:
        self._stages = stages
        self.sharding = SingleDeviceSharding(device or jax.local_devices()[0])
        self.compute_dtype = stages.compute_dtype
        self._grad_dtype = jnp.dtype(grad_dtype)
        #: The kind of each layer, for the functions of layers; None where all are alike.
        self.kinds = [
            None if kind is None else self.put(np.asarray(kind, np.int32))
            for kind in map(stages.kind_number, range(stages.config.num_hidden_layers))
        ]
        self.embed = jax.jit(stages.embed)
        self.embed_backward = jax.jit(stages.embed_backward, donate_argnums=2)
        self.layer = jax.jit(stages.layer)
        self.layer_cached = jax.jit(stages.layer_cached, donate_argnums=(2, 3))
        self.head_norm = jax.jit(stages.head_norm)
        self.head_logsumexp = jax.jit(stages.head_logsumexp, donate_argnums=0)
        self.head_loss = jax.jit(stages.head_loss)
        self.head_carry = jax.jit(stages.head_carry, static_argnums=(0, 1), out_shardings=self.sharding)
        self.head_choice = jax.jit(stages.head_choice, static_argnums=0, out_shardings=self.sharding)
        # Jitted, because eager creation compiles anew for every shape and call site.
        self._zeros = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=self.sharding)
        self.head_argmax = jax.jit(stages.head_argmax)
        self.take_position = jax.jit(_take_position)
        self.layer_backward = jax.jit(
            self._layer_backward,
            static_argnames=("trained", "last"),
            donate_argnames=("dy", "accumulated", "square"),
        )
        # Without a dx there is nothing that could take dy's memory.
        self.lowest_layer_backward = jax.jit(
            self._lowest_layer_backward,
            static_argnames=("trained", "last"),
            donate_argnames=("accumulated", "square"),
        )
        self.head_backward = jax.jit(
            self._head_backward, static_argnames="trained", donate_argnames=("dxn", "accumulated", "square")
        )
        self.head_finish = jax.jit(
            self._head_finish,
            static_argnames=("trained", "passes", "last"),
            donate_argnames=("accumulated", "square"),
        )
        self.finish_head_tile = jax.jit(self._finish_head_tile, donate_argnames=("dw", "table_rows"))
        self.finish_rows = jax.jit(self._finish_rows)

    def put(self, value: NDArray[Any]) -> jax.Array:
        """Returns ``value`` on the device."""
        array: jax.Array = jax.device_put(value, self.sharding)
        return array

    def shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """Returns the description of an array on the device."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)  # type: ignore[no-untyped-call]

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Returns zeros on the device."""
        array: jax.Array = self._zeros(shape, jnp.dtype(dtype))
        return array

    def _layer_backward(
        self,
        params: Arrays,
        x: jax.Array,
        dy: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        accumulated: Arrays | None,
        square: jax.Array | None = None,
        kind: jax.Array | None = None,
        *,
        trained: tuple[str, ...],
        last: bool,
    ) -> tuple[jax.Array, Any, jax.Array | None]:
        """Returns ``dx`` and the gradients of what is trained, as ``_summed`` does, and ``square``."""
        dx, grads = self._stages.layer_backward(params, x, dy, positions, segments, trained, kind)
        return dx, *self._summed(grads, accumulated, square, last=last)

    def _lowest_layer_backward(self, *args: Any, **static: Any) -> tuple[Any, jax.Array | None]:
        """Returns what ``_layer_backward`` does without ``dx``, for a layer with nothing trained below it."""
        return self._layer_backward(*args, **static)[1:]

    def _summed(
        self, grads: Arrays, accumulated: Arrays | None, square: jax.Array | None, *, last: bool
    ) -> tuple[Any, jax.Array | None]:
        """Returns the sums so far, or for the last micro-batch the rounded gradients and norms²; None of nothing.

        ``square``, if given, comes back with norm² of this micro-batch's unrounded gradients added.
        """
        if not grads:
            return None, square
        if square is not None:
            square = square + sum(map(_norm_squared, grads.values()))
        if accumulated is not None:
            grads = jax.tree.map(jnp.add, accumulated, grads)
        return self._rounded(grads) if last else grads, square

    def _rounded(self, grads: Arrays) -> tuple[Arrays, jax.Array]:
        rounded = {name: round_to(grad, self._grad_dtype) for name, grad in grads.items()}
        return rounded, jnp.stack([_norm_squared(rounded[name]) for name in sorted(rounded)])

    def _head_backward(
        self,
        w_tile: jax.Array,
        xn: jax.Array,
        labels: jax.Array,
        weights: jax.Array,
        carry: Any,
        scale: jax.Array,
        tile_start: jax.Array,
        dxn: jax.Array | None,
        accumulated: jax.Array | None,
        square: jax.Array | None = None,
        *,
        trained: bool,
    ) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
        """Returns ``dxn`` (None if it was) plus the tile's part, the sums (None if not ``trained``), and ``square``."""
        passed = jnp.zeros(xn.shape, jnp.float32) if dxn is None else dxn
        passed, dw = self._stages.head_backward(w_tile, xn, labels, weights, carry, scale, tile_start, passed)
        dxn = None if dxn is None else passed
        if not trained:
            return dxn, None, square
        if square is not None:
            square = square + _norm_squared(dw)
        return dxn, dw if accumulated is None else accumulated + dw, square

    def _head_finish(
        self,
        norm_weight: jax.Array,
        x: jax.Array,
        dxn: jax.Array,
        accumulated: Arrays | None,
        square: jax.Array | None = None,
        *,
        trained: bool,
        passes: bool,
        last: bool,
    ) -> tuple[jax.Array | None, Any, jax.Array | None]:
        """Returns ``dx`` if it is asked for (``passes``), and the weight's gradient as ``_summed`` does."""
        dx, dnorm = self._stages.head_finish(norm_weight, x, dxn)
        grads = {"weight": dnorm} if trained else {}
        return dx if passes else None, *self._summed(grads, accumulated, square, last=last)

    def _finish_head_tile(
        self, dw: jax.Array, table_rows: jax.Array | None, rows: jax.Array, tile_start: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns the tile's rounded gradient, its norm², and the unrounded gradient of the rows used by the batch.

        For a tied table (``table_rows`` given, ``[capacity, hidden]`` fp32) the rows that the embedding uses too are
        taken out of the tile before rounding: their sum with the embedding's gradient is rounded once, later.
        """
        if table_rows is not None:
            local = rows - tile_start
            inside = (local >= 0) & (local < dw.shape[0])
            taken = dw[jnp.where(inside, local, 0)]
            table_rows = table_rows + jnp.where(inside[:, None], taken, 0.0)
            dw = dw.at[jnp.where(inside, local, dw.shape[0])].set(0.0, mode="drop")
        rounded = round_to(dw, self._grad_dtype)
        return rounded, _norm_squared(rounded), table_rows

    def _finish_rows(self, embedded: jax.Array, table_rows: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Returns the rounded gradient of the batch's embedding rows, ``[capacity, hidden]``, and its norm²."""
        total = embedded if table_rows is None else embedded + table_rows
        rounded = round_to(total, self._grad_dtype)
        return rounded, _norm_squared(rounded)


def _take_position(x: jax.Array, position: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, position[:, None, None], axis=1)


def _norm_squared(grad: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(grad.astype(jnp.float32)))
