# SPDX-License-Identifier: Apache-2.0
"""GGUF: every type that the ``gguf`` package dequantises, models in several parts, and settings held as tensors."""

from __future__ import annotations

import re
import struct

import gguf.quants
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, get_tensor_name_map
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from tiny_checkpoints import hf_config, random_tensors, read_whole, write_gguf

from memascend_jax.checkpoints.gguf_names import FAMILIES, gguf_name
from memascend_jax.checkpoints.gguf_rope import llama3_factors, rope_settings
from memascend_jax.checkpoints.source import open_checkpoint
from memascend_jax.errors import DataError


def is_dequantised(kind: Kind) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


KINDS = [kind for kind in Kind if is_dequantised(kind)]
MODULES = {
    "attn_q": ("self_attn.q_proj", 256, 256),
    "attn_k": ("self_attn.k_proj", 128, 256),
    "attn_v": ("self_attn.v_proj", 128, 256),
    "attn_output": ("self_attn.o_proj", 256, 256),
    "ffn_gate": ("mlp.gate_proj", 512, 256),
    "ffn_up": ("mlp.up_proj", 512, 256),
    "ffn_down": ("mlp.down_proj", 256, 512),
}


def unpermuted(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Row by row, as llama.cpp's converter is undone."""
    out = np.empty_like(rows)
    for row in range(len(rows)):
        head, within = divmod(row, head_dim)
        out[head * head_dim + within % 2 * (head_dim // 2) + within // 2] = rows[row]
    return out


def test_the_package_dequantises_what_is_tested_here():
    assert set(KINDS) == {Kind.F32, Kind.F16, *gguf.quants._type_traits}
    assert len(KINDS) >= 26


def test_every_type_is_read_in_pieces_as_the_package_dequantises_it(tmp_path):
    """Any bytes are a valid tensor of any type; some are infinite, or not a number."""
    layers = -(-len(KINDS) // len(MODULES))
    config = hf_config(num_hidden_layers=layers)
    places = [(layer, module) for layer in range(layers) for module in MODULES][: len(KINDS)]
    rng = np.random.default_rng(0)
    stored, names = {}, {}
    for (layer, module), kind in zip(places, KINDS, strict=True):
        ours, rows, columns = MODULES[module]
        block, nbytes = GGML_QUANT_SIZES[kind]
        name = f"blk.{layer}.{module}.weight"
        content = rng.integers(0, 256, (rows, columns // block * nbytes), np.uint8)
        if kind in (Kind.F32, Kind.F16):
            content = content.view(np.float32 if kind == Kind.F32 else np.float16)
        stored[name] = (content, kind)
        names[name] = f"model.layers.{layer}.{ours}.weight"
    path = write_gguf(
        tmp_path / "m.gguf", config, random_tensors(config), leave_out=list(stored), stored=stored
    )
    checkpoint = open_checkpoint(path)
    with np.errstate(all="ignore"):
        for name, (content, kind) in stored.items():
            expected = dequantize(content, kind).astype(np.float32)
            if ".attn_q." in name or ".attn_k." in name:
                expected = unpermuted(expected, 64)
            for max_bytes in (1, 30_000, 8 << 20):
                got = read_whole(checkpoint, names[name], max_bytes=max_bytes)
                np.testing.assert_array_equal(got, expected, err_msg=f"{kind.name} in pieces of {max_bytes}")


@pytest.fixture
def parts(tmp_path):
    config = hf_config(tie_word_embeddings=False)
    tensors = random_tensors(config)
    write_gguf(tmp_path / "m.gguf", config, tensors, split=6)
    paths = sorted(tmp_path.glob("m-*.gguf"))
    assert len(paths) == 4 and paths[0].name == "m-00001-of-00004.gguf"
    return tensors, paths


def test_a_model_in_parts_is_read_by_any_of_them(parts):
    tensors, paths = parts
    for path in (paths[0], paths[2]):
        checkpoint = open_checkpoint(path)
        for name, value in tensors.items():
            np.testing.assert_array_equal(read_whole(checkpoint, name), value)
        checkpoint.close()


def test_missing_and_foreign_parts_are_named(parts, tmp_path):
    _, paths = parts
    content = [path.read_bytes() for path in paths]
    paths[1].unlink()
    paths[3].unlink()
    with pytest.raises(DataError, match=rf"of its 4 parts {paths[1].name}, {paths[3].name} are missing"):
        open_checkpoint(paths[0])
    paths[1].write_bytes(content[2])
    paths[3].write_bytes(content[3])
    with pytest.raises(DataError, match=rf"{paths[1].name} has split\.no 2, split\.count 4.*belong together"):
        open_checkpoint(paths[0])
    paths[1].write_bytes(content[1][:-10_000])
    with pytest.raises(DataError, match=rf"'.*{paths[1].name}': it has [\d,]+ bytes, its tensors reach to"):
        open_checkpoint(paths[0])
    paths[1].write_bytes(content[1])
    (tmp_path / "other.gguf").write_bytes(content[0])
    with pytest.raises(DataError, match=r"it is one of 4 parts, which are found by their names"):
        open_checkpoint(tmp_path / "other.gguf")


def test_a_tensor_in_two_parts_is_refused(parts):
    _, paths = parts
    number = b"split.no" + struct.pack("<I", 2)
    content = paths[0].read_bytes()
    assert content.count(number) == 1
    paths[1].write_bytes(content.replace(number + b"\0", number + b"\1"))
    with pytest.raises(
        DataError, match=rf"in two parts: 'token_embd\.weight' in {paths[0].name} and {paths[1].name}"
    ):
        open_checkpoint(paths[0])


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3s_scaling_is_found_in_its_factors(tmp_path, factor):
    factors = llama3_factors(500_000.0, 64, factor, 1.0, 4.0, 8192)
    # As ``transformers`` scales: high frequencies not at all, low ones by the factor, in between smoothly.
    assert factors[0] == 1.0 and factors[-1] == factor and (np.diff(factors) >= 0).all()
    found = {"rope.freq_base": 500_000.0}
    settings = rope_settings(found, 64, {"rope_freqs.weight": factors}.get, "m")
    assert settings == {
        "rope_theta": 500_000.0,
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with pytest.raises(DataError, match="are those of no known setting"):
        rope_settings(found, 64, {"rope_freqs.weight": factors[::-1].copy()}.get, "m")
    assert (
        rope_settings(found, 64, {"rope_freqs.weight": np.ones(32, np.float32)}.get, "m")["rope_type"]
        == "default"
    )


def test_names_are_those_of_the_package():
    """Every module that a family has a name for, in some layer, by the package's own table."""
    for architecture, family in FAMILIES.items():
        table = get_tensor_name_map(MODEL_ARCH[architecture.upper()], 4)
        for module in family.names:
            name = f"model.layers.3.{module}.weight"
            if ".experts." in module:
                name = f"model.layers.3.{re.sub(r'experts', 'experts.0', module)}.weight"
                # The package knows experts once they are together.
                expected = table.get_name(name.replace("experts.0.", "experts."), try_suffixes=(".weight",))
            else:
                expected = table.get_name(name, try_suffixes=(".weight",))
            if expected is not None:
                assert gguf_name(name, family).name == expected, f"{architecture}: {name}"
            else:
                assert "block_sparse_moe" in module, f"{architecture}: {name}"
