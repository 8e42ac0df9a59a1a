# SPDX-License-Identifier: Apache-2.0
"""Builds the tokenizer that a GGUF file's metadata describes: byte-level BPE as GPT-2's, or sentencepiece's BPE.

What the metadata leaves open is as in the tokenizer that the model itself came with.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend_jax.checkpoints.gguf_header import GgufHeader
from memascend_jax.checkpoints.gguf_words import WORDS, Words
from memascend_jax.checkpoints.sentencepiece_model import NORMAL
from memascend_jax.checkpoints.sentencepiece_tokenizer import (
    SPACE,
    PieceVocabulary,
    around_processor,
    mark_tokens,
    sentencepiece_tokenizer,
    unique_ids,
)
from memascend_jax.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Architectures whose pieces are joined in the order of the vocabulary, and whose texts get no space before them.
_GEMMA = ("gemma", "gemma2", "gemma3")
_KNOWN_MODELS = ("gpt2", "llama")


def tokenizer_from_gguf(header: GgufHeader, path: Path) -> Tokenizer:
    """Returns the tokenizer of a GGUF file.

    Raises:
        DataError: another kind of vocabulary or of splitting into words, or metadata that is missing or contradicts
            itself.
    """
    model = header.metadata.get("tokenizer.ggml.model")
    if model not in _KNOWN_MODELS:
        raise _fault(path, f"its vocabulary is {model!r}; known are {_named(_KNOWN_MODELS)}")
    tokens = header.array("tokenizer.ggml.tokens")
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise _fault(path, "it has no tokens (tokenizer.ggml.tokens)")
    types = header.array("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise _fault(path, f"it has {len(tokens):,} tokens, but {len(types):,} types of them")
    return (_byte_level if model == "gpt2" else _sentencepiece)(header, path, tokens, types)


def special_id(header: GgufHeader, name: str) -> int | None:
    """Returns the id of ``bos``, ``eos``, ``pad`` or ``unk``; of a sentencepiece vocabulary its usual one."""
    key = {"pad": "padding", "unk": "unknown"}.get(name, name)
    found = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if isinstance(found, int):
        return found
    usual = {"unk": 0, "bos": 1, "eos": 2} if header.metadata.get("tokenizer.ggml.model") == "llama" else {}
    return usual.get(name)


def _byte_level(header: GgufHeader, path: Path, tokens: list[str], types: list[int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    name = header.metadata.get("tokenizer.ggml.pre")
    words = WORDS.get(name) if isinstance(name, str) else None
    if words is None:
        raise _fault(path, f"its words are split as {name!r}; known are {_named(WORDS)}")
    merges = header.array("tokenizer.ggml.merges")
    if merges is None:
        raise _fault(path, "it has no merges (tokenizer.ggml.merges)")
    ids = unique_ids(_spelled(tokens, types), str(path))
    pairs = _pairs(merges)
    try:
        tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=words.whole_words))
    except Exception as error:  # the package raises plain Exception
        raise _fault(path, f"its merges are not of its tokens: {error}") from error
    if words.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(words)
    tokenizer.decoder = decoders.ByteLevel()
    around = around_processor(
        _added_around(header, tokens, "bos", words.add_bos), _added_around(header, tokens, "eos", False), ids
    )
    byte_level = processors.ByteLevel(trim_offsets=False)
    tokenizer.post_processor = processors.Sequence([byte_level, around]) if around else byte_level
    mark_tokens(tokenizer, zip(tokens, types, strict=True))
    return tokenizer


def _spelled(tokens: list[str], types: list[int]) -> list[str]:
    """Tokens in the alphabet of bytes; those that are matched whole, and what is there to fill up, as they are."""
    from tokenizers import pre_tokenizers

    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    spelling = _byte_spelling()
    return [
        token
        if kind != NORMAL or alphabet.issuperset(token)
        else "".join(spelling[byte] for byte in token.encode())
        for token, kind in zip(tokens, types, strict=True)
    ]


def _pairs(merges: list[Any]) -> list[tuple[str, str]]:
    """What each merge joins; one that says nothing joins nothing that there is."""
    cut = (str(merge).partition(" ") for merge in merges)
    return [(left, right) for left, _, right in cut]


def _byte_spelling() -> list[str]:
    """GPT-2's character for each byte: itself where it is printable, else one from 256 on."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _pre_tokenizer(words: Words) -> Any:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in words.patterns]
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, bytes_of_words])


def _sentencepiece(header: GgufHeader, path: Path, tokens: list[str], types: list[int]) -> Tokenizer:
    scores = header.array("tokenizer.ggml.scores") or []
    merges = header.array("tokenizer.ggml.merges")
    is_gemma = header.metadata.get("general.architecture") in _GEMMA
    if is_gemma:
        # Runs of spaces stand there as such; and its scores are not the order in which pieces are joined.
        tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        scores = [float(-index) for index in range(len(tokens))]
    if len(scores) != len(tokens):
        raise _fault(path, f"it has {len(tokens):,} tokens, but {len(scores):,} scores of them")

    def flag(name: str, default: bool) -> bool:
        value = header.metadata.get(f"tokenizer.ggml.{name}", default)
        return bool(value)

    vocabulary = PieceVocabulary(
        tokens,
        scores,
        types,
        special_id(header, "unk"),
        special_id(header, "bos"),
        special_id(header, "eos"),
        add_prefix=flag("add_space_prefix", not is_gemma),
        add_bos=flag("add_bos_token", True),
        add_eos=flag("add_eos_token", False),
        merges=None if merges is None else _pairs(merges),
        join_user_defined=is_gemma,
    )
    return sentencepiece_tokenizer(vocabulary, str(path))


def _added_around(header: GgufHeader, tokens: list[str], name: str, default: bool) -> str | None:
    """The token ``bos`` or ``eos`` when it is added to every text."""
    token_id = special_id(header, name)
    if not header.metadata.get(f"tokenizer.ggml.add_{name}_token", default) or token_id is None:
        return None
    return tokens[token_id] if token_id < len(tokens) else None


def _named(names: Any) -> str:
    return ", ".join(map(repr, names))


def _fault(path: Path, what: str) -> DataError:
    return DataError(
        f"cannot build the tokenizer of '{path}': {what}. Use the model's Hugging Face folder, which has a "
        "tokenizer.json"
    )
