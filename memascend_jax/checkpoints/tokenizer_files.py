# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a Hugging Face folder: ``tokenizer.json``, or a sentencepiece ``tokenizer.model`` of the BPE kind.

Beside the file itself counts what ``tokenizer_config.json``, ``special_tokens_map.json`` and ``added_tokens.json``
name: tokens that the file lacks are added, as transformers does. ``tokenizer.json`` is used as it is: the classes of
transformers that build a normaliser of their own beside it (``LlamaTokenizer``, ``GPT2Tokenizer``) are not followed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend_jax.checkpoints.model_files import (
    ADDED_TOKENS,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ModelFiles,
)
from memascend_jax.checkpoints.sentencepiece_model import read_sentencepiece
from memascend_jax.checkpoints.sentencepiece_tokenizer import (
    make_tokenizer_json,
    sentencepiece_tokenizer,
    vocabulary_of,
)
from memascend_jax.errors import DataError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

SENTENCEPIECE = "tokenizer.model"
_OTHER_FORMS = ("tekken.json", "tiktoken.model", "vocab.json", "merges.txt")
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_MORE = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_tokenizer(files: ModelFiles) -> Tokenizer:
    """Returns a new tokenizer of the model of ``files``, which neither cuts nor pads.

    Raises:
        DataError: there is none, it is of a form that is not read here, or damaged.
    """
    content = files.read(TOKENIZER)
    if content is not None:
        tokenizer = _from_json(content, files)
    else:
        model = files.read(SENTENCEPIECE)
        if model is None:
            other = [name for name in _OTHER_FORMS if files.read(name) is not None]
            has = (
                f"it has {', '.join(other)} only. {make_tokenizer_json()}"
                if other
                else "nor a tokenizer.model"
            )
            raise files.fault(f"it has no tokenizer.json; {has}".removesuffix("."))
        tokenizer = _from_sentencepiece(model, files)
    # A file that was saved by a training run may say so; a text is never cut without being counted.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_named(tokenizer, files)
    if (files.json(TOKENIZER_CONFIG) or {}).get("split_special_tokens") is True:
        tokenizer.encode_special_tokens = True
    return tokenizer


def has_tokenizer(files: ModelFiles) -> bool:
    """Returns whether there is anything to read a tokenizer from."""
    return any(files.read(name) is not None for name in (TOKENIZER, SENTENCEPIECE, *_OTHER_FORMS))


def _from_json(content: bytes, files: ModelFiles) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(content.decode())
    except Exception as error:  # the package raises plain Exception
        raise DataError(f"cannot read the tokenizer '{files.where}/{TOKENIZER}': {error}") from error


def _from_sentencepiece(content: bytes, files: ModelFiles) -> Tokenizer:
    where = f"{files.where}/{SENTENCEPIECE}"
    try:
        model = read_sentencepiece(content)
    except ValueError as error:
        raise DataError(
            f"cannot read the tokenizer '{where}': it is no sentencepiece model: {error}. {make_tokenizer_json()}"
        ) from error
    settings = files.json(TOKENIZER_CONFIG) or {}
    vocabulary = vocabulary_of(
        model,
        add_bos=bool(settings.get("add_bos_token", True)),
        add_eos=bool(settings.get("add_eos_token", False)),
        where=where,
    )
    return sentencepiece_tokenizer(vocabulary, where)


def _add_named(tokenizer: Tokenizer, files: ModelFiles) -> None:
    """Adds the tokens that the files beside the tokenizer name, where it has them not as such."""
    there = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for given, token in _named_tokens(files):
        if token.content in there or not token.content:
            continue
        tokenizer.add_tokens([token])
        there.add(token.content)
        got = tokenizer.token_to_id(token.content)
        if given is not None and got != given:
            raise files.fault(
                f"its tokenizer does not fit its {TOKENIZER_CONFIG} or {ADDED_TOKENS}: the token {token.content!r} has "
                f"the id {given:,} there, but would get {got:,}"
            )


def _named_tokens(files: ModelFiles) -> list[tuple[int | None, AddedToken]]:
    """The tokens that files name, with the ids that they give, in the order in which transformers adds them."""
    settings = dict(files.json(TOKENIZER_CONFIG) or {})
    by_id = settings.get("added_tokens_decoder")
    if not isinstance(by_id, dict):
        by_id = {}
        # Files of older versions, which have no such key.
        settings |= files.json(SPECIAL_TOKENS) or {}
        special = {_text(settings.get(name)) for name in _NAMED}
        for text, index in (files.json(ADDED_TOKENS) or {}).items():
            by_id[str(index)] = {
                "content": text,
                "normalized": text not in special,
                "special": text in special,
            }
    numbered = sorted((int(key), value) for key, value in by_id.items() if key.isdecimal())
    found: list[tuple[int | None, AddedToken | None]] = [
        (index, _token(value, special=False)) for index, value in numbered
    ]
    # Models name tokens of their own too, as ``image_token``.
    names = [*_NAMED, *(name for name in settings if name.endswith("_token") and name not in _NAMED)]
    more = [entry for name in _MORE for entry in _entries(settings.get(name))]
    found += [(None, _token(value, special=True)) for value in (*map(settings.get, names), *more)]
    return [(index, token) for index, token in found if token is not None]


def _entries(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _token(value: Any, *, special: bool) -> AddedToken | None:
    from tokenizers import AddedToken

    content = _text(value)
    if content is None:
        return None
    flags = {
        name: value[name] for name in _FLAGS if isinstance(value, dict) and isinstance(value.get(name), bool)
    }
    return AddedToken(content, **{"special": special, **flags, **({"special": True} if special else {})})
