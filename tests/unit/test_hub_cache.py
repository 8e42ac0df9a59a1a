# SPDX-License-Identifier: Apache-2.0
"""Models in Hugging Face's cache: found by name and revision, and never half of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_checkpoints import hf_config, random_tensors, read_whole, write_folder, write_gguf

from memascend_jax.checkpoints.hub_cache import HubName, cache_folder
from memascend_jax.checkpoints.source import open_checkpoint
from memascend_jax.errors import ConfigError, DataError

COMMIT, OTHER = "a" * 40, "b" * 40
VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(cache: Path, made: Path, commit: str = COMMIT, *, ref: str | None = "main") -> Path:
    """Leaves the files of ``made`` in the cache as a download does: as links to blobs; returns the snapshot."""
    folder = cache / "models--org--name"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    for path in made.iterdir():
        blob = folder / "blobs" / f"{commit[:4]}-{path.name}"
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    if ref is not None:
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return snapshot


def model(tmp_path: Path, *, seed: int = 0, shards: int = 1) -> Path:
    config = hf_config(num_hidden_layers=1)
    return write_folder(tmp_path / f"made{seed}", config, random_tensors(config, seed=seed), shards=shards)


def first(checkpoint) -> bytes:
    return read_whole(checkpoint, "model.norm.weight").tobytes()


@pytest.mark.parametrize("shards", [1, 3])
def test_a_model_is_found_by_its_name_and_revision(tmp_path, cache, shards):
    put(cache, model(tmp_path, seed=1, shards=shards))
    put(cache, model(tmp_path, seed=2, shards=shards), OTHER, ref="refs/pr/7")
    by_name = {
        seed: random_tensors(hf_config(num_hidden_layers=1), seed=seed)["model.norm.weight"]
        for seed in (1, 2)
    }
    for revision, seed in ((None, 1), ("main", 1), (COMMIT, 1), ("refs/pr/7", 2), (OTHER, 2)):
        assert first(open_checkpoint("org/name", revision)) == by_name[seed].tobytes()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/c", "HF_HOME": "/b"}, "/c"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/d"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({"HOME": "/e"}, "/e/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_hugging_faces_libraries_keep_it(monkeypatch, variables, expected):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert cache_folder() == Path(expected)


def test_what_is_not_there_is_named_with_the_command_that_fetches_it(tmp_path, cache):
    with pytest.raises(DataError, match=r"no model of that name in the cache .*`hf download org/name`"):
        open_checkpoint("org/name")
    put(cache, model(tmp_path))
    with pytest.raises(
        DataError, match=rf"no revision 'v2'; it has {COMMIT}, main .*`hf download org/name --revision v2`"
    ):
        open_checkpoint("org/name", "v2")


@pytest.mark.parametrize("revision", ["../../../etc", "/etc/passwd", "..", "main/../main", "."])
def test_a_revision_that_leads_elsewhere_is_none(tmp_path, cache, revision):
    put(cache, model(tmp_path))
    with pytest.raises(DataError, match="no revision"):
        open_checkpoint("org/name", revision)


def test_a_download_that_was_broken_off_is_not_a_model(tmp_path, cache):
    snapshot = put(cache, model(tmp_path, shards=3))
    shard = "model-00002-of-00003.safetensors"
    (snapshot / shard).resolve().unlink()
    with pytest.raises(DataError, match=rf"is not whole: {shard} missing\. .*`hf download org/name`"):
        open_checkpoint("org/name")
    (snapshot / shard).unlink()
    (snapshot / "../../blobs/123.incomplete").write_bytes(b"")
    with pytest.raises(DataError, match=rf"not whole: {shard} missing; a download was broken off"):
        open_checkpoint("org/name")
    for path in snapshot.glob("model*"):
        path.unlink()
    with pytest.raises(DataError, match="not whole: its weights missing"):
        open_checkpoint("org/name")


def test_links_that_lead_round_are_no_files(tmp_path, cache):
    snapshot = put(cache, model(tmp_path))
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(DataError, match=r"not whole: model\.safetensors missing"):
        open_checkpoint("org/name")


def test_a_folder_of_that_name_comes_first(tmp_path, cache, monkeypatch):
    put(cache, model(tmp_path, seed=1))
    monkeypatch.chdir(tmp_path)
    Path("org").mkdir()
    model(tmp_path, seed=2).rename("org/name")
    expected = random_tensors(hf_config(num_hidden_layers=1), seed=2)["model.norm.weight"]
    assert first(open_checkpoint("org/name")) == expected.tobytes()
    with pytest.raises(ConfigError, match="'org/name' is a path"):
        open_checkpoint("org/name", "main")


def test_gguf_files_of_a_model_are_named_when_there_are_several(tmp_path, cache):
    config = hf_config(num_hidden_layers=1)
    made = tmp_path / "made"
    made.mkdir()
    write_gguf(made / "a-Q8_0.gguf", config, random_tensors(config))
    snapshot = put(cache, made)
    assert first(open_checkpoint("org/name"))
    (snapshot / "b-Q4_0.gguf").symlink_to((snapshot / "a-Q8_0.gguf").readlink())
    with pytest.raises(
        DataError, match=r"several GGUF files: a-Q8_0\.gguf, b-Q4_0\.gguf; .*org/name/a-Q8_0\.gguf"
    ):
        open_checkpoint("org/name")
    assert first(open_checkpoint("org/name/b-Q4_0.gguf"))
    with pytest.raises(DataError, match=r"cannot open 'c\.gguf' of the model 'org/name'"):
        open_checkpoint("org/name/c.gguf")


@pytest.mark.parametrize(
    "text", ["name", "/org/name", "org/../name", "org/name/more", "./org/name", "a--b/c", "-a/b"]
)
def test_what_can_only_be_a_path_is_no_name(text):
    assert HubName.parse(text) is None


def test_an_index_of_any_kind_is_left_to_who_reads_the_model(tmp_path, cache):
    snapshot = put(cache, model(tmp_path, shards=2))
    for content in (b"{", b"[]", b'{"weight_map": 3}', json.dumps({"weight_map": {"a": ["b"]}}).encode()):
        (snapshot / "model.safetensors.index.json").unlink()
        (snapshot / "model.safetensors.index.json").write_bytes(content)
        with pytest.raises(DataError, match="index"):
            open_checkpoint("org/name")
