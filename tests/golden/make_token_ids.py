# SPDX-License-Identifier: Apache-2.0
"""Makes what the tokenizers are compared with: small vocabularies, 1,000 texts, and their ids by transformers.

    PYTHONPATH=tests/support python tests/golden/make_token_ids.py

Needs transformers 5, tokenizers and sentencepiece. Writes, beside itself, ``texts.json.gz``; ``byte_level.json.gz``,
the tokens and merges of a byte-level vocabulary; ``llama_like.model`` and ``gemma_like.model`` as sentencepiece trains
them, with ``*.json``, their pieces and merges; and ``token_ids.npz``, of each family and text a checksum of its ids.

Of the tokenizers those are asked that transformers makes of the files as they are (``PreTrainedTokenizerFast``); how
often the classes that ``AutoTokenizer`` chooses differ from them is printed.
"""
# ruff: noqa: RUF001, SIM905

from __future__ import annotations

import gzip
import io
import json
import random
import tempfile
import unicodedata
from pathlib import Path

import numpy as np
from tokenizer_families import GOLDEN, MARK, checksums, families, texts_for

_WORDS = (
    "the quick brown fox don't we'll I'VE naïve façade Straße ĳ ﬁnal Ωmega привет мир שלום עולם مرحبا بالعالم नमस्ते"
    " สวัสดี 你好，世界 日本語のテキスト 한국어 Türkçe İstanbul ǅungla ªº ½ ² ٣٤٥ १२३ Ⅷ"
).split()
_CODE = (
    "def f(x: int) -> str:\n    return f'{x:>8,.2f}'\n",
    'for (int i = 0; i < n; ++i) { a[i] += "\\t\\n\\\\"; }',
    '<div class="a">&nbsp;</div>\r\n<!-- x -->\r\n',
    "SELECT * FROM t WHERE a >= 3.14e-10 AND b != 'it''s';",
    '\t\tif err != nil {\n\t\t\treturn nil, fmt.Errorf("%w", err)\n\t\t}\n',
    "x = [1,2,3];y={'a':0xFF}#comment\n\n\n\nz=lambda:None",
    "https://example.org/a/b?c=d&e=%20#f user@example.org /usr/bin/env",
)
_EMOJI = ("😀", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "👍🏽", "❤️", "☺", "\U0001fae8", "⌨️", "1️⃣")
_SPACES = (
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\r\n",
    "\n\n",
    " \n ",
    "\u00a0",
    "\u2003",
    "\u3000",
    "\u200b",
    "\ufeff",
    "\v",
    "\f",
    "\x85",
)
_MARKS = (
    "e\u0301",
    "\u0301",
    "a\u0328\u0308",
    "n\u0303o",
    "\u05e9\u05c1\u05b8",
    "क्षि",
    "ก็",
    "Å",
    "Å",
    "Z\u0351\u036b\u0343\u036a",
    "가",
    "가",
)
_CONTROL = (
    "\x00",
    "\x01",
    "\x07",
    "\x1b[31m",
    "\x7f",
    "\u202e",
    "\u2066",
    "\ufffd",
    "\ue000",
    "\U000e0041",
    "\U0010ffff",
)
_NUMBERS = (
    "0",
    "7",
    "42",
    "123",
    "1234",
    "12345678901234567890",
    "3.1415",
    "1,000,000",
    "-1e-9",
    "2026-12-01",
    "+49 30 123",
    "١٢٣٤",
    "𝟙𝟚",
)
_PUNCTUATION = (
    "...",
    "!?",
    "—",
    "“x”",
    "«y»",
    "#$%^&*()",
    "''",
    "``",
    "::",
    "//",
    "\\",
    "|",
    "~~",
    "·",
    "…",
    "。",
    "、",
)


def make_texts(count: int = 1000, seed: int = 20261201) -> list[str]:
    """``count`` texts: each kind alone and mixed, with places for special tokens in some, and any characters at all."""
    rng = random.Random(seed)
    kinds = (_WORDS, _CODE, _EMOJI, _SPACES, _MARKS, _CONTROL, _NUMBERS, _PUNCTUATION)
    texts = ["", *(part for kind in kinds for part in kind), *(" " + word for word in _WORDS)]
    texts += [first + last for first in _SPACES for last in ("a", "1", ".", "\n", " 12")]
    while len(texts) < count:
        choice = rng.random()
        if choice < 0.15:
            texts.append("".join(_any_character(rng) for _ in range(rng.randint(1, 20))))
            continue
        pool = rng.choice(kinds) if choice < 0.3 else None
        parts = [rng.choice(pool or rng.choice(kinds)) for _ in range(rng.randint(2, 12))]
        if rng.random() < 0.3:
            parts.insert(rng.randint(0, len(parts)), f"{MARK}{rng.randrange(4)}{MARK}")
        texts.append(rng.choice(("", " ", "  ", "\n")).join(parts))
    return texts[:count]


