# SPDX-License-Identifier: Apache-2.0
"""GGUF files: names, order of rows, dequantised values, bounded memory, and every fault found at open."""

from __future__ import annotations

import re
import tracemalloc

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from tiny_checkpoints import hf_config, random_tensors, read_whole, write_gguf

from memascend_jax.checkpoints.gguf_header import GgufHeader
from memascend_jax.checkpoints.positioned_file import PositionedFile
from memascend_jax.checkpoints.source import open_checkpoint
from memascend_jax.errors import DataError
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.units import MIB

MIXED = {
    "token_embd.weight": Kind.Q8_0,
    "blk.0.attn_q.weight": Kind.Q4_1,
    "blk.0.attn_k.weight": Kind.Q4_0,
    "blk.0.attn_v.weight": Kind.Q5_0,
    "blk.0.attn_output.weight": Kind.Q5_1,
    "blk.0.ffn_gate.weight": Kind.F16,
    "blk.0.ffn_up.weight": Kind.BF16,
}
HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
    "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
}


@pytest.mark.parametrize("max_bytes", [1, 100_000, 8 * MIB])
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_has_hugging_faces_name_and_order(tmp_path, tied, max_bytes):
    config = hf_config(tie_word_embeddings=tied)
    tensors = random_tensors(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, tensors))
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(read_whole(checkpoint, name, max_bytes=max_bytes), value, err_msg=name)


def test_quantised_tensors_are_what_the_gguf_package_makes_of_them(tmp_path):
    config = hf_config()
    tensors = random_tensors(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, tensors, kinds=MIXED))
    for theirs, kind in MIXED.items():
        # Each row is quantised by itself, so the order of the rows does not matter to its values.
        expected = dequantize(quantize(tensors[HF_NAMES[theirs]], kind), kind)
        np.testing.assert_array_equal(read_whole(checkpoint, HF_NAMES[theirs]), expected, err_msg=theirs)


def test_super_block_types_are_read(tmp_path):
    """Q6_K has no quantiser in Python, but any bytes are a valid tensor of it."""
    config, name = hf_config(), "blk.1.ffn_up.weight"
    content = np.random.default_rng(0).integers(0, 60, (512, 210), np.uint8)
    path = write_gguf(
        tmp_path / "m.gguf",
        config,
        random_tensors(config),
        leave_out=[name],
        stored={name: (content, Kind.Q6_K)},
    )
    got = read_whole(open_checkpoint(path), "model.layers.1.mlp.up_proj.weight", max_bytes=10_000)
    np.testing.assert_array_equal(got, dequantize(content, Kind.Q6_K))


def test_config_has_hugging_faces_keys(tmp_path):
    config = hf_config()
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, random_tensors(config)))
    got = ModelConfig.from_hf(checkpoint.config)
    expected = ModelConfig.from_hf(
        {**config, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    )
    assert got == expected


def test_pieces_and_temporaries_are_bounded(tmp_path):
    config = hf_config(vocab_size=32768)
    tensors = random_tensors(config)
    checkpoint = open_checkpoint(
        write_gguf(tmp_path / "m.gguf", config, tensors, kinds={"token_embd.weight": Kind.Q4_1})
    )
    next(checkpoint.pieces("model.norm.weight"))  # imports what dequantises
    del tensors
    tracemalloc.start()
    try:
        for _, piece in checkpoint.pieces("model.embed_tokens.weight", 8 * MIB):
            assert piece.nbytes <= 8 * MIB
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The piece before, the piece being made, and the temporaries of one 1 MiB block.
    assert peak < 2 * 8 * MIB + 8 * MIB


def test_long_metadata_arrays_stay_in_the_file_until_asked(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    tokens = [f"token {index}" for index in range(5000)]
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_string("after", "the arrays")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = GgufHeader(PositionedFile(tmp_path / "m.gguf"))
    assert header.array("tokenizer.ggml.tokens") == tokens
    assert header.array("tokenizer.ggml.scores") == [0.5, 1.5]
    assert header.array("absent") is None
    assert header.metadata["after"] == "the arrays"


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path):
    config, name = hf_config(), "blk.1.attn_norm.weight"
    stored = {name: (np.ones(256, np.int8), Kind.I8)}
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), leave_out=[name], stored=stored)
    with pytest.raises(
        DataError, match=rf"'{name}' has type {Kind.I8.value} and shape \[256\], not read here"
    ):
        open_checkpoint(path)


