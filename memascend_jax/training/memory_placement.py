# SPDX-License-Identifier: Apache-2.0
"""The whole training state in the arena: the reference that streaming is compared with, by the same code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memascend_jax.dtypes import to_dtype
from memascend_jax.memory.pool import Lease, SlotPool
from memascend_jax.observe.step_clock import StepClock
from memascend_jax.optim.state_format import itemsize
from memascend_jax.training.model_layout import (
    GRADIENT,
    PARAMETER,
    ModelLayout,
    StagePart,
    UpdatePiece,
    leaf_name,
)
from memascend_jax.training.placement import Fill, LoadedGroup, Visit
from memascend_jax.training.slot_classes import MemoryContents, gradient_name, memory_contents
from memascend_jax.training.stage_schedule import StageKey
from memascend_jax.training.state_groups import fill_all, visit_all
from memascend_jax.transfer import Transfer

if TYPE_CHECKING:
    import jax


class MemoryPlacement:
    """Everything in leases that are held for the whole run; nothing is read or written, only aliased."""

    def __init__(
        self,
        layout: ModelLayout,
        pool: SlotPool,
        transfer: Transfer,
        clock: StepClock,
        contents: MemoryContents | None = None,
    ) -> None:
        self.version = 0
        self.overlaps_update = False
        self._layout = layout
        self._transfer = transfer
        self._clock = clock
        contents = memory_contents(layout) if contents is None else contents
        self._leases: Mapping[str, Lease] = {name: pool.lease(name) for name in contents}
        self._views: dict[str, NDArray[Any]] = {}
        for name, (elements, dtype) in contents.items():
            self._views[name] = self._leases[name].view(to_dtype(dtype), (elements,))
            self._views[name].view(np.uint8)[:] = 0

    def load(self, key: StageKey) -> MemoryStage:
        return MemoryStage(self, self._layout.stage_parts[key])

    def read_rows(self, tensor: str, rows: NDArray[np.int64], leaf: str = PARAMETER) -> NDArray[Any]:
        vocab, columns = self._layout.leaf_shape(tensor, leaf)
        table = self._views[leaf_name(tensor, leaf)][: vocab * columns].reshape(vocab, columns)
        return np.ascontiguousarray(table[rows])

    def spool(self, tensor: str, start: int, gradient: jax.Array, n_elements: int) -> None:
        size = itemsize(self._layout.format.grad_dtype)
        gradient.block_until_ready()
        with self._clock.span("device_to_host"):
            address = self._gradient_address(tensor) + start * size
            self._transfer.copy_out(gradient, address, 0, n_elements * size)

    def begin_early_update(self, apply: Callable[[LoadedGroup], None]) -> None:
        pass

    def update_early(self, tensors: Collection[str]) -> None:
        pass

    def cancel_update(self) -> None:
        pass

    def drop_gradients(self) -> None:
        pass

    def prepare_update(self) -> None:
        pass

    def begin_update(self, skip_gradient: frozenset[str], apply: Callable[[LoadedGroup], None]) -> None:
        for tensor in skip_gradient:
            self._views[gradient_name(tensor)].view(np.uint8)[:] = 0
        with self._clock.span("optimizer"):
            for loaded in self._loaded_groups():
                apply(loaded)
        self.version += 1

    def finish_update(self) -> None:
        pass

    def write(self, tensor: str, start: int, values: NDArray[Any]) -> None:
        self._views[tensor][start : start + values.size] = values.reshape(-1)

    def read(self, tensor: str, start: int, n_elements: int) -> NDArray[Any]:
        return self._views[tensor][start : start + n_elements].copy()

    def visit_groups(self, visit: Visit) -> None:
        self.finish_update()
        visit_all(self._loaded_groups(), visit)

    def fill_groups(self, fill: Fill) -> None:
        self.finish_update()
        fill_all(self._loaded_groups(), fill)

    def begin_commit(self, run_state: bytes) -> None:
        pass

    def finish_commit(self) -> None:
        pass

    def io_bytes(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        self._views.clear()
        for lease in self._leases.values():
            lease.release()

    def wait_for(self, part: StagePart) -> None:
        """Waits until a stage may read ``part``: at once, as nothing runs beside the step."""

    def _loaded_groups(self) -> list[LoadedGroup]:
        return [LoadedGroup(group, self._address, self._view) for group in self._layout.update_groups]

    def _gradient_address(self, tensor: str) -> int:
        return self._leases[gradient_name(tensor)].address

    def _name(self, piece: UpdatePiece, leaf: str) -> str:
        return gradient_name(piece.tensor) if leaf == GRADIENT else leaf_name(piece.tensor, leaf)

    def _address(self, piece: UpdatePiece, leaf: str) -> int:
        name = self._name(piece, leaf)
        start, _ = self._layout.leaf_span(piece, leaf)
        return self._leases[name].address + start * self._views[name].itemsize

    def _view(self, piece: UpdatePiece, leaf: str) -> NDArray[Any]:
        start, n = self._layout.leaf_span(piece, leaf)
        return self._views[self._name(piece, leaf)][start : start + n]


class MemoryStage:
    """Aliases of a stage's parameters. A new one is made for every use, after every update."""

    def __init__(self, owner: MemoryPlacement, parts: tuple[StagePart, ...]) -> None:
        self.version = owner.version
        self._owner = owner
        self._parts = parts
        self._arrays: dict[str, jax.Array] | None = None

    def arrays(self) -> dict[str, jax.Array]:
        if self._arrays is None:
            owner, dtype = self._owner, self._owner._layout.format.param_dtype
            for part in self._parts:
                owner.wait_for(part)
            with owner._clock.span("host_to_device"):
                self._arrays = {
                    part.local_name: owner._transfer.to_device(
                        owner._leases[part.tensor], dtype, part.memory_shape, part.start * itemsize(dtype)
                    )
                    for part in self._parts
                }
        return self._arrays

    def forget_arrays(self) -> None:
        self._arrays = None

    def refresh(self) -> None:
        self.forget_arrays()
        self.version = self._owner.version

    def release(self) -> None:
        self.forget_arrays()
