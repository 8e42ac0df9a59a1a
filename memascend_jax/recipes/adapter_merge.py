# SPDX-License-Identifier: Apache-2.0
"""A model with its adapters merged, piece by piece: W + s B A in fp32, rounded once. jax-free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.models.adapters import Adapters, factor_names, is_adapter
from memascend_jax.models.shapes import TensorShape
from memascend_jax.recipes.export_source import ExportSource, Read, rounded


def merge_adapters(source: ExportSource) -> ExportSource:
    """Returns ``source``, which has adapters, as the model without them that computes the same."""
    assert source.adapters is not None
    tensors = {tensor.name: tensor for tensor in source.shapes}
    own = [tensor for tensor in source.shapes if not is_adapter(tensor.name)]
    return replace(
        source, shapes=own, read=_Merged(source.read, source.adapters, tensors).read, adapters=None
    )


class _Merged:
    """Holds the factors of one module at a time, and of their product the rows of one piece."""

    def __init__(self, read: Read, adapters: Adapters, tensors: dict[str, TensorShape]) -> None:
        self._read = read
        self._scale = np.float32(adapters.scale)
        self._tensors = tensors
        self._held: tuple[str, NDArray[np.float32], NDArray[np.float32]] | None = None

    def read(self, name: str, start: int, n: int, dtype: str) -> NDArray[Any]:
        """Returns elements of a weight with its adapter's product added; see ``export_source.Read``."""
        if factor_names(name)[0] not in self._tensors:
            return self._read(name, start, n, dtype)
        # The factors first: what a checkpoint has is read tensor by tensor, each in order.
        a, b = self._factors(name)
        columns = a.shape[1]
        first, last = start // columns, (start + n - 1) // columns + 1
        product = (b[first:last] @ a) * self._scale
        skipped = start - first * columns
        weight = self._read(name, start, n, "float32")
        return rounded(name, weight + product.reshape(-1)[skipped : skipped + n], dtype)

    def _factors(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        if self._held is None or self._held[0] != name:
            a, b = (self._whole(factor) for factor in factor_names(name))
            self._held = name, a, b
        return self._held[1], self._held[2]

    def _whole(self, name: str) -> NDArray[np.float32]:
        tensor = self._tensors[name]
        # A copy: the memory that a store gives may be used again for its next read.
        return np.array(self._read(name, 0, tensor.elements, "float32")).reshape(tensor.shape)
