# SPDX-License-Identifier: Apache-2.0
"""A store described for people and for JSON."""

from __future__ import annotations

from typing import Any

from memascend_jax.storage.commit import Committer
from memascend_jax.storage.space import Space
from memascend_jax.storage.tile_table import UNWRITTEN, StoredTensor, TileTable
from memascend_jax.storage.volume import Volume


def describe(volume: Volume, table: TileTable, space: Space, committer: Committer) -> dict[str, Any]:
    """Returns what the store is, holds and lies on; sizes in bytes, times in seconds since 1970."""
    geometry, superblock = volume.geometry, volume.superblock
    return {
        "store_id": superblock.store_id.hex(),
        "created_s": superblock.created_s,
        "generation": committer.generation,
        "dirty": committer.dirty,
        "run_state_bytes": len(committer.run_state),
        "durability": superblock.durability,
        "block_bytes": geometry.block_bytes,
        "capacity_bytes": geometry.capacity_bytes,
        "used_bytes": space.used_bytes,
        "scratch_bytes": geometry.scratch_bytes,
        "catalog_bytes": geometry.catalog_bytes,
        "bytes_written": committer.bytes_written,
        "io_backend": volume.engine.backend,
        "io_reason": volume.engine.backend_reason,
        "members": [
            {
                "path": member.path,
                "block_device": member.is_block_device,
                "file_system": member.file_system,
                "direct": member.direct,
                "weight": geometry.weights[index],
                "bytes": geometry.member_bytes(index),
            }
            for index, member in enumerate(volume.members)
        ],
        "tensors": [_describe_tensor(tensor) for tensor in table.tensors.values()],
    }


def _describe_tensor(tensor: StoredTensor) -> dict[str, Any]:
    layout = tensor.layout
    return {
        "name": tensor.name,
        "dtype": layout.spec.dtype,
        "shape": list(layout.spec.shape),
        "bytes": layout.nbytes,
        "places": tensor.places,
        "tiles": layout.tiles,
        "tile_elements": layout.tile_elements,
        "mutable": layout.spec.mutable,
        "row_access": layout.spec.row_access,
        "written": not bool((tensor.place == UNWRITTEN).any()),
    }
