# SPDX-License-Identifier: Apache-2.0
"""A Llama model in a Hugging Face folder: ``config.json``, safetensors whole or in shards, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from numpy.typing import NDArray

from memascend_jax.checkpoints.safetensors_file import SafetensorsFile
from memascend_jax.checkpoints.sampled_digest import sampled_digest
from memascend_jax.checkpoints.source import PIECE_BYTES, CheckpointTensor
from memascend_jax.errors import DataError
from memascend_jax.models.shapes import LlamaConfig, check_tensors, tensor_shapes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOAT = ("bfloat16", "float16", "float32")

#: Copied to an exported folder as they are.
_PASSED_ON = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_MAX_TEXT_BYTES = 256 << 20


class HuggingFaceCheckpoint:
    """See ``source.Checkpoint``. Elements have the files' dtype: bfloat16, float16 or float32."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        config = self._json("config.json")
        if config is None:
            self._fault("it has no config.json")
        self.config: dict[str, Any] = config
        shape = LlamaConfig.from_hf(self.config)
        self._files: dict[str, SafetensorsFile] = {}
        try:
            self._home = self._locate()
            found = {name: self._file_of(name).tensors[name] for name in self._home}
            check_tensors({name: tensor.shape for name, tensor in found.items()}, shape, str(folder))
            # What else is in the files, such as a tied head or the rotary frequencies, is left alone.
            self.tensors = {
                tensor.name: CheckpointTensor(tensor.shape, found[tensor.name].dtype)
                for tensor in tensor_shapes(shape)
            }
            odd = [f"'{name}' is {t.dtype}" for name, t in self.tensors.items() if t.dtype not in _FLOAT]
            if odd:
                self._fault(f"{'; '.join(odd[:8])}; expected one of {', '.join(_FLOAT)}")
        except BaseException:
            self.close()
            raise

    def pieces(self, name: str, max_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields the tensor in blocks of whole rows; see ``source.Checkpoint``."""
        return self._file_of(name).pieces(name, max_bytes)

    @cached_property
    def chat_template(self) -> str | None:
        path = self._folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = (self._json("tokenizer_config.json") or {}).get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return template if isinstance(template, str) else None

    @cached_property
    def special_ids(self) -> dict[str, int | None]:
        """From the tokenizer's named tokens, else from ``config.json``; the first of several end tokens."""
        tokenizer, named = self.tokenizer(), self._json("tokenizer_config.json") or {}
        ids: dict[str, int | None] = {}
        for name in ("bos", "eos", "pad", "unk"):
            token = named.get(f"{name}_token")
            text = token.get("content") if isinstance(token, dict) else token
            found = tokenizer.token_to_id(text) if isinstance(text, str) else None
            ids[name] = found if found is not None else self._configured_id(name)
        return ids

    @cached_property
    def digest(self) -> str:
        config = json.dumps(self.config, sort_keys=True).encode()
        return sampled_digest([file.file for _, file in sorted(self._files.items())], config)

    def tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        path = self._folder / "tokenizer.json"
        if not path.is_file():
            self._fault("it has no tokenizer.json; other forms of tokenizers are not read here")
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"cannot read the tokenizer '{path}': {error}") from error

    def export_files(self) -> dict[str, bytes]:
        paths = [self._folder / name for name in _PASSED_ON]
        return {path.name: path.read_bytes() for path in paths if path.is_file()}

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _configured_id(self, name: str) -> int | None:
        value = self.config.get(f"{name}_token_id")
        first = value[0] if isinstance(value, list) and value else value
        return first if isinstance(first, int) else None

    def _locate(self) -> dict[str, str]:
        """The file that each tensor is in."""
        if (self._folder / _WEIGHTS).is_file():
            return dict.fromkeys(self._open(_WEIGHTS).tensors, _WEIGHTS)
        index = self._json(_INDEX)
        if index is None:
            self._fault(self._why_no_weights())
        home = index.get("weight_map")
        if not isinstance(home, dict) or not all(isinstance(file, str) for file in home.values()):
            self._fault(f"{_INDEX} has no weight_map of file names")
        faults = [
            name for name in sorted(set(home.values())) if Path(name).name != name or name in (".", "..")
        ]
        if faults:
            self._fault(f"{_INDEX} names files outside the folder: {', '.join(map(repr, faults))}")
        faults = [name for name in sorted(set(home.values())) if not (self._folder / name).is_file()]
        if faults:
            self._fault(f"shards are missing: {', '.join(faults)}")
        for name in sorted(set(home.values())):
            self._open(name)
        faults = [
            f"'{name}' in {file}" for name, file in home.items() if name not in self._files[file].tensors
        ]
        if faults:
            self._fault(f"{_INDEX} names tensors that are not there: {', '.join(faults[:8])}")
        return home

    def _why_no_weights(self) -> str:
        pickled = sorted(path.name for path in self._folder.glob("*.bin")) or sorted(
            path.name for path in self._folder.glob("*.pt*")
        )
        if pickled:
            return (
                f"its weights are pickles ({', '.join(pickled[:3])}), which run code when they are read; convert them "
                "with transformers: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
            )
        return f"it has neither {_WEIGHTS} nor {_INDEX}"

    def _open(self, name: str) -> SafetensorsFile:
        self._files[name] = SafetensorsFile(self._folder / name)
        return self._files[name]

    def _file_of(self, name: str) -> SafetensorsFile:
        return self._files[self._home[name]]

    def _json(self, name: str) -> dict[str, Any] | None:
        """The object in the file ``name``, or None when there is no such file."""
        path = self._folder / name
        if not path.is_file():
            return None
        if path.stat().st_size > _MAX_TEXT_BYTES:
            self._fault(f"{name} has {path.stat().st_size:,} bytes, which cannot be right")
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"cannot read '{path}': it is not JSON: {error}") from error
        if not isinstance(value, dict):
            self._fault(f"{name} is not a JSON object")
        return value

    def _fault(self, what: str) -> NoReturn:
        raise DataError(f"cannot use the model folder '{self._folder}': {what}.")
