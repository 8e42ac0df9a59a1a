# SPDX-License-Identifier: Apache-2.0
"""How byte-level vocabularies in GGUF files split a text into words, by ``tokenizer.ggml.pre``.

The expressions are those of the models' own ``tokenizer.json``; each splits what the one before has left. Names are
llama.cpp's. Not here: ways that need more than expressions (``kimi-k2``, ``afmoe``, ``gemma4``, ``whitespace``), and
``default``, which says that whoever made the file did not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_END_WITH_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}{_END}"
_QWEN2 = rf"{_SHORT}|{_LETTERS}|\p{{N}}{_END}"
_QWEN35 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}{_END_WITH_SLASH}"
_GPT4O = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SHORT}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}{_END_WITH_SLASH}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Chinese characters and Japanese kana.
_CHINESE_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_SEED = rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


@dataclass(frozen=True, slots=True)
class Words:
    """A way of splitting.

    Attributes:
        patterns: of words, one after the other; every match and what is between is a word.
        whole_words: a word that is a token is one, whatever the merges say.
        add_bos: a text begins with the token of beginnings where the file does not say.
        composed: characters are composed (NFC) first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    composed: bool = False


_DIGITS = Words((r"\p{N}", _GPT2))
_DEEPSEEK = Words((r"\p{N}{1,3}", _CHINESE_JAPANESE, _DEEPSEEK3))


@dataclass(frozen=True, slots=True)
class _Group:
    words: Words
    names: tuple[str, ...] = field(default=())


_GROUPS = (
    _Group(
        Words((_GPT2,)),
        (
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "modern-bert",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "roberta-bpe",
            "jina-es",
            "jina-de",
            "jina-v1-en",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v2-code",
        ),
    ),
    _Group(
        _DIGITS,
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    _Group(
        Words((_LLAMA3,), whole_words=True, add_bos=True),
        (
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ),
    ),
    _Group(Words((_LLAMA3,)), ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    _Group(Words((_QWEN2,), composed=True), ("qwen2",)),
    _Group(Words((_QWEN35,), composed=True), ("qwen35",)),
    _Group(
        Words((_QWEN2,)),
        (
            "deepseek-r1-qwen",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "kormo",
            "f2llmv2",
            "megrez",
            "grok-2",
        ),
    ),
    _Group(Words((_TEKKEN,), whole_words=True, add_bos=True), ("tekken",)),
    _Group(Words((_GPT4O,)), ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")),
    _Group(_DEEPSEEK, ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4")),
    _Group(
        Words(
            (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
        ),
        ("deepseek-coder",),
    ),
    _Group(Words((_SEED,)), ("seed-coder",)),
    _Group(Words((_BAILING,)), ("bailingmoe", "bailingmoe2", "llada-moe")),
    _Group(Words((_BLOOM,)), ("bloom", "gpt3-finnish", "poro-chat")),
    _Group(Words((_BLOOM, r"\p{N}")), ("viking",)),
)

#: The ways by ``tokenizer.ggml.pre``.
WORDS: dict[str, Words] = {name: group.words for group in _GROUPS for name in group.names}
