# SPDX-License-Identifier: Apache-2.0
"""What a new store will be: its sizes and shares, from arguments, devices and measured speeds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memascend_jax.errors import StoreError
from memascend_jax.storage import device
from memascend_jax.storage.capacity import plan_store, plan_whole_devices
from memascend_jax.storage.device import Member
from memascend_jax.storage.engine import EngineFactory
from memascend_jax.storage.layout import Geometry
from memascend_jax.storage.spec import TensorLayout
from memascend_jax.storage.speed import measure_speed
from memascend_jax.storage.superblock import Durability
from memascend_jax.storage.weights import weights_from_speeds
from memascend_jax.storage.whole_number import listed

Weights = Sequence[int] | Literal["measure"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CreationPlan:
    """The arguments of ``TensorStore.create`` that decide the geometry; see there."""

    layouts: Sequence[TensorLayout]
    capacity: int | str | None
    scratch_bytes: int
    durability: Durability
    block_bytes: int
    catalog_bytes: int | None
    weights: Weights | None
    speeds: Sequence[float] | None

    def check(self, paths: Sequence[str]) -> None:
        """Raises ``StoreError`` for everything that can be known before a path is opened for writing."""
        if self.weights is not None and self.speeds is not None:
            raise StoreError("weights and speeds both say how members share the data; give one of them")
        if isinstance(self.weights, str) and self.weights != "measure":
            raise StoreError(f"weights must be whole numbers or 'measure', got {self.weights!r}")
        device_bytes = [device.block_device_bytes(path) for path in paths]
        if self.fills_devices and None in device_bytes:
            raise StoreError(
                f"cannot create a store at '{paths[device_bytes.index(None)]}': in a file a new store needs a capacity "
                "(capacity=, --capacity, such as 40GiB), or the specs of the tensors it is for; without either it "
                "takes all of its members, which must be block devices then"
            )
        self._geometry(device_bytes, self._given_weights(len(paths)))

    @property
    def fills_devices(self) -> bool:
        """Whether neither capacity nor contents say how large the store is: it takes all of its devices."""
        return self.capacity is None and not self.layouts and self.scratch_bytes == 0

    def geometry(self, members: Sequence[Member], make_engine: EngineFactory) -> Geometry:
        """Returns the geometry on ``members``, whose speeds are measured when that was asked for."""
        weights: Sequence[int] = self._given_weights(len(members))
        if self.weights == "measure" and len(members) > 1:
            speeds = [measure_speed(member, make_engine) for member in members]
            weights = weights_from_speeds(speeds)
            for member, speed, weight in zip(members, speeds, weights, strict=True):
                _log.info("'%s' moves %.2f GB/s: weight %d", member.path, speed / 1e9, weight)
        sizes = [member.nbytes if member.is_block_device else None for member in members]
        return self._geometry(sizes, weights)

    def _given_weights(self, members: int) -> Sequence[int]:
        """Returns the shares as far as they are known without measuring."""
        if self.speeds is not None:
            listed(self.speeds, "speeds", "one number per path")
            if len(self.speeds) != members:
                raise StoreError(
                    f"{len(self.speeds)} speeds for {members} members, got {list(self.speeds)}; give one per path "
                    "(--speeds 7000,3500)"
                )
            return weights_from_speeds(self.speeds)
        if self.weights is None or isinstance(self.weights, str):
            return [1] * members
        return listed(self.weights, "weights", "one whole number per path")

    def _geometry(self, device_bytes: Sequence[int | None], weights: Sequence[int]) -> Geometry:
        """Returns the geometry; without capacity or contents the store fills its devices."""
        whole = [nbytes for nbytes in device_bytes if nbytes is not None]
        if self.fills_devices and len(whole) == len(device_bytes) == len(weights):
            return plan_whole_devices(
                whole, block_bytes=self.block_bytes, weights=weights, catalog_bytes=self.catalog_bytes
            )
        return plan_store(
            self.layouts,
            capacity=self.capacity,
            scratch_bytes=self.scratch_bytes,
            durability=self.durability,
            block_bytes=self.block_bytes,
            weights=weights,
            catalog_bytes=self.catalog_bytes,
            members=len(device_bytes),
        )
