# SPDX-License-Identifier: Apache-2.0
"""Reads a store by docs/store_format.md alone, sharing no code with the store."""

from __future__ import annotations

import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from stores import ANY_DISK

from memascend_jax.storage.tensor_store import TensorSpec, TensorStore

TYPES = [
    ml_dtypes.bfloat16, np.float16, np.float32, np.float64, np.int8, np.uint8, np.int16,
    np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.bool_,
]  # fmt: skip


def crc32c(data: bytes) -> int:
    """Bit by bit, from the definition: reflected polynomial 0x82F63B78."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


class DocumentedStore:
    """The members' bytes and what the document says they mean."""

    def __init__(self, paths: list[Path]) -> None:
        members = [path.read_bytes() for path in paths]
        count = struct.unpack_from("<H", members[0], 42)[0]
        assert count == len(members)
        self.members = sorted(members, key=lambda raw: struct.unpack_from("<H", raw, 40)[0])
        for index, raw in enumerate(self.members):
            for copy in (0, 64 << 10):
                assert raw[copy : copy + 8] == b"MEMASCND"
                assert struct.unpack_from("<II", raw, copy + 8) == (1, 2)
                assert struct.unpack_from("<H", raw, copy + 40)[0] == index
                assert struct.unpack_from("<I", raw, copy + 508)[0] == crc32c(raw[copy : copy + 508])
            assert raw[96 << 10 : (96 << 10) + 8] == b"MEMASESS"
            assert struct.unpack_from("<I", raw, (96 << 10) + 36)[0] == 1
        first = self.members[0]
        self.block = struct.unpack_from("<I", first, 20)[0]
        self.stripe, self.capacity, _, self.catalog_bytes, self.data, _ = struct.unpack_from("<6Q", first, 48)
        self.weights = struct.unpack_from(f"<{count}H", first, 112)
        self.catalog = self.newest_catalog()

    def newest_catalog(self) -> bytes:
        best = (-1, b"")
        for raw in self.members:
            for slot in (0, 1):
                at = (128 << 10) + slot * self.catalog_bytes
                if raw[at : at + 8] != b"MEMACATL":
                    continue
                generation, length = struct.unpack_from("<QQ", raw, at + 32)
                body = raw[at : at + length]
                assert struct.unpack_from("<I", body, 124)[0] == crc32c(body[:124] + body[128:])
                assert generation % 2 == slot
                best = max(best, (generation, body))
        return best[1]

    def bytes_at(self, address: int, count: int) -> bytes:
        """The documented mapping, a block at a time."""
        out = bytearray()
        order = sorted(((2 * k + 1) / w, m) for m, w in enumerate(self.weights) for k in range(w))
        dealt = [m for _, m in order]
        for begin in range(address, address + count, 512):
            if len(self.members) == 1:
                member, where = 0, self.data + begin
            else:
                stripe, within = divmod(begin, self.stripe)
                turn, position = divmod(stripe, len(dealt))
                member = dealt[position]
                mine = turn * self.weights[member] + dealt[:position].count(member)
                where = self.data + mine * self.stripe + within
            out += self.members[member][where : where + 512]
        return bytes(out[:count])

    def tensors(self) -> dict[str, np.ndarray]:
        table, tiles, _, state = struct.unpack_from("<4Q", self.catalog, 48)
        tensors, dims, _ = struct.unpack_from("<3Q", self.catalog, 128)
        shapes = 128 + 24 + 40 * tensors
        text = shapes + 8 * dims
        places = 128 + table
        checksums = places + -(-tiles // 8) * 8
        self.run_state = self.catalog[len(self.catalog) - state :]
        found = {}
        for index in range(tensors):
            record = struct.unpack_from("<IIIBBHQqq", self.catalog, 152 + 40 * index)
            name_at, name_bytes, shape_at, axes, kind, flags, tile_elements, *bases = record
            name = self.catalog[text + name_at :][:name_bytes].decode()
            shape = struct.unpack_from(f"<{axes}q", self.catalog, shapes + 8 * shape_at)
            dtype = np.dtype(TYPES[kind])
            total = int(np.prod(shape))
            per_tile = total if flags & 8 or total <= tile_elements else tile_elements
            data = b""
            for tile in range(max(-(-total // per_tile), 1) if per_tile else 1):
                nbytes = min(per_tile, total - tile * per_tile) * dtype.itemsize
                base = bases[self.catalog[places]]
                places += 1
                piece = self.bytes_at(base + tile * per_tile * dtype.itemsize, nbytes)
                unit = self.unit_bytes(flags, shape, dtype.itemsize, per_tile) if nbytes else 0
                for begin in range(0, nbytes, unit) if unit else [0]:
                    checked = piece[begin : begin + unit] if unit else piece
                    assert struct.unpack_from("<I", self.catalog, checksums)[0] == crc32c(checked), name
                    checksums += 4
                data += piece
            found[name] = np.frombuffer(data, dtype).reshape(shape)
        return found

    def unit_bytes(self, flags: int, shape: tuple[int, ...], itemsize: int, per_tile: int) -> int:
        if not flags & 2:
            return 0
        row = int(np.prod(shape[1:])) * itemsize
        whole = row % self.block == 0 and row <= 1 << 20 and per_tile * itemsize % row == 0
        return row if whole else self.block


@pytest.mark.parametrize("weights", [(1,), (2, 1)])
@pytest.mark.parametrize("block_bytes", [512, 4096])
def test_store_is_read_by_its_document(tmp_path: Path, weights: tuple[int, ...], block_bytes: int) -> None:
    paths = [tmp_path / f"m{index}" for index in range(len(weights))]
    specs = [
        TensorSpec("rows", "bfloat16", (40, 96), row_access=True),
        TensorSpec("blocks", "float32", (6, 1024), tile_elements=2048, row_access=True),
        TensorSpec("state", "float32", (5000,), tile_elements=1024),
        TensorSpec("fixed", "int16", (3, 5), mutable=False),
        TensorSpec("scalar", "float64", ()),
        TensorSpec("empty", "bool", (0,)),
    ]
    rng = np.random.default_rng(0)
    values = {
        spec.name: rng.integers(0, 90, spec.shape).astype(
            TYPES[[t.__name__ for t in TYPES].index(spec.dtype)]
        )
        if spec.dtype != "bool"
        else np.zeros(spec.shape, np.bool_)
        for spec in specs
    }
    with TensorStore.create(
        paths, specs=specs, capacity="6MiB", weights=weights, block_bytes=block_bytes, **ANY_DISK
    ) as store:
        for name, array in values.items():
            store.put(name, array)
        store.commit(b"first")
        values["state"][2048:4096] += 1
        store.write_elements("state", 2048, values["state"][2048:4096])
        store.commit(b"second")
    documented = DocumentedStore(paths[::-1])
    found = documented.tensors()
    assert documented.run_state == b"second"
    assert list(found) == list(values)
    for name, array in values.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
