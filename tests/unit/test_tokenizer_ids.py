# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of every family give the ids that transformers gives, on 1,000 texts; however the vocabulary came."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizer_families import GOLDEN, checksums, families, texts_for

from memascend_jax.checkpoints.gguf_header import GgufHeader
from memascend_jax.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from memascend_jax.checkpoints.gguf_words import WORDS
from memascend_jax.checkpoints.model_files import ModelFiles
from memascend_jax.checkpoints.positioned_file import PositionedFile
from memascend_jax.checkpoints.tokenizer_files import read_tokenizer
from memascend_jax.errors import DataError

FAMILIES = families()
GGUF_FAMILIES = [name for name, family in FAMILIES.items() if family.gguf is not None]
_ADD = {list: "add_array", int: "add_uint32", str: "add_string", bool: "add_bool"}


@pytest.fixture(scope="module")
def expected():
    return np.load(GOLDEN / "token_ids.npz")


def files_of(folder) -> ModelFiles:
    return ModelFiles.of(str(folder), {path.name: path.read_bytes() for path in folder.iterdir()})


def ids_of(tokenizer, texts, **options) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, **options)]


def check_same(texts, ids, sums) -> None:
    wrong = [text for text, same in zip(texts, checksums(ids) == sums, strict=True) if not same]
    assert not wrong, f"{len(wrong)} texts differ: {wrong[:3]!r}"


def write_metadata(path, family):
    writer = GGUFWriter(path, family.architecture)
    for key, value in family.gguf.items():
        getattr(writer, _ADD[type(value)])(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = PositionedFile(path)
    return GgufHeader(file), path


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tokenizer_json_gives_transformers_ids(tmp_path, name, expected):
    family = FAMILIES[name]
    tokenizer = read_tokenizer(files_of(family.write(tmp_path / "model")))
    texts = texts_for(family)
    assert len(texts) == 1000
    check_same(texts, ids_of(tokenizer, texts), expected[name])


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_a_gguf_vocabulary_gives_the_ids_of_the_models_own_tokenizer(tmp_path, name, expected):
    family = FAMILIES[name]
    tokenizer = tokenizer_from_gguf(*write_metadata(tmp_path / "m.gguf", family))
    texts = texts_for(family)
    check_same(texts, ids_of(tokenizer, texts), expected[name])
    # What is exported, and read again by anybody, is the same tokenizer.
    again = read_tokenizer(ModelFiles.of("x", {"tokenizer.json": tokenizer.to_str().encode()}))
    check_same(texts, ids_of(again, texts), expected[name])


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_a_text_is_decoded_to_itself(tmp_path, name):
    tokenizer = tokenizer_from_gguf(*write_metadata(tmp_path / "m.gguf", FAMILIES[name]))
    for text in ("naïve — 日本語 🎉\n\n\t x  ", " leading", "½ ٣", "don't", "a" * 100):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("name", ["llama_like", "gemma_like"])
def test_a_sentencepiece_model_alone_gives_sentencepieces_ids(name, expected):
    files = {"tokenizer.model": (GOLDEN / f"{name}.model").read_bytes(), "config.json": b"{}"}
    tokenizer = read_tokenizer(ModelFiles.of("x", files))
    texts = texts_for(None)
    check_same(texts, ids_of(tokenizer, texts, add_special_tokens=False), expected[f"{name}.model"])


def test_a_sentencepiece_model_puts_the_tokens_around_a_text_that_the_settings_name():
    model = (GOLDEN / "llama_like.model").read_bytes()
    for settings, around in (
        ({}, ["<s>", None]),
        ({"add_bos_token": False, "add_eos_token": True}, [None, "</s>"]),
    ):
        files = {"tokenizer.model": model, "tokenizer_config.json": json.dumps(settings).encode()}
        tokens = read_tokenizer(ModelFiles.of("x", files)).encode("the").tokens
        assert (tokens[0] == "<s>", tokens[-1] == "</s>") == (around[0] is not None, around[1] is not None)


@pytest.mark.parametrize("pre", sorted(WORDS))
def test_every_known_way_of_splitting_keeps_the_text(tmp_path, pre):
    family = FAMILIES["gpt2"]
    family.gguf["pre"] = pre
    try:
        tokenizer = tokenizer_from_gguf(*write_metadata(tmp_path / "m.gguf", family))
    finally:
        family.gguf["pre"] = "gpt-2"
    for text in (
        "I'VE 12345 apples — 日本語 한국어 a/b\r\n\r\n  x",
        "\u0301e\u0301 ½",
        "snake_case CamelCase",
    ):
        decoded = tokenizer.decode(tokenizer.encode(text).ids)
        assert decoded == (text if not WORDS[pre].composed else decoded)
        assert len(decoded) > len(text) - 4


def test_other_vocabularies_are_refused_by_name(tmp_path):
    for change, words in (
        ({"model": "t5"}, "its vocabulary is 't5'; known are 'gpt2', 'llama'"),
        ({"pre": "default"}, "its words are split as 'default'"),
        ({"pre": "kimi-k2"}, "its words are split as 'kimi-k2'"),
        ({"merges": ["Ġ nothing"]}, "its merges are not of its tokens"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "the token 'a' has the ids 0 and 2"),
        ({"token_type": [1, 1]}, "but 2 types of them"),
    ):
        family = FAMILIES["gpt2"]
        changed = type(family)({}, {}, (), {**family.gguf, **change})
        with pytest.raises(DataError) as caught:
            tokenizer_from_gguf(*write_metadata(tmp_path / "m.gguf", changed))
        assert words in str(caught.value)
