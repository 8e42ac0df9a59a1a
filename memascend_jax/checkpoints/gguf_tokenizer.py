# SPDX-License-Identifier: Apache-2.0
"""Builds the tokenizer that a GGUF file's metadata describes: byte-level BPE as GPT-2's.

Not here: sentencepiece vocabularies (``tokenizer.ggml.model`` ``llama``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend_jax.checkpoints.gguf_header import GgufHeader
from memascend_jax.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

#: Token types of the metadata: control tokens are special, user-defined ones are matched whole too.
_CONTROL, _USER_DEFINED = 3, 4

#: Llama 3's split into words, from its tokenizer.json.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def tokenizer_from_gguf(header: GgufHeader, path: Path) -> Tokenizer:
    """Returns the tokenizer of a GGUF file whose vocabulary is byte-level BPE.

    Raises:
        DataError: another kind of vocabulary or of splitting into words, or metadata that is missing.
    """
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE

    model, words = (header.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    tokens, merges = (header.array(f"tokenizer.ggml.{key}") for key in ("tokens", "merges"))
    if model != "gpt2" or words not in _PRE_TOKENIZERS or tokens is None or merges is None:
        raise DataError(
            f"cannot build the tokenizer of '{path}': its vocabulary is {model!r} split as {words!r}; known are "
            f"'gpt2' with {', '.join(map(repr, _PRE_TOKENIZERS))}. Use the model's Hugging Face folder, which has a "
            "tokenizer.json."
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(BPE(vocabulary, pairs, ignore_merges=words == "llama-bpe"))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[words]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(header, tokens)
    types = header.array("tokenizer.ggml.token_type") or []
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, token_type in zip(tokens, types, strict=False)
            if token_type == kind
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer


def _post_processor(header: GgufHeader, tokens: list[str]) -> Any:
    """Puts the beginning and end tokens around a text where the metadata asks for it."""
    from tokenizers import processors

    around = {name: _added_around(header, tokens, name) for name in ("bos", "eos")}
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not any(around.values()):
        return byte_level
    single = " ".join(token for token in (around["bos"], "$A", around["eos"]) if token)
    special = [(token, tokens.index(token)) for token in around.values() if token]
    template = processors.TemplateProcessing(single=single, special_tokens=special)
    return processors.Sequence([byte_level, template])


def _added_around(header: GgufHeader, tokens: list[str], name: str) -> str | None:
    """The token ``bos`` or ``eos`` when the metadata has it added to every text."""
    token_id = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if not header.metadata.get(f"tokenizer.ggml.add_{name}_token") or not isinstance(token_id, int):
        return None
    return tokens[token_id] if token_id < len(tokens) else None


def _gpt2() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> PreTokenizer:
    """GPT-2's words, with each digit a word of its own."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA3_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


#: The ways of splitting into words by ``tokenizer.ggml.pre``, as llama.cpp names them.
_PRE_TOKENIZERS = {"smollm": _smollm, "gpt-2": _gpt2, "llama-bpe": _llama3}
