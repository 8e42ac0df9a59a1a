# SPDX-License-Identifier: Apache-2.0
"""Tokenizers built from GGUF metadata: how each kind splits words, and which kinds are refused."""

from __future__ import annotations

import pytest
from gguf import GGUFWriter
from tokenizers import pre_tokenizers

from memascend_jax.checkpoints.gguf_header import GgufHeader
from memascend_jax.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from memascend_jax.checkpoints.positioned_file import PositionedFile
from memascend_jax.errors import DataError

SPECIAL = ["<unk>", "<s>", "</s>"]
MERGED = ["Ġ Ġ", "ĠĠ Ġ", "1 2", "12 3", "123 4", "h i"]
_CONTROL, _NORMAL = 3, 1


def built(tmp_path, *, model="gpt2", pre="gpt-2", **added):
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGED)]
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(MERGED)
    writer.add_token_types([_CONTROL] * len(SPECIAL) + [_NORMAL] * (len(tokens) - len(SPECIAL)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in added.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = PositionedFile(tmp_path / "m.gguf")
    return tokenizer_from_gguf(GgufHeader(file), file.path)


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["hi", "ĠĠ", "Ġ", "1234"]),
        ("smollm", ["hi", "ĠĠĠ", "1", "2", "3", "4"]),
        ("llama-bpe", ["hi", "ĠĠ", "Ġ", "123", "4"]),
    ],
)
def test_numbers_and_spaces_split_as_the_model_was_trained(tmp_path, pre, tokens):
    assert built(tmp_path, pre=pre).encode("hi   1234", add_special_tokens=False).tokens == tokens


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe"])
def test_any_text_survives_encoding_and_decoding(tmp_path, pre):
    tokenizer = built(tmp_path, pre=pre)
    for text in ("naïve — 日本語 🎉\n\n\t x  ", " leading", "½ ٣", "", "don't"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_are_matched_whole_and_skipped_when_asked(tmp_path):
    tokenizer = built(tmp_path)
    encoded = tokenizer.encode("<s>hi</s>")
    assert encoded.ids[0] == 1 and encoded.ids[-1] == 2 and encoded.tokens[1:-1] == ["hi"]
    assert tokenizer.decode(encoded.ids) == "hi"
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "<s>hi</s>"


@pytest.mark.parametrize(
    ("added", "tokens"),
    [
        ({}, ["hi"]),
        ({"add_bos_token": True}, ["<s>", "hi"]),
        ({"add_eos_token": True}, ["hi", "</s>"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "hi", "</s>"]),
    ],
)
def test_tokens_around_a_text_are_added_where_the_metadata_say_so(tmp_path, added, tokens):
    tokenizer = built(tmp_path, **added)
    assert tokenizer.encode("hi").tokens == tokens
    assert tokenizer.encode("hi", add_special_tokens=False).tokens == ["hi"]


@pytest.mark.parametrize("kind", [{"model": "t5"}, {"pre": "whitespace"}])
def test_other_vocabularies_are_refused_with_the_remedy(tmp_path, kind):
    with pytest.raises(DataError, match=f"{next(iter(kind.values()))!r}.*Hugging Face folder"):
        built(tmp_path, **kind)
