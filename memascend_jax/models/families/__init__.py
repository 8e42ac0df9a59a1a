# SPDX-License-Identifier: Apache-2.0
"""The architectures that are computed here, by the ``model_type`` of their ``config.json``. jax-free.

A new one is a file that describes it as a ``Family``, and its line in ``FAMILIES``: see ``docs/architectures.md``.
"""

from __future__ import annotations

from memascend_jax.models.families.family import Family
from memascend_jax.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from memascend_jax.models.families.llama import LLAMA
from memascend_jax.models.families.mistral import MISTRAL
from memascend_jax.models.families.phi3 import PHI3
from memascend_jax.models.families.qwen import QWEN2, QWEN3
from memascend_jax.models.families.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (LLAMA, SMOLLM3, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI3)
}

__all__ = ["FAMILIES", "Family"]
