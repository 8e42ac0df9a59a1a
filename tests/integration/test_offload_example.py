# SPDX-License-Identifier: Apache-2.0
"""The example of docs/offload.md at a small size: the losses of plain optax, three tiles of state in host memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import memascend_jax
from memascend_jax import TensorStore, offload

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "offload_nnx.py"
TILE_ELEMENTS = 4096
#: Two moments of float32.
TILE_BYTES = 8 * TILE_ELEMENTS


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("offload_nnx", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
def test_the_example_follows_plain_optax(example: ModuleType, optimizer: str, tmp_path: Path) -> None:
    small = [
        "--width",
        "64",
        "--blocks",
        "2",
        "--steps",
        "12",
        "--learning-rate",
        "1e-3",
        "--direct-io",
        "optional",
    ]
    small += [
        "--optimizer",
        optimizer,
        "--tile-elements",
        str(TILE_ELEMENTS),
        "--store",
        str(tmp_path / "store"),
    ]
    plain, offloaded = example.main([*small, "--plain"]), example.main(small)
    np.testing.assert_allclose(offloaded["losses"], plain["losses"], rtol=1e-5)
    assert offloaded["losses"][-1] < offloaded["losses"][0]
    assert offloaded["slot_bytes"] == 2 * TILE_BYTES
    assert not (tmp_path / "store").exists()


def _status_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _grown_bytes(tx: Any, folder: Path, elements: int, tile: int) -> int:
    """What the peak of the resident memory grows by in making a state and two steps."""
    params = {"w": np.full(elements, 0.5, np.float32)}
    grads = {"w": np.full(elements, 0.25, np.float32)}
    folder.mkdir()
    with (
        TensorStore.create(folder, capacity=16 * elements + (32 << 20), direct_io="optional") as store,
        offload(tx, store=store, tile_elements=tile) as offloaded,
    ):
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_kib("VmHWM")
        state = offloaded.init(params)
        for _ in range(2):
            updated, state = offloaded.apply(grads, state, params)
            del updated
        return 1024 * (_status_kib("VmHWM") - before)


def test_state_of_a_fused_update_takes_no_more_of_the_process_than_three_tiles(tmp_path: Path) -> None:
    """Beside what any update takes, the new parameters. A generic one's arrays lie where malloc leaves them."""
    elements, tile = 8 << 20, 1 << 20
    grown = []
    for name, make in (("without", memascend_jax.sgd), ("with", memascend_jax.adamw)):
        # Compiled functions are not the state's.
        _grown_bytes(make(1e-3), tmp_path / f"{name} warm", 2 * tile, tile)
        grown.append(_grown_bytes(make(1e-3), tmp_path / name, elements, tile))
    assert grown[1] - grown[0] <= 3 * 8 * tile
