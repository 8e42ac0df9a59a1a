# SPDX-License-Identifier: Apache-2.0
"""``memascend import`` and ``export``: bytes come back as they were, from whatever a model can be in."""

from __future__ import annotations

import json
import math
import subprocess

import numpy as np
import pytest
from run_stores import contents, exact_state, make_run_store
from saved_steps import save_small
from stores import ANY_DISK, loop_device, mounted
from tiny_checkpoints import hf_config, random_tensors, read_whole, write_folder

from memascend_jax import cli
from memascend_jax.checkpoints.source import open_checkpoint
from memascend_jax.dtypes import BF16, F16, F32
from memascend_jax.optim.rounding import round_master
from memascend_jax.recipes import new_store
from memascend_jax.storage.tensor_store import TensorStore


def read_all(path) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(path)
    try:
        return {name: read_whole(checkpoint, name) for name in checkpoint.tensors}
    finally:
        checkpoint.close()


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape), name
        assert found[name].tobytes() == values.tobytes(), name


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request, tmp_path):
    """A folder in three shards, its norms in another type than its matrices."""
    config = hf_config(tie_word_embeddings=request.param, vocab_size=3000)
    tensors = {
        name: value if value.ndim == 1 else value.astype(BF16)
        for name, value in random_tensors(config).items()
    }
    return write_folder(tmp_path / "model", config, tensors, shards=3), tensors


