# SPDX-License-Identifier: Apache-2.0
"""The tokenizers of the model families, rebuilt around small vocabularies: the same steps as in the published files.

``byte_level.json.gz`` and the ``*.model`` files in ``tests/golden`` are made by ``make_token_ids.py`` there.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GOLDEN = Path(__file__).parents[1] / "golden"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UP, _LOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA3 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UP}*{_LOW}+|[^\r\n\p{{L}}\p{{N}}]?{_UP}+{_LOW}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UP}*{_LOW}+{_SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{_UP}+{_LOW}*{_SHORT}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACE = "▁"
#: Around the number of a special token, in the texts.
MARK = "\x02"


@dataclass(frozen=True)
class Family:
    """A tokenizer: the contents of its files, and what a GGUF file of the same vocabulary says.

    ``gguf`` has the metadata beside tokens, merges, scores and types; None: llama.cpp's form says less than the file.
    """

    tokenizer: dict[str, Any]
    config: dict[str, Any]
    special: tuple[str, ...]
    gguf: dict[str, Any] | None = None
    architecture: str = "llama"
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Leaves the files of a model's folder, without weights."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {"tokenizer.json": self.tokenizer, "tokenizer_config.json": self.config, **self.extra}
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        return folder


def texts_for(family: Family | None) -> list[str]:
    """The texts, with the special tokens of ``family``; None: without those that have any."""
    with gzip.open(GOLDEN / "texts.json.gz", "rt", encoding="utf-8") as file:
        texts: list[str] = json.load(file)["texts"]
    if family is None:
        return [text for text in texts if MARK not in text]

    def filled(text: str) -> str:
        parts = text.split(MARK)
        return "".join(
            part if index % 2 == 0 else family.special[int(part) % len(family.special)]
            for index, part in enumerate(parts)
        )

    return [filled(text) for text in texts]


def checksums(ids: Sequence[Sequence[int]]) -> NDArray[np.uint32]:
    """One number per text for its ids."""
    return np.array([zlib.crc32(np.array(each, "<u4").tobytes()) for each in ids], np.uint32)


def families() -> dict[str, Family]:
    """Every family by name."""
    return {
        "gpt2": _byte_level("gpt-2", _gpt2_words(), ("<|endoftext|>",), cls="GPT2Tokenizer"),
        "smollm2": _byte_level(
            "smollm", _digits(), ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), cls="GPT2Tokenizer"
        ),
        "llama3": _byte_level(
            "llama-bpe",
            _split(LLAMA3),
            ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
            bos="<|begin_of_text|>",
            whole=True,
        ),
        "qwen2": _byte_level(
            "qwen2",
            _split(QWEN2),
            ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            plain=("<tool_call>", "</tool_call>"),
            normalizer={"type": "NFC"},
            cls="Qwen2Tokenizer",
        ),
        "mistral-nemo": _byte_level(
            "tekken", _split(TEKKEN), ("<unk>", "<s>", "</s>", "[INST]"), bos="<s>", whole=True
        ),
        "phi4-mini": _byte_level("gpt-4o", _split(GPT4O), ("<|endoftext|>", "<|end|>"), cls="GPT2Tokenizer"),
        "llama2": _pieces("llama_like", _prefixed(), None, cls="LlamaTokenizer"),
        "mistral": _pieces("llama_like", None, _metaspace(), cls="LlamaTokenizer", gguf=False),
        "phi3": _pieces(
            "llama_like",
            _prefixed(),
            None,
            cls="LlamaTokenizer",
            architecture="phi3",
            more=("<|endoftext|>", "<|assistant|>", "<|end|>"),
            gguf=False,
        ),
        "gemma": _pieces(
            "gemma_like",
            {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
            cls="GemmaTokenizer",
            architecture="gemma2",
        ),
    }


def byte_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of the byte-level vocabulary."""
    with gzip.open(GOLDEN / "byte_level.json.gz", "rt", encoding="utf-8") as file:
        content = json.load(file)
    return content["tokens"], content["merges"]


def _byte_level(
    pre: str,
    words: list[dict[str, Any]],
    special: tuple[str, ...],
    *,
    plain: tuple[str, ...] = (),
    bos: str | None = None,
    whole: bool = False,
    normalizer: dict[str, Any] | None = None,
    cls: str = "PreTrainedTokenizerFast",
) -> Family:
    tokens, merges = byte_vocabulary()
    every = [*tokens, *special, *plain]
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    post: dict[str, Any] = {**by_bytes, "trim_offsets": False}
    if bos is not None:
        post = {"type": "Sequence", "processors": [post, _around(bos, every.index(bos))]}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(every, token, token in special) for token in (*special, *plain)],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*words, by_bytes]},
        "post_processor": post,
        "decoder": {**by_bytes, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges,
            "ignore_merges": whole,
            "byte_fallback": False,
            "fuse_unk": False,
        },
    }
    types = [1] * len(tokens) + [3] * len(special) + [4] * len(plain)
    metadata = {"model": "gpt2", "pre": pre, "tokens": every, "merges": merges, "token_type": types}
    if bos is not None:
        metadata["bos_token_id"] = every.index(bos)
    config = {
        "tokenizer_class": cls,
        "bos_token": bos,
        "eos_token": special[0],
        "clean_up_tokenization_spaces": False,
    }
    return Family(tokenizer, config, (*special, *plain), metadata)


def _pieces(
    name: str,
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    *,
    cls: str,
    architecture: str = "llama",
    more: tuple[str, ...] = (),
    gguf: bool = True,
) -> Family:
    content = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    pieces, scores, types, merges = (content[key] for key in ("pieces", "scores", "types", "merges"))
    special = [text for text, kind in zip(pieces, types, strict=True) if kind in (2, 3)]
    defined = [text for text, kind in zip(pieces, types, strict=True) if kind == 4 and text.strip(SPACE)]
    bos, eos, unk = (content[key] for key in ("bos", "eos", "unk"))
    every = [*pieces, *more]
    prefix = normalizer is None or normalizer["type"] == "Sequence"
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            *(_added(every, token, True) for token in special),
            *(_added(every, token, False) for token in defined),
            *({**_added(every, token, True), "rstrip": True} for token in more),
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _around(bos, every.index(bos)),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                *steps,
                *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(pieces)},
            "merges": merges,
            "unk_token": unk,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }
    metadata = {
        "model": "llama",
        "tokens": [
            " " * len(piece) if prefix is False and len(piece) > 1 and not piece.strip(SPACE) else piece
            for piece in pieces
        ],
        "scores": scores,
        "token_type": types,
        "bos_token_id": pieces.index(bos),
        "eos_token_id": pieces.index(eos),
        "unknown_token_id": pieces.index(unk),
        "add_space_prefix": prefix,
    }
    config = {
        "tokenizer_class": cls,
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unk,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
    }
    return Family(tokenizer, config, (*special, *more), metadata if gguf else None, architecture)


def _added(every: list[str], token: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": every.index(token), "content": token, **flags}


def _around(bos: str, index: int) -> dict[str, Any]:
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}},
    }


def _split(pattern: str) -> list[dict[str, Any]]:
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]


def _gpt2_words() -> list[dict[str, Any]]:
    return _split(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def _digits() -> list[dict[str, Any]]:
    return [{"type": "Digits", "individual_digits": True}, *_gpt2_words()]


def _prefixed() -> dict[str, Any]:
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]}


def _metaspace() -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
