# SPDX-License-Identifier: Apache-2.0
"""What lies beside a tokenizer, and tokenizers that cannot be read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_families import GOLDEN, families

from memascend_jax.checkpoints.model_files import ModelFiles
from memascend_jax.checkpoints.sentencepiece_model import read_sentencepiece
from memascend_jax.checkpoints.tokenizer_files import read_tokenizer
from memascend_jax.checkpoints.vocabulary import check_vocabulary
from memascend_jax.errors import DataError

GPT2 = families()["gpt2"]
ROWS = len(GPT2.gguf["tokens"])


def tokenizer_of(tokenizer=None, **files):
    contents = {"tokenizer.json": GPT2.tokenizer if tokenizer is None else tokenizer} | {
        name.replace("__", "."): content for name, content in files.items()
    }
    return read_tokenizer(
        ModelFiles.of("here", {name: json.dumps(content).encode() for name, content in contents.items()})
    )


def test_a_tokenizer_that_was_saved_to_cut_and_pad_does_neither():
    cuts = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    pads = {
        "strategy": {"Fixed": 9},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
    }
    saved = {**GPT2.tokenizer, "truncation": cuts, "padding": {**pads, "pad_token": "x"}}
    text = "many words that make more than three tokens of it"
    assert tokenizer_of(saved).encode(text).ids == tokenizer_of().encode(text).ids
    assert len(tokenizer_of(saved).encode("a").ids) == 1


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config__json": {"pad_token": "<pad>", "additional_special_tokens": ["<|im_end|>"]}},
        {"tokenizer_config__json": {"pad_token": "<pad>", "turn_token": "<|im_end|>", "add_bos_token": True}},
        {
            "tokenizer_config__json": {
                "added_tokens_decoder": {
                    str(ROWS): {"content": "<pad>", "special": True},
                    str(ROWS + 1): {"content": "<|im_end|>", "special": True},
                }
            }
        },
        {
            "added_tokens__json": {"<|im_end|>": ROWS + 1, "<pad>": ROWS},
            "special_tokens_map__json": {"pad_token": {"content": "<pad>"}, "eos_token": "<|im_end|>"},
        },
    ],
    ids=["named", "own", "decoder", "older"],
)
def test_tokens_that_are_named_beside_the_tokenizer_are_tokens(files):
    tokenizer = tokenizer_of(**files)
    assert tokenizer.encode("<pad>a<|im_end|>").ids == [ROWS, *tokenizer.encode("a").ids, ROWS + 1]
    assert tokenizer.decode([ROWS, ROWS + 1]) == ""


def test_special_tokens_are_split_where_the_settings_say_so():
    split = tokenizer_of(tokenizer_config__json={"split_special_tokens": True})
    assert len(tokenizer_of().encode("<|endoftext|>").ids) == 1 < len(split.encode("<|endoftext|>").ids)


@pytest.mark.parametrize("template", [b"\xff\xfe", None])
def test_a_template_that_is_no_text_is_refused_or_none(template):
    named = [{"name": ["x"]}, {"name": "default", "template": 3}, "x"]
    files = {"tokenizer_config.json": json.dumps({"chat_template": named}).encode()}
    if template is None:
        assert ModelFiles.of("here", files).chat_template is None
        return
    with pytest.raises(DataError, match=r"chat_template\.jinja is not UTF-8 text"):
        _ = ModelFiles.of("here", {**files, "chat_template.jinja": template}).chat_template


def test_a_token_with_another_id_than_it_was_given_is_refused():
    named = {"added_tokens_decoder": {"9": {"content": "<pad>", "special": True}}}
    with pytest.raises(DataError, match=rf"the token '<pad>' has the id 9 there, but would get {ROWS:,}"):
        tokenizer_of(tokenizer_config__json=named)


@pytest.mark.parametrize(
    "beside",
    [
        {"added_tokens_decoder": {"x": 3, "1": None, "2": {"content": 5}}, "bos_token": 7},
        {"additional_special_tokens": [None, 3, {"content": None}, {}], "extra_special_tokens": "x"},
        {"eos_token": {"content": "", "lstrip": "yes"}},
    ],
)
def test_settings_that_make_no_sense_name_no_tokens(beside):
    assert tokenizer_of(tokenizer_config__json=beside).get_vocab_size() == ROWS


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "it has no tokenizer.json; nor a tokenizer.model"),
        ({"tekken.json": b"{}"}, "it has tekken.json only. Make a tokenizer.json of it with transformers"),
        ({"vocab.json": b"{}", "merges.txt": b""}, "it has vocab.json, merges.txt only"),
        ({"tokenizer.json": b"{"}, "cannot read the tokenizer 'here/tokenizer.json'"),
        ({"tokenizer.json": b"\xff\xfe"}, "cannot read the tokenizer 'here/tokenizer.json'"),
        ({"tokenizer.json": b'{"model": {"type": "Other"}}'}, "cannot read the tokenizer"),
        ({"tokenizer.model": b"IQ== 0\nIg== 1\n"}, "is no sentencepiece model"),
        ({"tokenizer.model": b""}, "it has no pieces"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_remedy(files, words):
    with pytest.raises(DataError) as caught:
        read_tokenizer(ModelFiles.of("here", files))
    assert words in str(caught.value)


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def test_other_kinds_of_sentencepiece_models_are_refused_with_every_reason():
    piece = field(1, field(1, "▁a".encode()))
    model = piece + field(2, field(3, 1) + field(24, 1)) + field(3, field(2, b"map") + field(4, 1))
    with pytest.raises(DataError) as caught:
        read_tokenizer(ModelFiles.of("here", {"tokenizer.model": model}))
    for words in (
        "of the kind unigram",
        "replaces characters",
        "removes spaces",
        "otherwise than before a word",
    ):
        assert words in str(caught.value)


MODEL = (GOLDEN / "llama_like.model").read_bytes()


@settings(max_examples=150, deadline=None)
@given(
    content=st.one_of(
        st.binary(max_size=80),
        st.builds(
            lambda start, change: MODEL[:start] + change + MODEL[start + len(change) : 4000],
            st.integers(0, 4000),
            st.binary(max_size=4),
        ),
    )
)
def test_bytes_of_any_kind_are_a_model_or_none(content):
    try:
        model = read_sentencepiece(content)
    except (ValueError, UnicodeDecodeError):
        return
    assert model.pieces and len(model.pieces) == len(model.scores) == len(model.types)


def test_a_tokenizer_with_more_ids_than_rows_is_refused_with_the_remedy():
    tokenizer = tokenizer_of()
    assert check_vocabulary(ROWS, tokenizer, "m") is None
    assert "50 rows are to spare" in check_vocabulary(ROWS + 50, tokenizer, "m")
    with pytest.raises(
        DataError, match=rf"ids up to {ROWS - 1:,}, its tables only .* model\.vocab_size={ROWS} "
    ):
        check_vocabulary(ROWS - 1, tokenizer, "m")
