# SPDX-License-Identifier: Apache-2.0
"""What a decoder computes, whatever its architecture is called: sizes, and what varies between architectures. jax-free.

One layer, ``decoder_layer.DecoderLayer``, computes every such description. ``families`` says which description an
architecture's ``config.json`` stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary frequencies: ``theta ** (-2i / rotated)``, changed as ``type`` says; see ``rope.frequencies``.

    Attributes:
        attention_factor: what cosine and sine are multiplied by (``yarn``, ``longrope``).
        original_positions: of the model before its context was extended (``llama3``, ``yarn``, ``longrope``).
        low_freq_factor, high_freq_factor: of ``llama3``.
        beta_fast, beta_slow, truncate: of ``yarn``.
        short_factor, long_factor: divisors of each frequency (``longrope``), for documents of at most
            ``original_positions`` tokens and for longer ones.
    """

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What may differ between the layers of a model whose tensors have the same shapes.

    Attributes:
        window: a token sees itself and the ``window - 1`` tokens before it; None: all before it.
        rope: how queries and keys are turned; None: not at all.
    """

    window: int | None = None
    rope: Rope | None = field(default_factory=Rope)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model: its sizes under Hugging Face's names, then what architectures do differently, Llama's by default.

    Attributes:
        model_type: the key of its family (``families.FAMILIES``).
        kinds: the distinct kinds of layers, in the order of their first layers.
        layer_kinds: index into ``kinds`` of each layer; empty: all are the first.
        rotated: elements of each head that rotary positions turn, the first ones; 0: all.
        attention_scalar: scores are divided by its square root; 0: by that of ``head_dim``.
        attention_soft_cap: scores are ``cap * tanh(scores / cap)``.
        qkv_bias, output_bias: of the projections into and out of attention.
        qk_norm: queries and keys are normed per head before they are turned.
        fused_qkv: one tensor ``qkv_proj`` holds the rows of all three.
        activation: ``silu``, ``gelu`` or ``gelu_pytorch_tanh``, of the gate.
        mlp_bias: of the feed-forward's projections.
        fused_gate_up: one tensor ``gate_up_proj`` holds the rows of both.
        norm_offset: added to every norm's weight.
        sandwich_norms: the outputs of attention and feed-forward are normed too, before they are added.
        embedding_scale: what embeddings are multiplied by, rounded to the compute dtype.
        logit_soft_cap: logits are ``cap * tanh(logits / cap)``.
        layer_tensors: the tensors of a layer, by local name, of a model that can be planned only.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    initializer_range: float
    bos_token_id: int | None
    eos_token_id: int | tuple[int, ...] | None
    pad_token_id: int | None
    model_type: str = "llama"
    kinds: tuple[LayerKind, ...] = (LayerKind(),)
    layer_kinds: tuple[int, ...] = ()
    rotated: int = 0
    attention_scalar: float = 0.0
    attention_soft_cap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    fused_qkv: bool = False
    activation: str = "silu"
    mlp_bias: bool = False
    fused_gate_up: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None
    layer_tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Returns the model that a ``config.json`` describes; a key it leaves out has Hugging Face's default.

        Raises:
            DataError: an architecture, rope type or option that is not computed here, a missing or impossible size;
                every fault found is listed.
        """
        from memascend_jax.models.hf_config import read_config

        return read_config(config)

    def to_hf(self) -> dict[str, Any]:
        """Returns the ``config.json`` of this model, without a dtype."""
        from memascend_jax.models.hf_config import write_config

        return write_config(self)

    def identity(self) -> dict[str, Any]:
        """Returns what tells this model from others, as plain values: the same in every version that knows it."""
        # A field that a later version adds has its default in every model that earlier ones know.
        usual = {each.name: each.default for each in fields(self)}
        usual["kinds"] = (LayerKind(rope=Rope(self.rope_theta)),)
        values = asdict(self)
        used = {name: values[name] for name in usual if getattr(self, name) != usual[name]}
        return {**used, "rope_theta": self.rope_theta}

    @property
    def query_size(self) -> int:
        """Elements of all heads' queries of a token."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Elements of all heads' keys, or values, of a token."""
        return self.num_key_value_heads * self.head_dim

    @property
    def rotated_size(self) -> int:
        """Elements of each head that are turned."""
        return self.rotated or self.head_dim

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return float((self.attention_scalar or self.head_dim) ** -0.5)

    @property
    def rope_theta(self) -> float:
        """Of the layers that see everything, where kinds differ."""
        return self.global_rope.theta

    @property
    def global_rope(self) -> Rope:
        """The rope of the layers that see everything, where kinds differ."""
        turned = [kind for kind in self.kinds if kind.rope is not None]
        return next(
            (kind.rope for kind in turned if kind.window is None and kind.rope is not None),
            turned[0].rope if turned and turned[0].rope is not None else Rope(),
        )

    @property
    def window(self) -> int | None:
        """The window of the layers that have one, None if none has."""
        return next((kind.window for kind in self.kinds if kind.window is not None), None)

    def kind_of(self, layer: int) -> LayerKind:
        return self.kinds[self.layer_kinds[layer] if self.layer_kinds else 0]

    def kind_list(self) -> list[LayerKind]:
        """Returns the kind of each layer."""
        return [self.kind_of(layer) for layer in range(self.num_hidden_layers)]


def number_kinds(kinds: list[LayerKind]) -> dict[str, Any]:
    """Returns ``kinds`` and ``layer_kinds`` of ``ModelConfig`` for the kind of each layer, or one of all."""
    distinct = tuple(dict.fromkeys(kinds))
    if len(distinct) == 1:
        return {"kinds": distinct, "layer_kinds": ()}
    return {"kinds": distinct, "layer_kinds": tuple(map(distinct.index, kinds))}
