# SPDX-License-Identifier: Apache-2.0
"""A micro-batch on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


@dataclass(slots=True)
class DeviceBatch:
    """One micro-batch on the device; ``inverse`` says which of the step's embedding rows each token is."""

    labels: jax.Array
    weights: jax.Array
    positions: jax.Array
    segments: jax.Array
    inverse: jax.Array
