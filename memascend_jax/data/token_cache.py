# SPDX-License-Identifier: Apache-2.0
"""Tokens of blocks on disk, found by what decides them: tokenizer, template, settings, and the block's own bytes.

One file per block, written whole under another name first; a file that is not as it should be is as good as none. A run
needs no cache, so what cannot be written is not: the disk is left with room for others.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from memascend_jax.data.collection import Question
from memascend_jax.data.encode import EncodedBlock
from memascend_jax.data.examples import Examples
from memascend_jax.units import GIB, format_bytes

_MAGIC = b"MATOKEN1"
#: So much of the disk stays free.
_LEFT_FREE_BYTES = 2 * GIB
_CHECKED_EVERY = 64


@dataclass(slots=True)
class TokenCache:
    """A folder of blocks.

    Args:
        folder: is made when the first block is put there.
        digest: of everything but the block that decides its tokens.
        home: nothing is kept before this folder is there; None: at once.
        say: told once when nothing more is kept.
    """

    folder: Path
    digest: str
    home: Path | None = None
    say: Callable[[str], object] = lambda text: None
    _puts: int = field(init=False, default=0)
    _is_open: bool = field(init=False, default=True)

    def get(self, key: bytes) -> EncodedBlock | None:
        """Returns the block of ``key``, or None when it is not there, or not whole."""
        try:
            data = self._path(key).read_bytes()
        except OSError:
            return None
        try:
            return _decoded(data)
        except (ValueError, KeyError, TypeError):
            return None

    def put(self, key: bytes, block: EncodedBlock) -> None:
        """Keeps ``block``, where there is room for it."""
        if not self._is_open or (self.home is not None and not self.home.is_dir()):
            return
        path = self._path(key)
        # Another run, or another source of this one, may be making the same block.
        draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._puts % _CHECKED_EVERY == 0:
                space = os.statvfs(path.parent)
                if space.f_bavail * space.f_frsize < _LEFT_FREE_BYTES:
                    self._close(f"less than {format_bytes(_LEFT_FREE_BYTES)} are free there")
                    return
            self._puts += 1
            draft.write_bytes(_encoded(block))
            draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            self._close(error.strerror or str(error))

    def _close(self, why: str) -> None:
        self._is_open = False
        self.say(
            f"tokens are no longer kept in {self.folder}: {why}. The run goes on, and makes them anew where needed"
        )

    def _path(self, key: bytes) -> Path:
        name = hashlib.blake2b(key, digest_size=16, key=self.digest.encode()[:64]).hexdigest()
        return self.folder / self.digest[:16] / name[:2] / name[2:]


def _encoded(block: EncodedBlock) -> bytes:
    examples = block.examples
    largest = int(examples.tokens.max(initial=0))
    header = {
        "examples": len(block),
        "tokens": len(examples.tokens),
        "width": 2 if largest < 1 << 16 else 4,
        "kinds": block.kinds,
        "questions": [[rank, q.messages, q.answer, q.tools] for rank, q in block.questions],
    }
    text = json.dumps(header).encode()
    body = b"".join(
        (
            len(text).to_bytes(8, "little"),
            text,
            np.diff(examples.starts).astype("<u4").tobytes(),
            block.ranks.astype("<u8").tobytes(),
            block.is_text.astype("u1").tobytes(),
            block.special.astype("u1").tobytes(),
            block.not_found.astype("<u2").tobytes(),
            examples.tokens.astype(f"<u{header['width']}").tobytes(),
            np.packbits(examples.trained).tobytes(),
        )
    )
    return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def _decoded(data: bytes) -> EncodedBlock:
    body = data[12:]
    if data[:8] != _MAGIC or zlib.crc32(body) != int.from_bytes(data[8:12], "little"):
        raise ValueError("not a whole block")
    at = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:at])
    count, n_tokens = header["examples"], header["tokens"]
    arrays = []
    for dtype, length in (
        ("<u4", count),
        ("<u8", count),
        ("u1", count),
        ("u1", count),
        ("<u2", count),
        (f"<u{header['width']}", n_tokens),
        ("u1", -(-n_tokens // 8)),
    ):
        arrays.append(np.frombuffer(body, dtype, length, at))
        at += arrays[-1].nbytes
    lengths, ranks, is_text, special, not_found, tokens, trained = arrays
    return EncodedBlock(
        Examples(
            tokens.astype(np.int32),
            np.unpackbits(trained, count=n_tokens).astype(np.bool_),
            np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        ),
        ranks.astype(np.uint64),
        is_text.astype(np.bool_),
        special.astype(np.bool_),
        not_found.astype(np.int32),
        Counter(header["kinds"]),
        [
            (rank, Question(tuple(messages), answer, tools))
            for rank, messages, answer, tools in header["questions"]
        ],
    )