def test_tensors_upon_each_other_are_refused(tmp_path):
    config = hf_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config))
    content = path.read_bytes()
    # A tensor's entry ends with its type and its offset from the start of the data.
    entry = content.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight") + 4 + 8 + 4
    path.write_bytes(content[:entry] + bytes(8) + content[entry + 8 :])
    with pytest.raises(
        DataError, match=r"lies upon 'token_embd\.weight'|lies upon 'blk\.0\.attn_norm\.weight'"
    ):
        open_checkpoint(path)


@pytest.mark.parametrize("keep", [0, 3, 20, 500, 0.5, 0.99])
def test_a_truncated_file_is_refused_at_open(tmp_path, keep):
    config = hf_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config))
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(DataError, match=r"m\.gguf") as caught:
        open_checkpoint(path)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_how_much_of_a_truncated_file_is_missing_is_said_once(tmp_path):
    config = hf_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config))
    header, whole = GgufHeader(PositionedFile(path)), path.stat().st_size
    path.write_bytes(path.read_bytes()[: header.tensors[2].offset])
    count = len(header.tensors)
    with pytest.raises(
        DataError,
        match=rf"it has {path.stat().st_size:,} bytes, its tensors reach to byte [\d,]+: {count - 2} of {count} are",
    ) as caught:
        open_checkpoint(path)
    said = int(re.search(r"to byte ([\d,]+)", str(caught.value))[1].replace(",", ""))
    assert whole - 32 < said <= whole
    assert str(caught.value).count("blk.") == 0


@pytest.mark.parametrize("seed", range(4))
def test_damaged_headers_are_refused_or_read_but_nothing_else(tmp_path, seed):
    """Whatever bytes of the header change: a clear refusal, or a model whose tensors are still there."""
    rng = np.random.default_rng(seed)
    config = hf_config(num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config))
    content = np.frombuffer(path.read_bytes(), np.uint8)
    header = GgufHeader(PositionedFile(path)).end
    refused = 0
    for _ in range(60):
        damaged = content.copy()
        damaged[rng.integers(0, header, rng.integers(1, 4))] = rng.integers(0, 256)
        path.write_bytes(damaged.tobytes())
        try:
            checkpoint = open_checkpoint(path)
        except DataError:
            refused += 1
            continue
        assert read_whole(checkpoint, "model.embed_tokens.weight").shape == (288, 256)
        checkpoint.close()
    assert refused > 30


def test_missing_and_misshapen_tensors_are_all_named(tmp_path):
    config = hf_config()
    tensors = random_tensors(config)
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors["model.layers.1.mlp.down_proj.weight"][:128]
    path = write_gguf(
        tmp_path / "m.gguf", config, tensors, leave_out=["blk.0.attn_v.weight", "output_norm.weight"]
    )
    with pytest.raises(DataError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "3 tensors do not match" in message
    assert "'model.layers.0.self_attn.v_proj.weight' is missing, expected [128, 256]" in message
    assert "'model.norm.weight' is missing" in message
    assert "'model.layers.1.mlp.down_proj.weight' has shape [128, 512], expected [256, 512]" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": {"llama.rope.scaling.type": "dynamic"}}, "rope type 'dynamic' is not known here"),
        ({"extra": {"rope_freqs.weight": np.arange(1, 33, dtype=np.float32)}}, r"rope_freqs\.weight"),
        (
            {"extra": {"blk.0.attn_norm.bias": np.ones(256, np.float32)}},
            r"'blk\.0\.attn_norm\.bias' is not in the model that its config describes",
        ),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(tmp_path, change, message):
    config = hf_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), **change)
    with pytest.raises(DataError, match=message):
        open_checkpoint(path)


def test_another_architecture_is_refused_by_name(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        DataError, match="architecture 'falcon' is not known here; known are 'llama', 'smollm3', 'qwen2'"
    ):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(DataError, match="does not begin as a GGUF file does"):
        open_checkpoint(tmp_path / "weights.bin")


def test_digest_tells_contents_apart(tmp_path):
    config = hf_config()
    digests = {
        open_checkpoint(
            write_gguf(tmp_path / f"{seed}.gguf", config, random_tensors(config, seed=seed))
        ).digest
        for seed in (0, 1)
    }
    assert len(digests) == 2
