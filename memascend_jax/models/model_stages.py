# SPDX-License-Identifier: Apache-2.0
"""A model cut into stages: plain functions of arrays, to be jitted by the caller.

Each function is pure and has one executable per set of shapes; every layer shares the same one, layers of other kinds
(``ModelConfig.kinds``) too. None holds parameters: they stream past as arguments, in the dtype they are stored in.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from memascend_jax.models import generate, losses
from memascend_jax.models.adapters import Adapters, adapter_shapes
from memascend_jax.models.decoder_layer import DecoderLayer, add_adapters, rms_norm
from memascend_jax.models.generate import GreedyCarry
from memascend_jax.models.layer_kinds import kind_number
from memascend_jax.models.losses import HeadCarry
from memascend_jax.models.matmul import Precision, plan_precision
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import layer_shapes

#: A layer's parameters or gradients by local name, such as ``self_attn.q_proj.weight``.
LayerArrays = dict[str, Array]


class ModelStages:
    """The stage functions of one model shape in one compute dtype.

    Shapes: ``B`` sequences of ``S`` tokens, hidden size ``H``, ``V`` vocabulary entries. ``x`` and its
    gradient are ``[B, S, H]`` in the compute dtype, the gradients of parameters are float32.

    Args:
        config: the model's shape.
        compute_dtype: ``bfloat16``, ``float16`` or ``float32``: activations and matmul operands.
        attention_chunk: queries whose attention scores exist at a time.
        precision: how to multiply; by default what is fastest on jax's default backend.
        adapters: LoRA adapters, whose factors are parameters of the layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        compute_dtype: str,
        *,
        attention_chunk: int = 64,
        precision: Precision | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.config = config
        self.precision = precision or plan_precision(compute_dtype)
        self.compute_dtype = self.precision.compute_dtype
        shapes = layer_shapes(config)
        self.layer_names: tuple[str, ...] = (*shapes, *adapter_shapes(shapes, adapters))

        def make_layer() -> DecoderLayer:
            layer = DecoderLayer(config, self.precision, attention_chunk)
            add_adapters(layer, adapters)
            return layer

        # eval_shape allocates nothing; the module's arrays are the caller's from then on.
        self._layer_graph = nnx.split(nnx.eval_shape(make_layer))[0]

    # Embedding

    def embed(self, rows: Array, inverse: Array) -> Array:
        """Returns ``x`` of the tokens whose embeddings are ``rows[inverse]``.

        Args:
            rows: ``[U, H]``, the distinct rows of the table that the batch uses; unused ones may follow.
            inverse: int32 ``[B, S]``, which of the rows each token is.
        """
        chosen = rows[inverse]
        if self.config.embedding_scale != 1.0:
            chosen = self.precision.round(chosen).astype(jnp.float32) * self._embedding_scale()
        return self.precision.round(chosen)

    def embed_backward(self, dx: Array, inverse: Array, acc: Array) -> Array:
        """Returns float32 ``acc [U, H]`` plus each row's sum over its tokens of ``dx``, scaled as embeddings are."""
        wide = dx.astype(jnp.float32)
        if self.config.embedding_scale != 1.0:
            wide = wide * self._embedding_scale()
        return acc.at[inverse].add(wide)

    def _embedding_scale(self) -> Array:
        """As Hugging Face has it: rounded to the type of the embeddings."""
        return jnp.asarray(self.config.embedding_scale, self.compute_dtype).astype(jnp.float32)

    # Layer

    def kind_number(self, layer: int) -> int | None:
        """Returns what ``kind`` says of ``layer`` to the functions below; None, for all, where layers are alike."""
        return kind_number(self.config, layer)

    def layer(
        self,
        params: LayerArrays,
        x: Array,
        positions: Array,
        segments: Array,
        kind: Array | None = None,
    ) -> Array:
        """Returns the layer's output for ``x``.

        Args:
            params: the layer's arrays by local name, ``[out, in]``, in any float dtype.
            positions: int32 ``[B, S]``, rotary positions.
            segments: int32 ``[B, S]``; attention stays inside equal segments, 0 marks padding.
            kind: int32 scalar, traced: ``kind_number`` of the layer.
        """
        out: Array = self._module(params)(x, positions, segments, kind)
        return out

    def layer_backward(
        self,
        params: LayerArrays,
        x: Array,
        dy: Array,
        positions: Array,
        segments: Array,
        trained: Collection[str] | None = None,
        kind: Array | None = None,
    ) -> tuple[Array, LayerArrays]:
        """Returns ``(dx, grads)`` of the layer at ``x``, which it computes again; ``grads`` are float32.

        Args:
            trained: names of the parameters whose gradients are wanted; None: of all.
        """
        names = params if trained is None else trained
        wide = {name: self.precision.round(params[name]).astype(jnp.float32) for name in names}
        _, pull = jax.vjp(lambda p, h: self.layer({**params, **p}, h, positions, segments, kind), wide, x)
        grads, dx = pull(dy)
        return dx, grads

    # Head and loss

    def head_norm(self, norm_weight: Array, x: Array) -> Array:
        """Returns the final norm of ``x``, in the compute dtype."""
        return self.precision.round(self._final_norm(x, norm_weight))

    def head_carry(self, batch: int, seq: int) -> HeadCarry:
        """Returns the carry that ``head_logsumexp`` starts from."""
        return losses.first_carry(batch, seq)

    def head_logsumexp(
        self, carry: HeadCarry, w_tile: Array, xn: Array, labels: Array, tile_start: Array
    ) -> HeadCarry:
        """Returns the carry with one tile of the table taken in.

        Args:
            w_tile: ``[Vt, H]``, the table's rows from ``tile_start``; rows beyond ``V`` may hold anything.
            xn: what ``head_norm`` returned.
            labels: int32 ``[B, S]``, the vocabulary entry that each token predicts.
            tile_start: int32 scalar, traced: every tile shares one executable.
        """
        tile = self._tile(w_tile, tile_start)
        return losses.add_tile(carry, tile, xn, labels, self.precision)

    def head_loss(self, carry: HeadCarry, weights: Array) -> Array:
        """Returns the float32 sum of ``weights [B, S]`` times each token's negative log likelihood."""
        return losses.weighted_loss(carry, weights)

    def head_backward(
        self,
        w_tile: Array,
        xn: Array,
        labels: Array,
        weights: Array,
        carry: HeadCarry,
        scale: Array,
        tile_start: Array,
        dxn_acc: Array,
    ) -> tuple[Array, Array]:
        """Returns ``(dxn_acc + this tile's part, dw_tile)``, both float32.

        Args:
            carry: what ``head_logsumexp`` returned for the last tile.
            scale: float32 scalar, the derivative of the objective by ``head_loss``, such as 1 / tokens.
            dxn_acc: float32 ``[B, S, H]``, zeros before the first tile.
        """
        tile = self._tile(w_tile, tile_start)
        dxn, dweight = losses.tile_gradients(carry, tile, xn, labels, weights * scale, self.precision)
        return dxn_acc + dxn, dweight

    def head_finish(self, norm_weight: Array, x: Array, dxn: Array) -> tuple[Array, Array]:
        """Returns ``(dx, dnorm_weight)`` from the float32 ``dxn`` summed over every tile."""
        wide = norm_weight.astype(jnp.float32)
        _, pull = jax.vjp(lambda w, h: self._final_norm(h, w), wide, x)
        dweight, dx = pull(dxn)
        return dx, dweight

    def _final_norm(self, x: Array, weight: Array) -> Array:
        return rms_norm(x, weight, self.config.rms_norm_eps, self.config.norm_offset)

    def _tile(self, weight: Array, start: Array) -> losses.Tile:
        return losses.make_tile(weight, start, self.config.vocab_size, self.config.logit_soft_cap)

    # Decoding

    def layer_cached(
        self,
        params: LayerArrays,
        x: Array,
        cache_k: Array,
        cache_v: Array,
        start: Array,
        kind: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """Returns ``(x, cache_k, cache_v)`` of the layer for ``x [B, T, H]`` at positions from ``start [B]``.

        Prefill: ``start`` zero, ``T`` the longest prompt, shorter ones padded on the right. Decode: ``T`` 1,
        ``start`` the length of each sequence so far. The caches are ``[B, slots, kv_heads, D]``.
        """
        done: tuple[Array, Array, Array] = self._module(params).cached(x, cache_k, cache_v, start, kind)
        return done

    def head_choice(self, batch: int) -> GreedyCarry:
        """Returns the carry that ``head_argmax`` starts from."""
        return generate.first_choice(batch)

    def head_argmax(
        self, carry: GreedyCarry, w_tile: Array, xn_last: Array, tile_start: Array
    ) -> GreedyCarry:
        """Returns the greedy choice with one tile of the table taken in; ``xn_last`` is ``[B, 1, H]``."""
        return generate.choose_in_tile(carry, self._tile(w_tile, tile_start), xn_last, self.precision)

    def _module(self, params: LayerArrays) -> Any:
        """The layer with ``params`` in it: exists while tracing only."""
        state: dict[str, Any] = {}
        for name, value in params.items():
            *path, leaf = name.split(".")
            node = state
            for part in path:
                node = node.setdefault(part, {})
            node[leaf] = value
        return nnx.merge(self._layer_graph, state)
