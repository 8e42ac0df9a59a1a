# SPDX-License-Identifier: Apache-2.0
"""The cut of a model covers every element once, on block boundaries, in slots that are large enough."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import EMBED_NAME
from memascend_jax.optim.state_format import BLOCK_BYTES, itemsize, state_format, tile_elements
from memascend_jax.training.model_layout import plan_layout
from memascend_jax.training.stage_schedule import HEAD, LAYER

SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
ODD = SMOLLM2 | {
    "vocab_size": 1009,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
WIDE = SMOLLM2 | {
    "vocab_size": 5000,
    "hidden_size": 5006,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
}


@pytest.fixture(params=["bfloat16", "float32"])
def fmt(request):
    return state_format("fp32", request.param)


@pytest.fixture(params=[SMOLLM2, ODD, WIDE], ids=["smollm2", "odd", "wide"])
def layout(request, fmt):
    return plan_layout(
        ModelConfig.from_hf(request.param), fmt, target_tile_elements=1 << 18, target_head_bytes=1 << 20
    )


def test_update_groups_cover_every_element_once_in_forward_order(layout):
    seen = [piece for group in layout.update_groups for piece in group.pieces]
    for tensor in layout.tensors:
        pieces = [piece for piece in seen if piece.tensor == tensor.name]
        assert [piece.tile for piece in pieces] == list(range(len(pieces)))
        position = 0
        for piece in pieces:
            assert piece.start == position
            position += piece.n_elements
        assert position == math.prod(tensor.shape)
    order = list(dict.fromkeys(piece.tensor for piece in seen))
    first, *others = [tensor.name for tensor in layout.tensors]
    assert first == EMBED_NAME
    assert order == [*others, first]


def test_update_groups_stay_inside_a_stage(layout):
    owner = {
        part.tensor: key if key.kind == LAYER else key.kind
        for key, parts in layout.stage_parts.items()
        for part in parts
    }
    for group in layout.update_groups:
        assert len({owner.get(piece.tensor) for piece in group.pieces}) == 1


def test_head_tiles_are_whole_optimizer_tiles_where_rows_allow():
    layout = plan_layout(
        ModelConfig.from_hf(SMOLLM2),
        state_format("fp32", "bfloat16"),
        target_tile_elements=1 << 20,
        target_head_bytes=8 << 20,
    )
    tile = layout.tile_elements[layout.head_tensor]
    assert layout.n_head_tiles > 1
    assert layout.head_rows * layout.config.hidden_size % tile == 0


def test_pieces_of_a_group_do_not_overlap_and_lie_on_blocks(layout):
    sizes = {leaf.suffix: leaf.dtype for leaf in layout.format.leaves} | {
        "gradient": layout.format.grad_dtype,
        "parameter": layout.format.param_dtype,
    }
    for group in layout.update_groups:
        spans = sorted(
            (offset, offset + piece.n_elements * itemsize(sizes[leaf]))
            for piece in group.pieces
            for leaf, offset in piece.offsets.items()
        )
        assert all(begin % BLOCK_BYTES == 0 for begin, _ in spans)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert spans[-1][1] <= group.nbytes


def test_tiles_and_stage_parts_begin_on_blocks(layout):
    size = itemsize(layout.format.param_dtype)
    for group in layout.update_groups:
        for piece in group.pieces:
            for dtype in (layout.format.param_dtype, layout.format.grad_dtype, "float32"):
                assert piece.start * itemsize(dtype) % BLOCK_BYTES == 0
    for parts in layout.stage_parts.values():
        assert all(part.start * size % BLOCK_BYTES == 0 for part in parts)


def test_head_tiles_cover_the_vocabulary_and_have_one_shape(layout):
    tiles = [layout.stage_parts[key][0] for key in layout.stage_parts if key.kind == HEAD]
    assert sum(part.shape[0] for part in tiles) == layout.config.vocab_size
    assert {part.memory_shape[0] for part in tiles} == {layout.head_rows}
    assert len(tiles) == layout.n_head_tiles


def test_no_slot_is_as_large_as_the_embedding():
    layout = plan_layout(
        ModelConfig.from_hf(SMOLLM2),
        state_format("fp32", "bfloat16"),
        target_tile_elements=1 << 19,
        target_head_bytes=8 << 20,
    )
    embedding = 49152 * 576 * 2
    layer = max(
        part.n_elements * 2
        for key, parts in layout.stage_parts.items()
        if key.kind == LAYER
        for part in parts
    )
    assert layer < embedding / 20
    assert layout.head_rows * 576 * 2 <= 8 << 20
    assert max(group.nbytes for group in layout.update_groups) < embedding


@pytest.mark.parametrize(
    ("shape", "whole_rows"),
    [((49152, 576), True), ((128256, 4096), True), ((100, 10007), False), ((7,), True), ((0, 4), True)],
)
def test_tiles_are_whole_rows_where_rows_allow(shape, whole_rows):
    size = tile_elements(shape, 1 << 18 if whole_rows and shape[0] < 100000 else 1 << 24)
    row = math.prod(shape[1:]) if len(shape) > 1 else 1
    if whole_rows and math.prod(shape) > size:
        assert size % row == 0
