# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers built as those of the families are: byte-level BPE with their splits, and BPE over ▁ with bytes.

Their merges are learned from ``conversations`` by ``make_template_masks.py`` and kept beside the golden values.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

FOLDER = Path(__file__).parents[1] / "unit" / "golden" / "tokenizers"
#: By template: the special tokens, the name of the begin and of the end token.
FAMILIES: dict[str, tuple[tuple[str, ...], str | None, str]] = {
    "chatml": (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_start|>", "<|im_end|>"),
    "qwen": (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), None, "<|im_end|>"),
    "llama3": (
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ),
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "mistral": (
        (
            "<unk>",
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
        ),
        "<s>",
        "</s>",
    ),
    "gemma": (
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        "<bos>",
        "<end_of_turn>",
    ),
}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SIZE = 600


def learned(family: str, texts: list[str]) -> Tokenizer:
    """Returns a new tokenizer of a family."""
    special = list(FAMILIES[family][0])
    if family in ("mistral", "gemma"):
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        if family == "mistral":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=_SIZE + 256, special_tokens=special, show_progress=False, max_token_length=16
        )
        # Words are learned apart, and merged over the whole text.
        tokenizer.train_from_iterator(
            [word for text in texts for word in text.replace(" ", " ▁").split(" ")], trainer
        )
        return _with_special(tokenizer, FAMILIES[family][0])
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family == "chatml")
    split = {"llama3": _LLAMA3, "qwen": _QWEN}.get(family)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), behavior="isolated"), byte_level])
        if split
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    if family == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=_SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _with_special(tokenizer, FAMILIES[family][0])


def _with_special(tokenizer: Tokenizer, special: tuple[str, ...]) -> Tokenizer:
    # What the trainer made special besides (bytes) is ordinary.
    fresh = Tokenizer.from_str(tokenizer.to_str())
    fresh.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return fresh


def family_tokenizer(family: str) -> Tokenizer:
    """Returns the tokenizer that is kept."""
    return Tokenizer.from_file(str(FOLDER / f"{family}.json"))
