# SPDX-License-Identifier: Apache-2.0
"""The example of docs/offload.md at a small size: the losses of plain optax, three tiles of state in host memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

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
    # A generic update makes new arrays of up to one tile beside its two slots.
    slots = 2 if optimizer == "adamw" else 3
    assert offloaded["slot_bytes"] == slots * TILE_BYTES
    assert not (tmp_path / "store").exists()
