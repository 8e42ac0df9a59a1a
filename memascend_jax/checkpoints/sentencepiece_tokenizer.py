# SPDX-License-Identifier: Apache-2.0
"""Builds tokenizers from sentencepiece vocabularies of the BPE kind, as ``tokenizer.model`` and GGUF files hold them.

Spaces are written ``▁``; of two neighbours whose union is a piece those of the highest score are joined first; what no
piece covers becomes its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend_jax.checkpoints.sentencepiece_model import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceModel,
)
from memascend_jax.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"
_KINDS = {1: "unigram", 2: "BPE", 3: "word", 4: "character"}


@dataclass(frozen=True, slots=True)
class PieceVocabulary:
    """A vocabulary of pieces.

    Attributes:
        pieces, scores, types: by id; types as in ``sentencepiece_model``.
        unk, bos, eos: ids, or None.
        add_prefix: a space goes before every text.
        add_bos, add_eos: the token goes before or after every text.
        merges: pairs in order, where they are known; None: they follow from the scores.
        join_user_defined: pieces of that type come of joining too, as in Gemma's runs of spaces.
    """

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unk: int | None
    bos: int | None
    eos: int | None
    add_prefix: bool = True
    add_bos: bool = True
    add_eos: bool = False
    merges: Sequence[tuple[str, str]] | None = None
    join_user_defined: bool = False


def sentencepiece_tokenizer(vocabulary: PieceVocabulary, where: str) -> Tokenizer:
    """Returns the tokenizer of ``vocabulary``; ``where`` names it in messages.

    Raises:
        DataError: pieces that occur twice, or a vocabulary that makes no tokenizer.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    v = vocabulary
    ids = unique_ids(v.pieces, where)
    merges = list(v.merges) if v.merges is not None else _merges(v, ids)
    unk = v.pieces[v.unk] if v.unk is not None and v.unk < len(v.pieces) else None
    fallback = BYTE in v.types or all(f"<0x{byte:02X}>" in ids for byte in range(256))
    try:
        model = models.BPE(ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=fallback)
    except Exception as error:  # the package raises plain Exception
        raise DataError(f"cannot build the tokenizer of '{where}': {error}") from error
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    # Before every part of a text between special tokens, as sentencepiece has it: also where a space is already.
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if v.add_prefix else spaces
    )
    runs = _runs_of_spaces(v)
    if runs:
        # A run that is a piece by definition is one before anything is joined, the longest first.
        pattern = "|".join(sorted(runs, key=len, reverse=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if v.add_prefix else [])])
    bos, eos = _piece(v, v.bos if v.add_bos else None), _piece(v, v.eos if v.add_eos else None)
    tokenizer.post_processor = around_processor(bos, eos, ids)
    mark_tokens(
        tokenizer, [(text, kind) for text, kind in zip(v.pieces, v.types, strict=False) if text.strip(SPACE)]
    )
    return tokenizer


def vocabulary_of(model: SentencePieceModel, *, add_bos: bool, add_eos: bool, where: str) -> PieceVocabulary:
    """Returns the vocabulary of a ``tokenizer.model``.

    Raises:
        DataError: it is of a kind, or normalises texts in a way, that is not built here.
    """
    faults = []
    if model.kind != BPE:
        faults.append(f"it is of the kind {_KINDS.get(model.kind, model.kind)}, only BPE is built here")
    if model.has_character_map:
        faults.append("it replaces characters by a table of its own")
    if model.remove_extra_spaces:
        faults.append("it removes spaces")
    if model.space_is_suffix or not model.escape_spaces:
        faults.append("it writes spaces otherwise than before a word")
    if faults:
        raise DataError(
            f"cannot build the tokenizer of '{where}': {'; '.join(faults)}. {make_tokenizer_json()}"
        )
    ids = {name: index if 0 <= index < len(model.pieces) else None for name, index in model.ids.items()}
    return PieceVocabulary(
        model.pieces,
        model.scores,
        model.types,
        ids["unk"],
        ids["bos"],
        ids["eos"],
        model.add_prefix,
        add_bos,
        add_eos,
    )


def make_tokenizer_json() -> str:
    """Returns the remedy where a tokenizer cannot be read."""
    call = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    return f"Make a tokenizer.json of it with transformers: {call}"


def unique_ids(tokens: Iterable[str], where: str) -> dict[str, int]:
    """Returns the id of each token.

    Raises:
        DataError: a token occurs twice.
    """
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if ids.setdefault(token, index) != index:
            raise DataError(
                f"cannot build the tokenizer of '{where}': the token {token!r} has the ids {ids[token]:,} and {index:,}"
            )
    return ids


def around_processor(bos: str | None, eos: str | None, ids: dict[str, int]) -> Any:
    """Returns what puts the tokens ``bos`` and ``eos``, where they are given, around a text; None for neither."""
    from tokenizers import processors

    special = [(token, ids[token]) for token in (bos, eos) if token is not None]
    if not special:
        return None
    single = [token for token in (bos, "$A", eos) if token is not None]
    return processors.TemplateProcessing(single=single, special_tokens=special)


def mark_tokens(tokenizer: Tokenizer, tokens: Iterable[tuple[str, int]]) -> None:
    """Makes control tokens special, and those that users defined whole words, wherever they stand in a text."""
    from tokenizers import AddedToken

    marked = list(tokens)
    for kinds, special in (((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False)):
        added = [
            AddedToken(text, special=special, normalized=False) for text, kind in marked if kind in kinds
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _merges(v: PieceVocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs that pieces can be joined of, the highest score first."""
    joined = (NORMAL, USER_DEFINED) if v.join_user_defined else (NORMAL,)
    parts = {text for text, kind in zip(v.pieces, v.types, strict=False) if kind in joined}
    ranked = []
    for text in parts:
        rank = (-v.scores[ids[text]], ids[text])
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in parts and right in parts:
                ranked.append((*rank, left, right))
    ranked.sort()
    # Those that stand apart already: what they are made of comes last, so that nothing else is.
    runs = set(_runs_of_spaces(v))
    apart = [
        (text[:cut], text[cut:])
        for text in sorted(runs, key=len)
        for cut in range(1, len(text))
        if {text[:cut], text[cut:]} <= runs | {SPACE}
    ]
    return [*((left, right) for _, _, left, right in ranked), *apart]


def _runs_of_spaces(v: PieceVocabulary) -> list[str]:
    """Pieces of several spaces that are pieces by definition."""
    if v.join_user_defined:
        return []
    pieces = zip(v.pieces, v.types, strict=False)
    return [text for text, kind in pieces if kind == USER_DEFINED and len(text) > 1 and not text.strip(SPACE)]


def _piece(v: PieceVocabulary, index: int | None) -> str | None:
    return v.pieces[index] if index is not None and index < len(v.pieces) else None
