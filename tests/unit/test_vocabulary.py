# SPDX-License-Identifier: Apache-2.0
"""A vocabulary of another size, of a model that is read and of a store: what stays keeps every bit."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from run_stores import contents, make_run_store, read_state, run_config
from stores import ANY_DISK
from tiny_checkpoints import hf_config, random_tensors, read_whole, write_folder
from tokenizers import Tokenizer

from memascend_jax import cli
from memascend_jax.checkpoints.source import open_checkpoint
from memascend_jax.checkpoints.vocabulary import TABLES, NewRows
from memascend_jax.config import load_config
from memascend_jax.dtypes import BF16
from memascend_jax.errors import ConfigError, DataError
from memascend_jax.models.shapes import EMBED_NAME
from memascend_jax.optim.format_conversion import decode_tile
from memascend_jax.optim.rounding import round_master
from memascend_jax.optim.state_format import STATE_FORMATS, state_format
from memascend_jax.recipes import store_rewrite
from memascend_jax.recipes.inputs import open_model
from memascend_jax.storage.tensor_store import TensorStore
from memascend_jax.training.run_state import RunState

#: The tokenizer of ``tiny_checkpoints`` has 259 ids, its table 288 rows.
IDS, ROWS = 259, 288


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path):
    config = hf_config(tie_word_embeddings=request.param)
    made = write_folder(tmp_path / "model", config, random_tensors(config, BF16), shards=2)
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (made / "added_tokens.json").write_text(json.dumps({"<s>": 1}))
    return made


def opened(folder, *overrides):
    return open_model(load_config([], [f"model.source={folder}", "data.seq_len=64", *overrides]))


def whole(model, name) -> np.ndarray:
    return np.concatenate([values.reshape(-1) for _, values in model.pieces(name)])


def resize(path, *arguments) -> int:
    return cli.main(["store", "resize-vocab", str(path), *map(str, arguments)])


@pytest.mark.parametrize("init", ["mean", "normal", "zeros"])
def test_rows_are_added_when_a_model_is_read(folder, init) -> None:
    old, model = opened(folder), opened(folder, "model.vocab_size=300", f"model.new_rows={init}")
    for name, tensor in model.checkpoint.tensors.items():
        before, after = whole(old, name), whole(model, name)
        assert after.size == math.prod(tensor.shape)
        if name not in TABLES:
            assert after.tobytes() == before.tobytes()
            continue
        assert after[: before.size].tobytes() == before.tobytes()
        old_rows = before.reshape(ROWS, -1).astype(np.float64)
        rows = after.reshape(300, -1)[ROWS:].astype(np.float64)
        if init == "zeros":
            assert not rows.any()
        elif init == "mean":
            np.testing.assert_allclose(rows, np.tile(old_rows.mean(axis=0), (12, 1)), rtol=2**-7, atol=1e-6)
        else:
            assert rows.std() == pytest.approx(old_rows.std(), rel=0.1)
            assert len(np.unique(rows, axis=0)) == 12
    assert model.config.vocab_size == 300
    assert model.checkpoint.digest != old.checkpoint.digest
    old.close()
    model.close()


def test_new_rows_do_not_depend_on_how_they_are_asked_for() -> None:
    table = np.random.default_rng(0).standard_normal((50, 6), np.float32)
    rows = NewRows(
        "normal", lambda name: [(0, table[:20].reshape(-1)), (120, table[20:].reshape(-1))], 6, seed=3
    )
    together = rows("a", 50, 8).reshape(8, 6)
    apart = np.concatenate([rows("a", 50 + index, 1).reshape(1, 6) for index in range(8)])
    np.testing.assert_array_equal(together, apart)
    assert (rows("b", 50, 8) != together.reshape(-1)).any()
    many = rows("a", 1000, 4000).reshape(4000, 6)
    np.testing.assert_allclose(many.mean(axis=0), table.mean(axis=0), atol=0.1)
    np.testing.assert_allclose(many.std(axis=0), table.std(axis=0), rtol=0.1)


def test_tokens_are_added_to_the_tokenizer_and_what_is_exported_of_it(folder) -> None:
    model = opened(folder, "model.add_tokens=[<think>, </think>]")
    # There is room for them in the table.
    assert model.config.vocab_size == ROWS
    tokenizer = model.coder.tokenizer
    assert tokenizer.encode("a<think>b").ids[1] == IDS
    files = model.export_files()
    again = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert again.encode("x</think>").ids[-1] == IDS + 1
    assert again.decode([IDS, IDS + 1]).count("think") == 2
    assert json.loads(files["added_tokens.json"]) == {"<s>": 1, "<think>": IDS, "</think>": IDS + 1}
    decoder = json.loads(files["tokenizer_config.json"])["added_tokens_decoder"]
    assert decoder[str(IDS)]["content"] == "<think>"
    model.close()
    many = [f"<{index}>" for index in range(40)]
    model = opened(folder, f"model.add_tokens={json.dumps(many)}")
    assert model.config.vocab_size == IDS + 40
    assert json.loads(model.export_files()["config.json"])["vocab_size"] == IDS + 40
    model.close()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.vocab_size=258", "ids up to 258 are in use"),
        ("model.add_tokens=[</s>]", "'</s>' is one already, id 2"),
        ("model.add_tokens=[x1, x1]", "'x1' is given twice"),
    ],
)
def test_what_cannot_be_is_refused_when_a_model_is_read(folder, override, words) -> None:
    with pytest.raises(DataError, match=words):
        opened(folder, override)


def test_a_random_model_has_a_key_of_its_own() -> None:
    for override in ("model.vocab_size=900", "model.add_tokens=[x]"):
        with pytest.raises(ConfigError, match=r"set model\.config\.vocab_size"):
            load_config(["tiny_random"], [override])


def test_a_model_in_a_store_gets_tokens_and_rows(folder, tmp_path) -> None:
    path = tmp_path / "m.store"
    assert cli.main(["import", str(folder), str(path)]) == 0
    assert resize(path, "--add-token", "<think>", "--size", 320) == 0
    read, stored = opened(folder, "model.add_tokens=[<think>]", "model.vocab_size=320"), open_checkpoint(path)
    assert stored.config == {**open_checkpoint(folder).config, "vocab_size": 320}
    for name in stored.tensors:
        assert read_whole(stored, name).tobytes() == whole(read, name).tobytes()
    assert stored.tokenizer().token_to_id("<think>") == IDS
    assert stored.export_files().keys() == read.export_files().keys()
    stored.close()
    assert cli.main(["export", str(path), str(tmp_path / "out")]) == 0
    exported = open_checkpoint(tmp_path / "out")
    assert ("lm_head.weight" in exported.tensors) == (not exported.config["tie_word_embeddings"])
    assert exported.tensors[EMBED_NAME].shape == (320, 256)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 320
    assert TensorStore.open(path, read_only=True, **ANY_DISK).spec(EMBED_NAME).mutable is False


@pytest.mark.parametrize("name", STATE_FORMATS)
@pytest.mark.parametrize(("rows", "tied"), [(301, True), (700, False), (128, False)])
def test_a_run_keeps_the_state_of_every_row_that_stays(tmp_path, name, rows, tied) -> None:
    path = tmp_path / "a.store"
    run = make_run_store(path, name, tie_word_embeddings=tied)
    before = read_state(path, name)
    assert resize(path, "--size", rows) == 0
    after, fmt = read_state(path, name), state_format(name, "bfloat16")
    kept = min(rows, 300) * 96
    for tensor, tile in after.items():
        old, new = decode_tile(fmt, before[tensor]), decode_tile(fmt, tile)
        if tensor not in TABLES:
            assert tile.param.tobytes() == before[tensor].param.tobytes()
        for field in ("master", "mu", "nu"):
            was, now = getattr(old, field), getattr(new, field)
            n = kept if tensor in TABLES else was.size
            assert now[:n].tobytes() == was[:n].tobytes(), (tensor, field)
            if tensor in TABLES and field != "master":
                assert not now[n:].any()
        if tensor in TABLES and rows > 300:
            mean = old.master.reshape(300, 96).astype(np.float64).mean(axis=0).astype(np.float32)
            wanted = np.tile(mean, rows - 300)
            if name in ("fp32", "split", "split_bf16"):
                assert new.master[kept:].tobytes() == wanted.tobytes()
            np.testing.assert_array_equal(tile.param[kept:], round_master(wanted, "bfloat16"))
    assert (("lm_head.weight" in after), len(after[EMBED_NAME].param)) == (not tied, rows * 96)
    with TensorStore.open(path, read_only=True, **ANY_DISK) as store:
        state = RunState.decode(store.run_state, "it")
        assert store.spec(EMBED_NAME).row_access
        # Room for the gradients of the larger tables.
        grown = max(rows - 300, 0) * 96 * 2 * (1 if tied else 2)
        assert store.inspect()["scratch_bytes"] >= (1 << 16) + grown - 8192
        assert not store.verify().faults
    assert state.config["model"]["config"] == {**run.config["model"]["config"], "vocab_size": rows}
    assert (state.step, state.metrics_bytes, state.contents) == (7, 123, {})


def test_a_run_of_a_model_is_told_how_to_go_on(folder, tmp_path, capsys) -> None:
    path = tmp_path / "a.store"
    random = run_config()
    shape = {key: hf_config()[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    run = make_run_store(path, "split", tie_word_embeddings=True, num_key_value_heads=2, **shape)
    config = {**run.config, "model": {**random.model.model_dump(), "source": str(folder), "config": {}}}
    with TensorStore.open(path, **ANY_DISK) as store:
        store.commit(RunState(7, config, run.tile_elements, contents={"model": "x"}).encode())
    assert resize(path, "--add-token", "<a b>", "--size", 310, "--init", "normal", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rows"], facts["rows_before"]) == (310, 288)
    assert facts["settings"] == [
        "model.vocab_size=310",
        'model.add_tokens=["<a b>"]',
        "model.new_rows=normal",
    ]
    changed = load_config([], [f"model.source={folder}", *facts["settings"]]).model
    with TensorStore.open(path, read_only=True, **ANY_DISK) as store:
        state = RunState.decode(store.run_state, "it")
    assert state.config["model"]["add_tokens"] == list(changed.add_tokens) == ["<a b>"]
    assert (state.config["model"]["vocab_size"], state.contents) == (changed.vocab_size, {})
    assert resize(path, "--add-token", "<a b>") == 5
    assert "is one already, id 259" in capsys.readouterr().err


def test_bad_input_leaves_the_store_as_it_was(tmp_path, folder, capsys) -> None:
    make_run_store(tmp_path / "run.store")
    assert cli.main(["import", str(folder), str(tmp_path / "m.store")]) == 0
    (tmp_path / "plain").write_text("mine")
    with TensorStore.create(tmp_path / "other.store", capacity="1MiB", **ANY_DISK) as store:
        store.put("w", np.zeros(3, np.float32))
        store.commit(b"mine")
    before = contents(tmp_path)
    capsys.readouterr()
    for arguments, status, words in (
        (["run.store"], 2, "nothing to change"),
        (["run.store", "--size", 0], 2, "at least one token"),
        (["run.store", "--size", 300], 2, "300 already"),
        (["run.store", "--add-token", "x"], 2, "no tokenizer"),
        (["m.store", "--size", 100], 5, "ids up to 258 are in use"),
        (["m.store", "--size", 288], 2, "288 already"),
        (["m.store", "--add-token", ""], 5, "a token is empty"),
        (["plain", "--size", 100], 6, "not a memascend store"),
        (["other.store", "--size", 100], 6, "not a training run"),
        (["nowhere", "--size", 100], 6, "no such file"),
        (["run.store", "--size", 400, "--into", tmp_path / "plain"], 6, "there is something already"),
    ):
        assert resize(tmp_path / arguments[0], *arguments[1:]) == status, words
        captured = capsys.readouterr()
        assert words in captured.err
        assert captured.out == ""
        assert contents(tmp_path) == before
    with TensorStore.open(tmp_path / "run.store", **ANY_DISK):
        assert resize(tmp_path / "run.store", "--size", 400) == 6
    assert "in use" in capsys.readouterr().err


def test_a_failure_in_the_middle_leaves_the_old_vocabulary(tmp_path, monkeypatch) -> None:
    make_run_store(tmp_path / "a.store")
    before = contents(tmp_path)

    def fail(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(store_rewrite, "write_state", fail)
    assert resize(tmp_path / "a.store", "--size", 400) == 130
    assert contents(tmp_path) == before
