# SPDX-License-Identifier: Apache-2.0
"""A model on disk, read one bounded piece at a time: a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from memascend_jax.checkpoints.hub_cache import HubName, cached_model, names_hub_model
from memascend_jax.checkpoints.saved_step import is_checkpoint, resolve_step
from memascend_jax.errors import ConfigError, DataError
from memascend_jax.storage.formatting import has_superblock
from memascend_jax.units import MIB

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: A piece of a tensor is at most this large unless the caller says otherwise.
PIECE_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor of a checkpoint; ``dtype`` is our name of what ``pieces`` yields."""

    shape: tuple[int, ...]
    dtype: str


class Checkpoint(Protocol):
    """A model on disk with Hugging Face's names and layout, whatever the format of its files.

    Attributes:
        config: the keys of Hugging Face's ``config.json``.
        tensors: every tensor by name; its elements are read by ``pieces`` only.
        chat_template: jinja2 source, or None.
        special_ids: ids of the special tokens by ``bos``, ``eos``, ``pad``, ``unk``; None where there is none.
        digest: SHA-256 over the headers, the sizes and samples of the contents.
    """

    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, CheckpointTensor]: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def special_ids(self) -> dict[str, int | None]: ...
    @property
    def digest(self) -> str: ...

    def pieces(self, name: str, max_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields ``(first element, flat values)`` of a tensor in order, each piece new and the caller's.

        A piece has at most ``max_bytes``, but at least one row (one head of a permuted GGUF tensor).
        """
        ...

    def tokenizer(self) -> Tokenizer:
        """Returns a new tokenizer, read now."""
        ...

    def export_files(self) -> dict[str, bytes]:
        """Returns what an exported folder holds beside the weights, ``config.json`` included."""
        ...

    def close(self) -> None:
        """Closes the files."""
        ...


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Returns the model in ``source``, its header read and every tensor's place and shape checked.

    Args:
        source: a Hugging Face folder (``config.json`` with ``model.safetensors``, whole or in shards),
            a GGUF file, the store that ``memascend import`` made of one, in one file or device, or a checkpoint:
            a folder of steps, of which it is the newest, or a step. What is no path is a name in Hugging Face's
            local cache, ``org/name``; nothing is fetched.
        revision: of such a name: branch, tag or commit; None: ``main``.

    Raises:
        DataError: nothing is there, it is neither, the architecture is unknown, or tensors are missing,
            misshapen or outside their file; every fault found is listed.
        ConfigError: a revision is given for a path.
    """
    try:
        return _open(_place(source, revision))
    except PermissionError as error:
        raise DataError(f"cannot read the model '{source}': {error.strerror}: '{error.filename}'") from error


def _place(source: str | Path, revision: str | None) -> Path:
    """The path that ``source`` is, or stands for in Hugging Face's cache."""
    path = Path(source).expanduser()
    name = HubName.parse(source) if isinstance(source, str) and names_hub_model(source) else None
    if name is not None:
        return cached_model(name, revision)
    if revision is not None:
        raise ConfigError(
            f"the revision {revision!r} is for a model in Hugging Face's cache, named as org/name, but {str(source)!r} "
            "is a path; leave it out"
        )
    return path


def _open(path: Path) -> Checkpoint:
    if path.is_dir() and is_checkpoint(path):
        from memascend_jax.checkpoints.saved_model import SavedModel

        saved = resolve_step(path)
        if saved.adapters is not None:
            raise DataError(
                f"cannot use '{path}' as a model: it is a checkpoint of LoRA adapters. Merge them into a model of its "
                f"own (memascend export {path} DIR --merge) and give that folder, or go on with them (run.restore)"
            )
        return SavedModel(saved)
    if path.is_dir() and (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise DataError(
            f"cannot use '{path}' as a model: it is a LoRA adapter in PEFT's layout. Give the model that it is for, "
            f"with lora.source={path} to train the adapter further"
        )
    if path.is_dir():
        from memascend_jax.checkpoints.huggingface import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(path)
    if (path.is_file() or path.is_block_device()) and has_superblock(str(path)):
        from memascend_jax.checkpoints.store_checkpoint import StoreCheckpoint

        return StoreCheckpoint(path)
    if path.is_file():
        from memascend_jax.checkpoints.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    raise DataError(
        f"cannot open the model '{path}': there is no such folder or file. Give a Hugging Face folder "
        "(config.json, model.safetensors, tokenizer.json), org/name of a model in Hugging Face's local cache, a .gguf "
        "file, a store that memascend import made, a checkpoint of a run, or the name smollm2-135m."
    )


def stream_pieces(
    checkpoint: Checkpoint, sizes: Mapping[str, int], ahead_bytes: int | None = None
) -> Iterator[tuple[str, int, NDArray[Any]]]:
    """Yields ``(name, first element, flat values)`` of tensors one after the other, as ``Checkpoint.pieces`` does.

    A Hugging Face folder reads what comes next meanwhile, across tensors.

    Args:
        sizes: most bytes of a piece, by name.
        ahead_bytes: how much is being read; None: as much as serves.
    """
    from memascend_jax.checkpoints.huggingface import HuggingFaceCheckpoint

    if isinstance(checkpoint, HuggingFaceCheckpoint):
        yield from checkpoint.stream(sizes, **({} if ahead_bytes is None else {"ahead_bytes": ahead_bytes}))
        return
    for name, size in sizes.items():
        for start, values in checkpoint.pieces(name, size):
            yield name, start, values


class PiecesInOrder:
    """``pieces(name)`` of tensors that are asked for in the order ``names``, read ahead across them.

    Asking for the first one begins anew. One that is asked for out of order, or whose predecessor was not read to its
    end, is read alone.
    """

    def __init__(self, checkpoint: Checkpoint, names: Sequence[str], max_bytes: int = PIECE_BYTES) -> None:
        self._checkpoint = checkpoint
        self._names = tuple(names)
        self._max_bytes = max_bytes
        self._stream: Iterator[tuple[str, int, NDArray[Any]]] = iter(())
        self._held: tuple[str, int, NDArray[Any]] | None = None

    def __call__(self, name: str) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yields ``(first element, flat values)`` of one tensor; see ``Checkpoint.pieces``."""
        if self._names[:1] == (name,):
            self._stream = stream_pieces(self._checkpoint, dict.fromkeys(self._names, self._max_bytes))
            self._held = next(self._stream, None)
        if self._held is None or self._held[:2] != (name, 0):
            yield from self._checkpoint.pieces(name, self._max_bytes)
            return
        while self._held is not None and self._held[0] == name:
            _, start, values = self._held
            self._held = None
            yield start, values
            # Its memory is used again once the caller has let go of it too.
            del values
            self._held = next(self._stream, None)
