# SPDX-License-Identifier: Apache-2.0
"""The stage functions put together as training and decoding call them, without storage."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from memascend_jax.models.losses import make_tile
from memascend_jax.models.shapes import EMBED_NAME, NORM_NAME, head_weight_name, layer_tensor_name

#: Compiling takes most of a test's time, and less without optimisations.
_PLAIN = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class StagedModel:
    """A whole model of ``ModelStages``, each function jitted once; ``params`` by Hugging Face's names.

    ``plain``: without the compiler's optimisations.
    """

    def __init__(self, stages, params, *, plain=False):
        self.stages, self.config, self.params = stages, stages.config, params
        for name in (
            *("embed", "embed_backward", "layer", "layer_backward", "layer_cached", "head_norm"),
            *("head_logsumexp", "head_loss", "head_backward", "head_finish"),
        ):
            setattr(self, name, jax.jit(getattr(stages, name), compiler_options=_PLAIN if plain else None))
        self.all_logits = jax.jit(self._all_logits)
        self.layers = [
            {name: params[layer_tensor_name(i, name)] for name in stages.layer_names}
            for i in range(self.config.num_hidden_layers)
        ]
        numbers = map(stages.kind_number, range(self.config.num_hidden_layers))
        self.kinds = [None if number is None else jnp.int32(number) for number in numbers]
        self.head = params[head_weight_name(self.config)]

    def loss_and_grads(self, batch, *, tile_rows, scale):
        """What training does: every stage forward, then every stage backward; the loss is not scaled."""
        config = self.config
        tokens, labels, weights, positions, segments = (jnp.asarray(part) for part in batch)
        table = self.params[EMBED_NAME]
        rows, inverse = np.unique(np.asarray(tokens), return_inverse=True)
        inverse = inverse.reshape(tokens.shape).astype(np.int32)
        inputs = [self.embed(table[rows], inverse)]
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            inputs.append(self.layer(layer, inputs[-1], positions, segments, kind))
        last = inputs.pop()

        xn = self.head_norm(self.params[NORM_NAME], last)
        carry = self.stages.head_carry(*tokens.shape)
        starts = list(range(0, config.vocab_size, tile_rows))
        for start in starts:
            tile = padded_tile(self.head, start, tile_rows)
            carry = self.head_logsumexp(carry, tile, xn, labels, jnp.int32(start))
        loss = self.head_loss(carry, weights)

        dxn = jnp.zeros(xn.shape, jnp.float32)
        dhead = []
        for start in starts:
            tile = padded_tile(self.head, start, tile_rows)
            dxn, dtile = self.head_backward(
                tile, xn, labels, weights, carry, jnp.float32(scale), jnp.int32(start), dxn
            )
            dhead.append(dtile)
        dhead = jnp.concatenate(dhead)
        assert not np.any(dhead[config.vocab_size :]), "rows that pad the last tile must have no gradient"
        dx, dnorm = self.head_finish(self.params[NORM_NAME], last, dxn)
        grads = {NORM_NAME: dnorm, head_weight_name(config): dhead[: config.vocab_size]}
        for index in reversed(range(config.num_hidden_layers)):
            dx, layer_grads = self.layer_backward(
                self.layers[index], inputs[index], dx, positions, segments, kind=self.kinds[index]
            )
            grads |= {layer_tensor_name(index, name): value for name, value in layer_grads.items()}
        drows = self.embed_backward(dx, inverse, jnp.zeros((len(rows), config.hidden_size), jnp.float32))
        dtable = jnp.zeros(table.shape, jnp.float32).at[rows].add(drows)
        grads[EMBED_NAME] = dtable + grads.get(EMBED_NAME, 0.0)
        return loss, grads

    def logits(self, tokens, positions, segments):
        """Returns float32 ``[B, S, V]``."""
        x = self.embed(self.params[EMBED_NAME], tokens)
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            x = self.layer(layer, x, positions, segments, kind)
        return self._logits(x)

    def decoded_logits(self, tokens, step, slots):
        """Returns the logits ``[B, S, V]`` of ``step`` tokens at a time, which see those before them in a cache."""
        shape = (len(tokens), slots, self.config.num_key_value_heads, self.config.head_dim)
        caches = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in self.layers]
        parts = []
        for first in range(0, tokens.shape[1], step):
            x = self.embed(self.params[EMBED_NAME], tokens[:, first : first + step])
            start = jnp.full(len(tokens), first, jnp.int32)
            for index, layer in enumerate(self.layers):
                x, *caches[index] = self.layer_cached(layer, x, *caches[index], start, self.kinds[index])
            parts.append(self._logits(x))
        return np.concatenate(parts, axis=1)

    def _logits(self, x):
        xn = self.head_norm(self.params[NORM_NAME], x)
        return np.asarray(self.all_logits(self.head, xn))

    def _all_logits(self, head, xn):
        vocab = self.config.vocab_size
        tile = make_tile(head, jnp.int32(0), vocab, self.config.logit_soft_cap)
        flat = tile.logits(xn.reshape(-1, xn.shape[-1]), self.stages.precision)
        return flat.reshape(*xn.shape[:2], vocab)


def padded_tile(head, start, tile_rows):
    """The tile with nan beyond the vocabulary, as stale memory may hold."""
    tile = head[start : start + tile_rows]
    return jnp.pad(tile, ((0, tile_rows - tile.shape[0]), (0, 0)), constant_values=jnp.nan)