def test_a_model_comes_back_from_its_store_byte_for_byte(model, tmp_path, capsys) -> None:
    folder, tensors = model
    before = contents(folder)
    assert cli.main(["import", str(folder), str(tmp_path / "m.store"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameter_bytes"] == sum(value.nbytes for value in tensors.values())
    # What a model needs on disk is one place: its weights, and a catalog.
    assert facts["bytes"] < facts["parameter_bytes"] + (4 << 20)
    assert_same(read_all(tmp_path / "m.store"), tensors)
    assert cli.main(["export", str(tmp_path / "m.store"), str(tmp_path / "out")]) == 0
    assert_same(read_all(tmp_path / "out"), tensors)
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported == {**json.loads(before["config.json"]), "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == before["tokenizer.json"]
    assert contents(folder) == before
    assert not TensorStore.open(tmp_path / "m.store", read_only=True, **ANY_DISK).verify().faults


def test_a_store_of_several_members_and_another_type(model, tmp_path) -> None:
    folder, tensors = model
    members = [str(tmp_path / name) for name in ("a", "b")]
    assert cli.main(["import", str(folder), *members, "--dtype", "float32"]) == 0
    assert cli.main(["export", *members, "--out", str(tmp_path / "out"), "--dtype=bfloat16"]) == 0
    rounded = {name: round_master(value.astype(F32), "bfloat16") for name, value in tensors.items()}
    assert_same(read_all(tmp_path / "out"), rounded)


@pytest.mark.parametrize("name", ["fp32", "split", "split_bf16", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
def test_a_run_is_exported_from_its_masters(tmp_path, name, dtype) -> None:
    make_run_store(tmp_path / "a.store", name)
    before = contents(tmp_path)
    options = [] if dtype is None else [f"--dtype={dtype}"]
    assert cli.main(["export", str(tmp_path / "a.store"), str(tmp_path / "out"), *options]) == 0
    assert {name: data for name, data in contents(tmp_path).items() if name in before} == before
    for tensor, found in read_all(tmp_path / "out").items():
        exact = exact_state(tensor, found.shape).master
        values = found.reshape(-1)
        if dtype is None:
            assert values.dtype == BF16
            if name not in ("bf16", "int8"):
                np.testing.assert_array_equal(values, round_master(exact, "bfloat16"))
        elif dtype == "float32" and name in ("fp32", "split", "split_bf16"):
            assert values.tobytes() == exact.tobytes()
        elif dtype == "float16" and name in ("fp32", "split", "split_bf16"):
            assert values.tobytes() == exact.astype(F16).tobytes()
        else:
            # A float16 below 2^-14 has fewer bits than one above.
            near = {"rtol": 2.0 ** (-6 if name == "bf16" else -9), "atol": 2.0**-24}
            np.testing.assert_allclose(values.astype(F32), exact, **near)


def test_large_models_are_exported_in_shards_of_the_size_that_is_asked_for(tmp_path, capsys) -> None:
    make_run_store(tmp_path / "a.store")
    command = [
        "export",
        str(tmp_path / "a.store"),
        str(tmp_path / "out"),
        "--max-shard-size",
        "100KB",
        "--json",
    ]
    assert cli.main(command) == 0
    facts = json.loads(capsys.readouterr().out)
    shards = sorted(path for path in (tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert facts["step"] == 7
    assert facts["bytes"] > sum(path.stat().st_size for path in shards) * 0.9
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    assert read_all(tmp_path / "out").keys() == index["weight_map"].keys()


def test_a_run_in_float32_is_exported_in_any_type(tmp_path) -> None:
    make_run_store(tmp_path / "a.store", "fp32", "model.compute_dtype=float32")
    for dtype, name in (("float32", "exact"), ("bfloat16", "rounded")):
        assert cli.main(["export", str(tmp_path / "a.store"), str(tmp_path / name), f"--dtype={dtype}"]) == 0
    exact, rounded = read_all(tmp_path / "exact"), read_all(tmp_path / "rounded")
    for tensor, values in exact.items():
        assert values.tobytes() == exact_state(tensor, values.shape).master.tobytes()
        np.testing.assert_array_equal(
            rounded[tensor].reshape(-1), round_master(values.reshape(-1), "bfloat16")
        )


def test_what_float16_cannot_hold_is_refused_by_name(tmp_path, capsys) -> None:
    config = hf_config()
    tensors = random_tensors(config)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 70000.0
    write_folder(tmp_path / "model", config, tensors)
    assert cli.main(["export", str(tmp_path / "model"), str(tmp_path / "out"), "--dtype=float16"]) == 5
    assert (
        "model.layers.1.mlp.up_proj.weight' as float16: it has values up to 7e+04" in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_run_can_begin_with_a_model_in_a_store(model, tmp_path) -> None:
    from memascend_jax.config import load_config
    from memascend_jax.recipes.inputs import open_model

    folder, tensors = model
    assert cli.main(["import", str(folder), str(tmp_path / "m.store")]) == 0
    source = open_model(load_config([], [f"model.source={tmp_path / 'm.store'}", "data.seq_len=64"]))
    assert source.coder is not None
    for name, value in tensors.items():
        joined = np.concatenate([piece.reshape(-1) for _, piece in source.pieces(name)])
        assert joined.tobytes() == value.tobytes()
    source.close()


def refused(command, folder, capsys) -> tuple[int, str]:
    before = contents(folder)
    status = cli.main(list(map(str, command)))
    assert contents(folder) == before
    captured = capsys.readouterr()
    assert captured.out == ""
    return status, captured.err


def test_bad_places_are_refused_untouched(model, tmp_path, monkeypatch, capsys) -> None:
    folder, _ = model
    (tmp_path / "mine").write_text("precious")
    make_run_store(tmp_path / "run.store")
    for command, status, words in (
        (["import", folder, tmp_path / "mine"], 6, "there is something already"),
        (["import", folder, tmp_path / "run.store"], 6, "there is a store already"),
        (["import", folder, tmp_path / "no" / "where"], 6, "does not exist"),
        (["import", tmp_path / "nowhere", tmp_path / "new"], 5, "no such folder or file"),
        (["import", tmp_path, tmp_path / "new"], 5, "no config.json"),
        (["export", tmp_path / "run.store", folder], 2, "it exists already"),
        (["export", tmp_path / "mine", tmp_path / "new"], 5, "mine"),
        (["export", tmp_path / "nowhere", tmp_path / "new"], 5, "no such folder or file"),
        (["export", tmp_path / "run.store"], 2, "the folder to make is missing"),
        (["export", tmp_path / "run.store", tmp_path / "new", "--step=3"], 2, "no checkpoint"),
        (["export", tmp_path / "run.store", tmp_path / "new", "--max-shard-size=x"], 2, "--max-shard-size"),
    ):
        got, message = refused(command, tmp_path, capsys)
        assert got == status, message
        assert words in message
    with TensorStore.open(tmp_path / "run.store", **ANY_DISK):
        command = ["export", str(tmp_path / "run.store"), str(tmp_path / "new")]
        assert cli.main(command) == 6
        assert "in use" in capsys.readouterr().err
    monkeypatch.setattr(new_store, "disk_free_bytes", lambda paths: 5000)
    status, message = refused(["import", folder, tmp_path / "new"], tmp_path, capsys)
    assert status == 6
    assert "5,000 (4.88 KiB) are free; nothing was changed" in message


def test_an_export_without_room_is_refused_before_the_first_byte(tmp_path, monkeypatch, capsys) -> None:
    make_run_store(tmp_path / "a.store")

    class Full:
        f_bavail, f_frsize = 3, 4096

    monkeypatch.setattr("memascend_jax.checkpoints.export.os.statvfs", lambda path: Full())
    status, message = refused(["export", tmp_path / "a.store", tmp_path / "out"], tmp_path, capsys)
    assert status == 6
    assert "nothing was written" in message


def test_every_fault_of_a_model_is_told(tmp_path, capsys) -> None:
    config = hf_config()
    tensors = random_tensors(config)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = np.zeros(3, np.float32)
    write_folder(tmp_path / "model", config, tensors, shards=2)
    status, message = refused(["import", tmp_path / "model", tmp_path / "new"], tmp_path, capsys)
    assert status == 5
    assert "'model.layers.0.mlp.up_proj.weight' is missing" in message
    assert "'model.norm.weight' has shape [3]" in message


def test_a_truncated_shard_and_a_missing_one_are_named(tmp_path, capsys) -> None:
    config = hf_config()
    write_folder(tmp_path / "model", config, random_tensors(config), shards=2)
    shard = tmp_path / "model" / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    status, message = refused(["import", tmp_path / "model", tmp_path / "new"], tmp_path, capsys)
    assert (status, "truncated" in message, shard.name in message) == (5, True, True)
    shard.unlink()
    status, message = refused(["import", tmp_path / "model", tmp_path / "new"], tmp_path, capsys)
    assert (status, f"shards are missing: {shard.name}" in message) == (5, True)


def test_a_model_of_a_newer_version_is_refused(tmp_path, capsys) -> None:
    with TensorStore.create(tmp_path / "m.store", capacity="1MiB", **ANY_DISK) as store:
        store.put("w", np.zeros(3, np.float32))
        store.commit(b'{"model_schema":2}')
    status, message = refused(["export", tmp_path / "m.store", tmp_path / "out"], tmp_path, capsys)
    assert (status, "version 2" in message) == (5, True)


def test_a_folder_of_a_run_stands_for_its_store(tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    make_run_store(folder / "memascend.store")
    (folder / "config.yaml").write_text("{}\n")
    (folder / "status.json").write_text("{}\n")
    assert cli.main(["export", str(folder), str(tmp_path / "out")]) == 0
    total = sum(math.prod(value.shape) for value in read_all(tmp_path / "out").values())
    assert total == sum(value.size for value in read_all(tmp_path / "out").values())


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_checkpoint_is_exported_as_the_step_that_is_asked_for(tmp_path, capsys, name) -> None:
    saved = save_small(tmp_path / "checkpoints", 3, 8, name=name)
    for arguments, step in (([], 8), (["--step=3"], 3)):
        command = [
            "export",
            str(tmp_path / "checkpoints"),
            str(tmp_path / f"out{step}"),
            "--json",
            *arguments,
        ]
        assert cli.main(command) == 0
        assert json.loads(capsys.readouterr().out)["step"] == step
    command = ["export", str(tmp_path / "checkpoints" / "8"), str(tmp_path / "exact"), "--dtype=float32"]
    assert cli.main(command) == 0
    for tensor, values in read_all(tmp_path / "exact").items():
        kept = saved.get(("master", tensor), saved["params", tensor])
        np.testing.assert_array_equal(values.reshape(-1), kept.astype(F32))
    for tensor, values in read_all(tmp_path / "out8").items():
        kept = saved.get(("master", tensor), saved["params", tensor]).astype(F32)
        np.testing.assert_array_equal(values.reshape(-1), round_master(kept, "bfloat16"))
    capsys.readouterr()
    status, message = refused(
        ["export", tmp_path / "checkpoints", tmp_path / "new", "--step=4"], tmp_path, capsys
    )
    assert status == 5
    assert "3, 8" in message
    (tmp_path / "checkpoints" / "8" / "_CHECKPOINT_METADATA").unlink()
    status, message = refused(["export", tmp_path / "checkpoints" / "8", tmp_path / "new"], tmp_path, capsys)
    assert (status, "is not whole" in message) == (5, True)


def test_a_model_and_a_conversion_go_to_block_devices(tmp_path, capsys) -> None:
    config = hf_config()
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "model", config, tensors)
    make_run_store(tmp_path / "a.store")
    with (
        loop_device(tmp_path / "one", 64 << 20) as one,
        loop_device(tmp_path / "two", 64 << 20) as two,
    ):
        assert cli.main(["import", str(folder), one]) == 0
        assert_same(read_all(one), tensors)
        assert cli.main(["import", str(folder), one]) == 6
        assert "there is one already" in capsys.readouterr().err
        convert = ["store", "convert", str(tmp_path / "a.store"), "--state-format=split", f"--into={two}"]
        assert cli.main(convert) == 0
        assert cli.main(["store", "convert", two, "--state-format=bf16"]) == 6
        assert "--into PATH" in capsys.readouterr().err
        assert cli.main(["export", two, str(tmp_path / "out")]) == 0
    assert read_all(tmp_path / "out").keys() >= {"model.norm.weight"}


def test_a_disk_that_is_too_small_is_left_as_it_was(tmp_path, capsys) -> None:
    config = hf_config(vocab_size=30_000)
    folder = write_folder(tmp_path / "model", config, random_tensors(config))
    make_run_store(tmp_path / "a.store", vocab_size=4000)
    with loop_device(tmp_path / "image", 8 << 20) as device:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        with mounted(device, tmp_path / "small") as small:
            for command in (
                ["import", folder, small / "m.store"],
                ["export", folder, small / "out"],
                [
                    "store",
                    "convert",
                    tmp_path / "a.store",
                    "--state-format=split",
                    f"--into={small / 'b.store'}",
                ],
            ):
                # The model takes 30 MB, the run's store 15.
                assert cli.main(list(map(str, command))) == 6
                assert "free" in capsys.readouterr().err
                assert [path.name for path in small.iterdir()] == ["lost+found"]