def _any_character(rng: random.Random) -> str:
    while True:
        point = rng.choice((rng.randint(0, 0x2FF), rng.randint(0, 0xFFFF), rng.randint(0, 0x10FFFF)))
        # What is not assigned yet has other properties in each version of Unicode.
        if chr(point) != MARK and not 0xD800 <= point < 0xE000 and unicodedata.category(chr(point)) != "Cn":
            return chr(point)


def write_texts() -> list[str]:
    texts = make_texts()
    _write_gz(GOLDEN / "texts.json.gz", {"texts": texts})
    return texts


def write_byte_level(texts: list[str]) -> None:
    """A vocabulary of bytes and 1,200 merges that join across what the families split, and that no split leaves out."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "merged_with_next"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1456, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*texts, *_prose()], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    _write_gz(GOLDEN / "byte_level.json.gz", {"tokens": tokens, "merges": merges})


def write_pieces(name: str, texts: list[str], **options: object) -> None:
    """A sentencepiece model of the BPE kind, and what transformers makes merges of."""
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in [*texts, *_prose()] if "\x00" not in text]),
        model_writer=written,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        character_coverage=0.98,
        hard_vocab_limit=False,
        max_sentence_length=1 << 20,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    (GOLDEN / f"{name}.model").write_bytes(written.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    n = processor.get_piece_size()
    kinds = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in range(n)
    ]
    pieces = [processor.id_to_piece(i) for i in range(n)]
    defined = set(str(options.get("user_defined_symbols", "")).split(",")) - {""}
    kinds = [4 if piece in defined else kind for piece, kind in zip(pieces, kinds, strict=True)]
    content = {
        "pieces": pieces,
        "scores": [processor.get_score(i) for i in range(n)],
        "types": kinds,
        "merges": [],
        **{key: processor.id_to_piece(getattr(processor, f"{key}_id")()) for key in ("bos", "eos", "unk")},
    }
    content["merges"] = _merges(content, by_score=name == "llama_like")
    (GOLDEN / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def _merges(content: dict, *, by_score: bool) -> list[list[str]]:
    """As transformers derives them: from scores, or as Gemma's from the order of the pieces."""
    from transformers.tokenization_utils_base import generate_merges

    vocab = {piece: index for index, piece in enumerate(content["pieces"])}
    scores = dict(zip(content["pieces"], content["scores"], strict=True))
    return [list(pair) for pair in generate_merges(vocab, scores if by_score else None)]


def _prose() -> list[str]:
    """Text enough to learn words from: docstrings of the standard library."""
    import argparse
    import asyncio
    import collections
    import datetime
    import logging
    import re
    import statistics

    modules = (argparse, asyncio, collections, datetime, logging, re, statistics, random, json)
    texts = [text for module in modules for text in (_docs(module))]
    return [line for text in texts for line in text.splitlines()]


def _docs(module: object) -> list[str]:
    return [
        value.__doc__ for value in vars(module).values() if isinstance(getattr(value, "__doc__", None), str)
    ]


def _write_gz(path: Path, content: object) -> None:
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        file.write(json.dumps(content, ensure_ascii=False).encode())


def write_ids() -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    sums = {}
    for name, family in families().items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = family.write(Path(scratch))
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            model_type = {"llama2": "llama", "smollm2": "llama", "gpt2": "gpt2"}.get(name, name.split("-")[0])
            (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES.get(name, model_type)}))
            auto = AutoTokenizer.from_pretrained(folder)
            texts = texts_for(family)
            ids = [tokenizer(text)["input_ids"] for text in texts]
            chosen = [auto(text)["input_ids"] for text in texts]
            differ = [text for text, ours, theirs in zip(texts, ids, chosen, strict=True) if ours != theirs]
            print(
                f"{name}: {type(auto).__name__} differs from tokenizer.json in {len(differ)} of {len(texts)}",
                differ[:3],
            )
            sums[name] = checksums(ids)
    for name in ("llama_like", "gemma_like"):
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(GOLDEN / f"{name}.model"))
        sums[f"{name}.model"] = checksums([processor.encode(text) for text in texts_for(None)])
    np.savez_compressed(GOLDEN / "token_ids.npz", **sums)


MODEL_TYPES = {
    "llama3": "llama",
    "mistral-nemo": "mistral",
    "phi4-mini": "phi3",
    "gemma": "gemma2",
}


if __name__ == "__main__":
    made = write_texts()
    write_byte_level(made)
    write_pieces("llama_like", made, vocab_size=900, add_dummy_prefix=True)
    write_pieces(
        "gemma_like",
        made,
        vocab_size=950,
        add_dummy_prefix=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        user_defined_symbols="<start_of_turn>,<end_of_turn>,▁▁,▁▁▁,▁▁▁▁,<b>,</b>",
    )
    write_ids()
