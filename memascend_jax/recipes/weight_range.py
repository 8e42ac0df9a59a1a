# SPDX-License-Identifier: Apache-2.0
"""Whether float16 can hold the weights that a run would begin with: looked at before the run has a folder or a store.

jax-free. The weights are read once for it, a piece at a time; no other element type needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from memascend_jax.errors import DataError
from memascend_jax.models.shapes import TensorShape
from memascend_jax.recipes.inputs import ModelSource
from memascend_jax.units import counted

#: What is smaller is rounded to the largest float16, 65504; this and what is larger to infinity.
_BEYOND = 65520.0
_SHOWN = 3


def needs_look(model: ModelSource, param_dtype: str) -> bool:
    """Returns whether weights of ``model`` may be beyond ``param_dtype``: those of a checkpoint that is not float16."""
    checkpoint = model.checkpoint
    return (
        param_dtype == "float16"
        and checkpoint is not None
        and any(tensor.dtype != param_dtype for tensor in checkpoint.tensors.values())
    )


def check_weight_range(
    model: ModelSource, tensors: Sequence[TensorShape], source: str, on_tensor: Callable[[str], object]
) -> None:
    """Returns when every weight of ``model`` has a float16 that is finite.

    Args:
        source: what the model was configured as.
        on_tensor: called after each tensor, for progress.

    Raises:
        DataError: names the tensors with values that are too large, or not finite, and how large the largest is.
    """
    faults: list[str] = []
    for tensor in tensors:
        faults += _faults(model, tensor.name)
        on_tensor(tensor.name)
    if faults:
        more = f" and {counted(len(faults) - _SHOWN, 'more', 'more')}" if len(faults) > _SHOWN else ""
        raise DataError(
            f"cannot train the model in {source!r} with model.compute_dtype=float16, whose largest number is 65,504: "
            f"{'; '.join(faults[:_SHOWN])}{more}. Nothing was written. Use model.compute_dtype=bfloat16, which has the "
            "range of float32, or float32"
        )


def _faults(model: ModelSource, name: str) -> Iterator[str]:
    largest, broken = 0.0, 0
    for _, values in model.pieces(name):
        wide = values.astype(np.float32, copy=False)
        finite = np.isfinite(wide)
        if not finite.all():
            broken += int(wide.size - finite.sum())
            wide = wide[finite]
        largest = max(largest, float(np.abs(wide).max(initial=0.0)))
    if largest >= _BEYOND:
        yield f"{name!r} has values of up to {largest:,.6g}"
    if broken:
        yield f"{name!r} has {counted(broken, 'value that is', 'values that are')} inf or nan"
