# SPDX-License-Identifier: Apache-2.0
"""Full-parameter fine-tuning of large language models in JAX with the training state on SSD.

The public names are loaded on first use, so that importing the package costs no jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memascend_jax.memory.arena import PinnedArena as PinnedArena
    from memascend_jax.optim.offload import offload as offload
    from memascend_jax.optim.transforms import adam as adam
    from memascend_jax.optim.transforms import adamw as adamw
    from memascend_jax.optim.transforms import lion as lion
    from memascend_jax.optim.transforms import sgd as sgd
    from memascend_jax.storage.tensor_store import TensorSpec as TensorSpec
    from memascend_jax.storage.tensor_store import TensorStore as TensorStore

__version__ = "0.1.0"

_HOME = {
    "PinnedArena": "memascend_jax.memory.arena",
    "TensorStore": "memascend_jax.storage.tensor_store",
    "TensorSpec": "memascend_jax.storage.tensor_store",
    "adam": "memascend_jax.optim.transforms",
    "adamw": "memascend_jax.optim.transforms",
    "lion": "memascend_jax.optim.transforms",
    "offload": "memascend_jax.optim.offload",
    "sgd": "memascend_jax.optim.transforms",
}
__all__ = [
    "PinnedArena",
    "TensorSpec",
    "TensorStore",
    "__version__",
    "adam",
    "adamw",
    "lion",
    "offload",
    "sgd",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'memascend_jax' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
