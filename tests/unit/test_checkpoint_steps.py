# SPDX-License-Identifier: Apache-2.0
"""Steps of a checkpoint: other readers read them, they are whole or not there, and what is wrong with one is told."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from saved_steps import (
    CHUNK_BYTES,
    CONFIG,
    random_values,
    record,
    save_small,
    small_arrays,
    streamed,
)

from memascend_jax import cli
from memascend_jax.checkpoints import orbax_steps
from memascend_jax.checkpoints.array_layout import TRAILER_BYTES, array_from_json, state_arrays
from memascend_jax.checkpoints.orbax_steps import EVAL_LOSS, OrbaxSteps, StreamedState
from memascend_jax.checkpoints.saved_model import SavedModel
from memascend_jax.checkpoints.saved_step import (
    check_model,
    find_steps,
    open_step,
    resolve_step,
)
from memascend_jax.checkpoints.source import open_checkpoint
from memascend_jax.checkpoints.verify_step import newest_whole_step, verify_step
from memascend_jax.errors import DataError
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import TensorShape, tensor_shapes
from memascend_jax.optim.state_format import state_format

NAME = "model.layers.0.mlp.up_proj.weight"
#: Reads a step with orbax and with tensorstore alone, and writes every array's bytes to a folder.
PLAIN_READER = """
import sys
from pathlib import Path
import numpy as np
import tensorstore as ts
from orbax.checkpoint.experimental import v1 as ocp
step, out = Path(sys.argv[1]), Path(sys.argv[2])
tree = ocp.load(step)
for group, tensors in tree.items():
    for name, array in tensors.items():
        (out / f"{group}.{name}").write_bytes(np.ascontiguousarray(array).view(np.uint8).tobytes())
        kvstore = {"driver": "file", "path": str(step / "state" / f"{group}.{name}")}
        plain = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result().read().result()
        assert plain.dtype == array.dtype and plain.shape == array.shape
        assert plain.tobytes() == np.asarray(array).tobytes()
