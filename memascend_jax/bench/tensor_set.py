# SPDX-License-Identifier: Apache-2.0
"""What is moved: one large tensor, a real model's many tensors, a table of rows."""

from __future__ import annotations

from dataclasses import dataclass

from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import tensor_shapes
from memascend_jax.storage.tensor_store import TensorSpec
from memascend_jax.units import MIB

#: SmolLM2-135M: 272 tensors from 1,152 bytes to 54 MiB in bfloat16.
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
}
TILE_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class TensorSet:
    """Tensors of bytes, by name; ``label`` is what a table calls them."""

    label: str
    sizes: dict[str, int]

    @property
    def nbytes(self) -> int:
        """All tensors together."""
        return sum(self.sizes.values())

    def specs(self) -> list[TensorSpec]:
        """Returns them as a store's tensors, in tiles of 4 MiB."""
        return [
            TensorSpec(name, "uint8", (nbytes,), tile_elements=TILE_BYTES)
            for name, nbytes in self.sizes.items()
        ]


def one_tensor(nbytes: int, label: str = "one tensor") -> TensorSet:
    """Returns a set of one tensor."""
    return TensorSet(label, {"tensor": nbytes})


def smollm2(divisor: int = 1) -> TensorSet:
    """Returns the 272 tensors of SmolLM2-135M in bfloat16, 257 MiB; for trials, each a ``divisor``-th as large."""
    shapes = tensor_shapes(ModelConfig.from_hf(SMOLLM2_135M))
    label = "SmolLM2-135M, 272 tensors" + (f" of 1/{divisor} the size" if divisor > 1 else "")
    return TensorSet(label, {shape.name: 2 * shape.elements // divisor for shape in shapes})
