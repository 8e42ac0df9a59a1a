# SPDX-License-Identifier: Apache-2.0
"""What lies beside a model's weights in a Hugging Face folder: ``config.json``, the tokenizer, the chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

from memascend_jax.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
CHAT_TEMPLATE, SPECIAL_TOKENS, ADDED_TOKENS = (
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
)
#: Of settings and an index; the longest of real ones have a tenth of it.
_MAX_JSON_BYTES = 64 << 20
#: The weights in one file; and the index of several.
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Files beside the weights that an exported folder has too, as they are: what a model is used with, and its licence.
_PASSED_ON = (
    CONFIG,
    INDEX,
    "generation_config.json",
    "tokenizer*",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    SPECIAL_TOKENS,
    ADDED_TOKENS,
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "*processor_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)


def is_plain_name(name: object) -> bool:
    """Returns whether ``name`` is that of a file in a folder itself, and of nothing elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


def is_passed_on(name: str) -> bool:
    """Returns whether an exported folder has the file ``name`` too."""
    folder, _, file = name.rpartition("/")
    in_folder = is_plain_name(file) and folder in ("", "additional_chat_templates")
    return in_folder and any(fnmatchcase(name, pattern) for pattern in _PASSED_ON)


class ModelFiles:
    """The files of the model in ``where``, each read when it is asked for.

    Args:
        where: what messages call the place.
        read: returns the contents of a file by name, or None where there is none.
        names: returns the names of all files there.
    """

    def __init__(
        self, where: str, read: Callable[[str], bytes | None], names: Callable[[], Iterable[str]]
    ) -> None:
        self.where = where
        self._read = read
        self._names = names

    @classmethod
    def of(cls, where: str, files: Mapping[str, bytes]) -> ModelFiles:
        """Returns the files that are in memory."""
        return cls(where, files.get, files.keys)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The keys of ``config.json``; raises ``DataError`` when there is none."""
        config = self.json(CONFIG)
        if config is None:
            raise self.fault("it has no config.json")
        return config

    @cached_property
    def chat_template(self) -> str | None:
        """jinja2 source, or None."""
        text = self._read(CHAT_TEMPLATE)
        if text is not None:
            try:
                return text.decode()
            except UnicodeDecodeError as error:
                raise self.fault(f"{CHAT_TEMPLATE} is not UTF-8 text (byte {error.start:,})") from error
        template = (self.json(TOKENIZER_CONFIG) or {}).get("chat_template")
        if isinstance(template, list):
            named = (
                entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"
            )
            template = next(named, {}).get("template")
        return template if isinstance(template, str) else None

    @cached_property
    def special_ids(self) -> dict[str, int | None]:
        """From the tokenizer's named tokens, else from ``config.json``; the first of several end tokens."""
        tokenizer, named = self.tokenizer(), self.json(TOKENIZER_CONFIG) or {}
        ids: dict[str, int | None] = {}
        for name in ("bos", "eos", "pad", "unk"):
            token = named.get(f"{name}_token")
            text = token.get("content") if isinstance(token, dict) else token
            found = tokenizer.token_to_id(text) if isinstance(text, str) else None
            ids[name] = found if found is not None else self._configured_id(name)
        return ids

    def tokenizer(self) -> Tokenizer:
        """Returns a new tokenizer; raises ``DataError`` when there is none that can be read."""
        from memascend_jax.checkpoints.tokenizer_files import read_tokenizer

        return read_tokenizer(self)

    def passed_on(self) -> dict[str, bytes]:
        """Returns what an exported folder holds beside the weights."""
        found = {name: self._read(name) for name in sorted(self._names()) if is_passed_on(name)}
        return {name: content for name, content in found.items() if content is not None}

    def read(self, name: str) -> bytes | None:
        """Returns the contents of the file ``name``, or None where there is none."""
        return self._read(name)

    def json(self, name: str) -> dict[str, Any] | None:
        """Returns the object in the file ``name``, or None when there is no such file."""
        content = self._read(name)
        if content is None:
            return None
        if len(content) > _MAX_JSON_BYTES:
            raise self.fault(f"{name} has {len(content):,} bytes, which cannot be right")
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DataError(f"cannot read '{self.where}/{name}': it is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise self.fault(f"{name} is not a JSON object")
        return value

    def fault(self, what: str) -> DataError:
        """Returns the error that says what is wrong with the model."""
        return DataError(f"cannot use the model folder '{self.where}': {what}.")

    def _configured_id(self, name: str) -> int | None:
        value = self.config.get(f"{name}_token_id")
        first = value[0] if isinstance(value, list) and value else value
        return first if isinstance(first, int) else None