print(ocp.load_checkpointables(step)["run"]["program"])
assert not any(name.startswith("memascend") for name in sys.modules)
"""


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_orbax_and_tensorstore_read_a_step_without_this_package(tmp_path: Path, name: str) -> None:
    values = save_small(tmp_path / "steps", 3, name=name)
    assert name == "int8" or any(array.chunks > 1 for array in small_arrays(name))
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-c", PLAIN_READER, str(tmp_path / "steps" / "3"), str(out)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == "memascend-jax"
    read = {path.name: path.read_bytes() for path in out.iterdir()}
    assert read == {f"{group}.{tensor}": data.tobytes() for (group, tensor), data in values.items()}


def test_orbax_loads_a_step_as_the_arrays_that_were_asked_for(tmp_path: Path) -> None:
    import jax
    from orbax.checkpoint.experimental import v1 as ocp

    values = save_small(tmp_path, 1)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
    for array in small_arrays():
        shape = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        wanted.setdefault(array.group, {})[array.tensor] = shape
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest.step == 1
        loaded = checkpointer.load(1, wanted)
    assert isinstance(loaded["mu"][NAME], jax.Array)
    assert np.asarray(loaded["mu"][NAME]).tobytes() == values["mu", NAME].tobytes()


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    arrays = small_arrays()
    values = random_values(arrays)
    kept = []
    with OrbaxSteps(tmp_path, every=2, keep=2, keep_best=1) as saver:
        for step, loss in zip(range(2, 12, 2), (5.0, 1.0, 3.0, None, 6.0), strict=True):
            assert saver.is_due(step) and not saver.is_due(step + 1)
            metrics = {} if loss is None else {EVAL_LOSS: loss}
            saver.save(record(step), streamed(arrays, values), metrics)
            kept.append(find_steps(tmp_path))
    assert kept == [[2], [2, 4], [4, 6], [4, 6, 8], [4, 8, 10]]
    assert open_step(tmp_path / "4").metrics == {EVAL_LOSS: 1.0}


def test_a_save_that_fails_leaves_the_steps_before_and_the_next_one_works(tmp_path: Path) -> None:
    save_small(tmp_path, 1)
    arrays = small_arrays()
    good = streamed(arrays, random_values(arrays))

    def fail(write) -> None:
        good.stream(lambda group, tensor, *rest: write(group, tensor, *rest) if group == "params" else 1 / 0)

    with OrbaxSteps(tmp_path, every=1, keep=3) as saver:
        with pytest.raises(ZeroDivisionError):
            saver.save(record(2), StreamedState(arrays, fail), {})
        assert find_steps(tmp_path) == [1]
        saver.save(record(3), good, {})
    assert find_steps(tmp_path) == [1, 3]
    with OrbaxSteps(tmp_path, every=1, keep=3):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]
    assert verify_step(open_step(tmp_path / "3")).faults == ()


def test_chunks_begin_on_blocks_and_cover_the_array_once() -> None:
    shapes = [
        TensorShape("a", (1000, 24), "x"),
        TensorShape("b", (50257, 7), "x"),
        TensorShape("c", (9,), "x"),
    ]
    for array in state_arrays(state_format("int8", "bfloat16"), shapes, chunk_bytes=CHUNK_BYTES):
        if array.chunks > 1:
            assert array.chunk_bytes % 4096 == 0
        assert (array.chunks - 1) * array.chunk_rows < array.shape[0] <= array.chunks * array.chunk_rows
        spans = list(array.spans(0, array.elements))
        assert sum(span.nbytes for span in spans) == array.elements * array.itemsize
        assert [span.chunk for span in spans] == list(range(array.chunks))
        assert array_from_json(array.group, array.tensor, array.to_json()) == array


def test_saving_again_and_again_takes_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orbax_steps, "sync_disk", lambda folder: None)
    arrays = small_arrays()
    state = streamed(arrays, random_values(arrays))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with OrbaxSteps(tmp_path, every=1, keep=1) as saver:
        for step in range(1, 13):
            saver.save(record(step), state, {})
            if step == 5:
                before = resident()
    # 2 % of a process that holds jax and orbax, as of a hundred saves.
    assert resident() <= 1.02 * before


def damaged(path: Path) -> Path:
    """The file of one chunk of the step in ``path``."""
    return path / "state" / f"mu.{NAME}" / "c" / "0" / "0"


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("offset", [0, 5000, CHUNK_BYTES - 1, CHUNK_BYTES + TRAILER_BYTES - 1])
def test_a_flipped_bit_is_found(tmp_path: Path, offset: int) -> None:
    save_small(tmp_path, 1)
    flip(damaged(tmp_path / "1"), offset)
    (fault,) = verify_step(open_step(tmp_path / "1")).faults
    assert str(damaged(tmp_path / "1")) in fault and "CRC32C" in fault


DOWN, UP, GATE = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("down", "up", "gate"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def swap(step: Path, one: str, other: str) -> None:
    held = step / "state" / "held"
    (step / "state" / one).rename(held)
    (step / "state" / other).rename(step / "state" / one)
    held.rename(step / "state" / other)


def change_tokens(step: Path) -> None:
    path = step / "run" / "data.json"
    path.write_text(
        path.read_text().replace('"tokens": 7', '"tokens": 3').replace('"tokens":7', '"tokens":3')
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda step: truncate(step / "state" / "_METADATA"), "'_METADATA' is damaged"),
        (lambda step: (step / "state" / "_METADATA").unlink(), "'_METADATA' cannot be read"),
        (lambda step: zero(step / "_CHECKPOINT_METADATA"), "_CHECKPOINT_METADATA' cannot be read"),
        (lambda step: truncate(step / "_CHECKPOINT_METADATA"), "_CHECKPOINT_METADATA' cannot be read"),
        (lambda step: (step / "_CHECKPOINT_METADATA").write_text("[]"), "does not say what is saved"),
        (change_tokens, "its record holds other values than were saved"),
        (lambda step: zero(step / "state" / "_model" / "a.json"), "'_model/a.json' is damaged"),
        (lambda step: flip(step / "state" / "_digests.json", 50), "_digests.json', cannot be used"),
        (lambda step: (step / "state" / "_digests.json").unlink(), "it is missing"),
        (lambda step: swap(step, f"mu.{UP}", f"mu.{GATE}"), "is whole, but not the one that was saved"),
        (lambda step: swap(step, f"master.{DOWN}", f"mu.{DOWN}"), "is whole, but not the one that was saved"),
        (lambda step: step.rename(step.with_name("9")), "is of step 2, whatever its name says"),
    ],
)
def test_damage_to_any_file_and_files_that_were_exchanged_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], words: str
) -> None:
    save_small(tmp_path, 2, files={"a.json": b"{}\n" * 9})
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert "not recorded" not in capsys.readouterr().out
    damage(tmp_path / "2")
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 5
    assert words in capsys.readouterr().err


def test_a_step_of_an_earlier_version_has_no_checksums_by_name_and_is_still_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_small(tmp_path, 2)
    step = tmp_path / "2"
    path = step / "run" / "data.json"
    values = json.loads(path.read_text())
    del values["digests"]
    path.write_text(json.dumps(values))
    (step / "state" / "_digests.json").unlink()
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert "not recorded" in capsys.readouterr().out
    path.write_text(json.dumps({**values, "step": -2}))
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 5
    assert "cannot be the number of its step" in capsys.readouterr().err


def test_what_is_not_whole_is_told_and_an_older_step_is_used(tmp_path: Path) -> None:
    save_small(tmp_path, 1, 2, 3, 4)
    with damaged(tmp_path / "4").open("r+b") as file:
        file.truncate(100)
    damaged(tmp_path / "3").unlink()
    (tmp_path / "2" / "_CHECKPOINT_METADATA").unlink()
    newest, refused = newest_whole_step(tmp_path)
    assert newest is not None and newest.record.step == 1
    assert f"'mu.{NAME}/c/0/0' has 100 bytes instead of {CHUNK_BYTES + TRAILER_BYTES:,}" in refused[4]
    assert f"'mu.{NAME}/c/0/0' is missing" in refused[3]
    assert "has no _CHECKPOINT_METADATA" in refused[2]
    (tmp_path / "1" / "state" / f"mu.{NAME}" / "zarr.json").write_text("{}")
    with pytest.raises(DataError, match=r"zarr\.json' cannot be read"):
        _ = open_step(tmp_path / "1").arrays


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    save_small(tmp_path, 2, 4)
    with pytest.raises(DataError, match="has no step 3; the steps there are: 2, 4"):
        resolve_step(tmp_path, 3)
    with pytest.raises(DataError, match=r"no such folder; the steps in '.*' are: 2, 4"):
        resolve_step(tmp_path / "3")
    assert cli.main(["checkpoint", "verify", str(tmp_path / "3")]) == 5
    assert resolve_step(tmp_path).record.step == 4
    assert resolve_step(tmp_path / "2").record.step == 2


def test_a_newer_version_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    save_small(tmp_path, 1)
    path = tmp_path / "1" / "run" / "data.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "schema": 2, "version": "9.1"}))
    with pytest.raises(DataError, match=r"format version 2, this program reads version 1.*version 9\.1"):
        open_step(tmp_path / "1")
    path.write_text(json.dumps({**values, "program": "other"}))
    with pytest.raises(DataError, match="was not saved by this program"):
        open_step(tmp_path / "1")
    path.write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        open_step(tmp_path / "1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no step of a checkpoint"):
        resolve_step(tmp_path / "empty")
    with pytest.raises(DataError, match="there is no such folder"):
        resolve_step(tmp_path / "nothing")


def test_a_checkpoint_of_another_model_lists_names_and_shapes(tmp_path: Path) -> None:
    save_small(tmp_path, 1)
    other = tensor_shapes(ModelConfig.from_hf({**CONFIG, "intermediate_size": 96, "num_hidden_layers": 2}))
    with pytest.raises(DataError) as raised:
        check_model(open_step(tmp_path / "1"), other)
    assert f"'{NAME}' is [80, 64] in the checkpoint, [96, 64] in the model" in str(raised.value)
    assert "'model.layers.1.input_layernorm.weight' is not in the checkpoint" in str(raised.value)


@pytest.mark.parametrize("name", ["fp32", "split", "bf16"])
def test_the_model_of_a_step_is_read_in_pieces_as_its_masters(tmp_path: Path, name: str) -> None:
    values = save_small(tmp_path, 1, name=name)
    model = open_checkpoint(tmp_path)
    assert isinstance(model, SavedModel) and not model.has_tokenizer
    assert ModelConfig.from_hf(model.config) == ModelConfig.from_hf(CONFIG)
    parts = list(model.pieces(NAME, 16384))
    assert len(parts) > 1 or name == "bf16"
    read = np.concatenate([piece for _, piece in parts])
    if name == "fp32":
        assert read.tobytes() == values["master", NAME].tobytes()
    else:
        rounded = values["params", NAME].astype(np.float32)
        assert np.allclose(read.astype(np.float32), rounded, rtol=2.0**-8)
    digest = model.digest
    layout = model.saved.arrays["mu", NAME]
    flip(damaged(tmp_path / "1"), layout.chunk_bytes)
    assert SavedModel(open_step(tmp_path / "1")).digest != digest


def test_the_commands_list_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    save_small(run / "checkpoints", 2, 4)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    assert cli.main(["checkpoint", "list", str(run), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in listed["steps"]] == [2, 4]
    assert listed["steps"][0]["loss"] == 1.5 and listed["steps"][0]["fault"] is None
    assert cli.main(["checkpoint", "verify", str(run / "checkpoints")]) == 0
    assert "every checksum matches" in capsys.readouterr().out
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before
    flip(damaged(run / "checkpoints" / "4"), 17)
    assert cli.main(["checkpoint", "verify", str(run), "--json"]) == 5
    told = json.loads(capsys.readouterr().out)
    assert [len(step["faults"]) for step in told["steps"]] == [0, 1]
    assert cli.main(["checkpoint", "verify", str(run), "--step", "2"]) == 0
    assert cli.main(["checkpoint", "verify", str(run), "--step", "3"]) == 5
    assert "the steps there are: 2, 4" in capsys.readouterr().err
    assert cli.main(["checkpoint", "list", str(tmp_path / "no")]) == 5
    assert "there is no such folder" in capsys.readouterr().err
