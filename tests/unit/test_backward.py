# SPDX-License-Identifier: Apache-2.0
"""The order of a backward: what leaves a stage is put away while the next one computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from memascend_jax.training.backward import Backward
from memascend_jax.training.stage_schedule import HEAD, StageKey


def test_a_head_tile_is_put_away_after_the_next_one_was_dispatched() -> None:
    order: list[str] = []

    def head_backward(weight: str, *rest: Any, **static: Any) -> tuple[Any, Any, Any]:
        order.append(f"compute {weight}")
        return None, weight, None

    stages = SimpleNamespace(use=lambda key: {"weight": key.index}, advance=lambda: None)
    functions = SimpleNamespace(
        zeros=lambda shape, dtype: None,
        put=lambda rows: rows,
        head_backward=head_backward,
        finish_head_tile=lambda dw, rows, padded, start: (dw, None, rows),
    )
    layout = SimpleNamespace(
        head_tensor="table",
        tied=False,
        n_head_tiles=3,
        is_trained=lambda tensor: True,
        stage_parts={
            StageKey(HEAD, tile): [SimpleNamespace(tensor="table", start=tile, n_elements=1)]
            for tile in range(3)
        },
    )
    gradients = SimpleNamespace(put=lambda tensor, start, *rest: order.append(f"put {start}"))
    backward = Backward(
        *cast(Any, (layout, SimpleNamespace(passes=lambda key: False), functions, None, None, stages)),
        batches=cast(Any, [SimpleNamespace(labels=None, weights=None)]),
        rows=cast(Any, SimpleNamespace(padded=np.zeros(1, np.int64))),
        gradients=cast(Any, gradients),
        squares=[None],
    )
    backward.head(cast(Any, [None]), [None], cast(Any, [0, 1, 2]), cast(Any, None))
    assert order == ["compute 2", "compute 1", "put 2", "compute 0", "put 1", "put 0"]
