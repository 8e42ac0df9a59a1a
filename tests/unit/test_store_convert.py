# SPDX-License-Identifier: Apache-2.0
"""A run's store in another state format: nothing is lost that need not be, and the old store is there until the end."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest
from run_stores import contents, make_run_store, read_state
from stores import ANY_DISK

from memascend_jax import cli
from memascend_jax.optim.format_conversion import Rounding, convert_tile, decode_tile
from memascend_jax.optim.state_format import state_format
from memascend_jax.recipes import new_store, store_rewrite
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.training.run_state import RunState


def convert(path, name: str, *arguments: str) -> int:
    return cli.main(["store", "convert", str(path), "--state-format", name, *arguments])


def refused(path, name: str, *arguments: str, capsys, status: int = 6) -> str:
    before = contents(Path(path).parent)
    assert convert(path, name, *arguments) == status
    assert contents(Path(path).parent) == before
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def assert_same_state(left, right) -> None:
    assert left.keys() == right.keys()
    for name, tile in left.items():
        assert tile.param.tobytes() == right[name].param.tobytes(), name
        for suffix, values in tile.leaves.items():
            assert values.tobytes() == right[name].leaves[suffix].tobytes(), name + suffix


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("fp32", "split"),
        ("split", "split_bf16"),
        ("split_bf16", "int8"),
        ("int8", "bf16"),
        ("bf16", "fp32"),
        ("fp32", "int8"),
        ("int8", "split"),
    ],
)
def test_a_format_becomes_another(tmp_path, source: str, target: str) -> None:
    path = tmp_path / "a.store"
    before = make_run_store(path, source)
    expected = read_state(path, source)
    with TensorStore.open(path, read_only=True, **ANY_DISK) as store:
        identity = store.store_id
    assert convert(path, target) == 0
    formats = [state_format(name, "bfloat16") for name in (source, target)]
    wanted = {name: convert_tile(*formats, tile, Rounding(5, 7, name)) for name, tile in expected.items()}
    assert_same_state(read_state(path, target), wanted)
    if target in ("fp32", "split"):
        for name, tile in read_state(path, target).items():
            made, exact = decode_tile(formats[1], tile), decode_tile(formats[0], expected[name])
            for field in ("master", "mu", "nu"):
                assert getattr(made, field).tobytes() == getattr(exact, field).tobytes()
    with TensorStore.open(path, read_only=True, **ANY_DISK) as store:
        assert store.store_id == identity
        assert not store.verify().faults
        after = RunState.decode(store.run_state, str(path))
        assert store.spec("model.embed_tokens.weight").row_access
    kept = before.config["optimizer"] | {"state_format": target}
    assert after.config == {**before.config, "optimizer": kept}
    for field in ("step", "metrics_bytes", "tokens", "results", "tile_elements"):
        assert getattr(after, field) == getattr(before, field)
    assert [file.name for file in tmp_path.iterdir()] == ["a.store"]


@pytest.mark.parametrize("wide", ["fp32", "split"])
def test_fp32_and_split_come_back_to_the_byte(tmp_path, wide: str) -> None:
    path, other = tmp_path / "a.store", {"fp32": "split", "split": "fp32"}[wide]
    make_run_store(path, wide)
    before = read_state(path, wide)
    assert convert(path, other) == 0
    for name, tile in read_state(path, other).items():
        assert tile.param.tobytes() == before[name].param.tobytes()
    assert convert(path, wide) == 0
    assert_same_state(read_state(path, wide), before)


def test_a_store_of_two_members_is_converted_into_another_place(tmp_path, capsys) -> None:
    paths = [tmp_path / "a.store", tmp_path / "b.store"]
    make_run_store(paths, "fp32", weights=[2, 1])
    before = contents(tmp_path)
    command = ["store", "convert", *map(str, paths), "--state-format", "split"]
    assert cli.main(command) == 6
    assert "--into PATH" in capsys.readouterr().err
    assert contents(tmp_path) == before
    into = [tmp_path / "c.store", tmp_path / "d.store"]
    assert cli.main([*command, "--json", *(f"--into={path}" for path in into)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["from"], facts["to"], facts["step"]) == ("fp32", "split", 7)
    assert facts["paths"] == list(map(str, into))
    assert {name: before[name] for name in before} == {
        name: data for name, data in contents(tmp_path).items() if name in before
    }
    with TensorStore.open(into, read_only=True, **ANY_DISK) as store:
        assert [member["weight"] for member in store.inspect()["members"]] == [2, 1]
    one = read_state(into, "split")
    assert (
        cli.main(["store", "convert", *map(str, into), "--state-format=fp32", f"--into={tmp_path / 'e'}"])
        == 0
    )
    assert_same_state(read_state(tmp_path / "e", "fp32"), read_state(paths, "fp32"))
    assert one.keys() == read_state(paths, "fp32").keys()


def test_inspect_tells_the_state_format_and_the_step(tmp_path, capsys) -> None:
    make_run_store(tmp_path / "a.store", "int8")
    assert cli.main(["store", "inspect", str(tmp_path / "a.store"), "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert (run["state_format"], run["step"], run["compute_dtype"]) == ("int8", 7, "auto")
    assert cli.main(["store", "inspect", str(tmp_path / "a.store")]) == 0
    assert "int8, compute dtype auto" in capsys.readouterr().out


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_failure_in_the_middle_leaves_the_old_store_and_nothing_else(tmp_path, monkeypatch, error) -> None:
    path = tmp_path / "a.store"
    make_run_store(path)
    before, written = contents(tmp_path), []

    def fail_later(*arguments):
        written.append(arguments)
        if len(written) == 9:
            raise error
        return real(*arguments)

    real = store_rewrite.write_state
    monkeypatch.setattr(store_rewrite, "write_state", fail_later)
    assert convert(path, "split") != 0
    assert contents(tmp_path) == before


def test_what_a_killed_conversion_left_is_removed_by_the_next_one(tmp_path) -> None:
    make_run_store(tmp_path / "a.store")
    # Beyond the largest number that Linux gives to a process.
    left = tmp_path / f".a.store.partial-{2**22 + 1}"
    left.write_bytes(b"half a store")
    assert convert(tmp_path / "a.store", "split") == 0
    assert not left.exists()


def test_a_store_that_is_in_use_is_refused(tmp_path, capsys) -> None:
    path = tmp_path / "a.store"
    make_run_store(path)
    with TensorStore.open(path, **ANY_DISK):
        assert "in use" in refused(path, "split", capsys=capsys)


def test_without_the_room_for_both_nothing_is_begun(tmp_path, monkeypatch, capsys) -> None:
    make_run_store(tmp_path / "a.store")
    monkeypatch.setattr(new_store, "disk_free_bytes", lambda paths: 1000)
    message = refused(tmp_path / "a.store", "split", capsys=capsys)
    assert "1,000 (1000 B) are free" in message
    assert "choose another place" in message


def test_what_is_no_run_is_refused_by_what_it_is(tmp_path, capsys) -> None:
    (tmp_path / "plain").write_text("mine")
    assert "not a memascend store" in refused(tmp_path / "plain", "split", capsys=capsys)
    assert "no such file" in refused(tmp_path / "nowhere", "split", capsys=capsys)
    for name, state, words in (
        ("empty", None, "holds nothing yet"),
        ("other", b"mine", "not a training run"),
        ("offloaded", b"mine", "memascend_jax.offload"),
    ):
        with TensorStore.create(tmp_path / name, capacity="1MiB", **ANY_DISK) as store:
            if state is not None:
                store.put("w", np.ones(10, np.float32))
                if name == "offloaded":
                    store.records.set("", {"version": 0})
                store.commit(state)
        assert words in refused(tmp_path / name, "split", capsys=capsys)


def test_an_existing_place_is_never_overwritten(tmp_path, capsys) -> None:
    make_run_store(tmp_path / "a.store")
    (tmp_path / "mine").write_text("precious")
    for place in ("mine", "a.store"):
        assert "already" in refused(
            tmp_path / "a.store", "split", f"--into={tmp_path / place}", capsys=capsys
        )


def test_the_format_that_it_has_is_refused(tmp_path, capsys) -> None:
    make_run_store(tmp_path / "a.store", "int8")
    assert "already" in refused(tmp_path / "a.store", "int8", capsys=capsys, status=2)


def test_a_format_that_does_not_go_with_the_compute_dtype_is_refused(tmp_path, capsys) -> None:
    make_run_store(tmp_path / "a.store", "fp32", "model.compute_dtype=float32")
    assert "does not go with" in refused(tmp_path / "a.store", "bf16", capsys=capsys, status=2)


def test_a_flipped_bit_in_the_old_store_is_found(tmp_path, capsys) -> None:
    path = tmp_path / "a.store"
    make_run_store(path)
    with TensorStore.open(path, read_only=True, **ANY_DISK) as store:
        tensor = store._table.tensors["model.layers.1.mlp.up_proj.weight#mu"]
        _, offset = store._volume.striping.locate(tensor.bases[int(tensor.place[0])])
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    message = refused(path, "split", capsys=capsys)
    assert "model.layers.1.mlp.up_proj.weight#mu" in message
