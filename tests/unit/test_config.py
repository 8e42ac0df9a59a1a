# SPDX-License-Identifier: Apache-2.0
"""The configuration: what is read, what is refused, and that one report names every fault."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from memascend_jax.config import (
    Config,
    config_digest,
    describe_keys,
    load_config,
    not_allowed,
    recipe_names,
    recipe_path,
    store_paths,
    to_dict,
    to_yaml,
    training_changes,
)
from memascend_jax.config.schema import fields
from memascend_jax.errors import ConfigError
from memascend_jax.models.model_config import ModelConfig

# The keys that scripts rely on. One may be added; none may go or change its name.
PROMISED_KEYS = [
    "model.source",
    "model.config",
    "model.compute_dtype",
    "data.source",
    "data.eval_source",
    "data.eval_fraction",
    "data.seq_len",
    "data.sources",
    "data.kind",
    "data.chat_template",
    "data.train_on",
    "data.system_prompt",
    "data.too_long",
    "data.packing",
    "data.length_grouping",
    "data.bad_records",
    "data.stream",
    "data.cache",
    "train.steps",
    "train.epochs",
    "train.micro_batch_size",
    "train.gradient_accumulation_steps",
    "train.seed",
    "train.eval_every",
    "train.samples",
    "optimizer.name",
    "optimizer.groups",
    "optimizer.learning_rate",
    "optimizer.schedule",
    "optimizer.warmup_steps",
    "optimizer.b1",
    "optimizer.b2",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.clip_norm",
    "optimizer.state_format",
    "optimizer.loss_scale",
    "optimizer.skip_nonfinite",
    "offload.store",
    "offload.host_memory",
    "offload.device_memory",
    "offload.placement",
    "offload.update",
    "offload.durability",
    "offload.io_backend",
    "offload.direct_io",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.keep_best",
    "checkpoint.dir",
    "run.dir",
    "run.resume",
    "run.restore",
    "run.allow_changed",
    "run.deterministic",
    "run.trace",
    "run.trace_gzip",
    "run.meter_seconds",
    "run.export",
]
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
RANDOM_MODEL = [
    "model.source=random",
    "data.source=random",
    *(f"model.config.{key}={value}" for key, value in SHAPE.items()),
]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def faults_of(*files: Path, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_every_promised_key_exists_and_is_described() -> None:
    known = dict(fields())
    assert set(PROMISED_KEYS) <= set(known)
    help_text = describe_keys()
    for key, field in known.items():
        assert field.description, key
        assert f"  {key}=" in help_text


def test_default_recipe_file_equals_embedded_defaults() -> None:
    path = recipe_path("smollm2_135m")
    assert path is not None
    assert load_config([path]) == load_config() == Config()


def test_every_shipped_recipe_loads_by_name() -> None:
    assert {"smollm2_135m", "tiny_random"} <= set(recipe_names())
    for name in recipe_names():
        assert isinstance(load_config([name]), Config)


def test_values_take_the_type_of_their_field(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.yaml",
        "optimizer: {learning_rate: 1e-5, eps: 1.e-8, clip_norm: null}\n"
        "offload: {direct_io: off, host_memory: 1.2GiB, store: /mnt/a}\n"
        "run: {dir: 007, export: off, deterministic: on}\n"
        "train: {steps: 12}\n",
    )
    config = load_config([file])
    assert config.optimizer.learning_rate == 1e-5
    assert config.optimizer.eps == 1e-8
    assert config.optimizer.clip_norm is None
    assert config.offload.direct_io == "off"
    assert config.offload.host_memory == round(1.2 * 2**30)
    assert config.offload.store == ("/mnt/a",)
    assert config.run.dir == "007"
    assert (config.run.export, config.run.deterministic) == (False, True)
    assert config.train.steps == 12


def test_later_files_and_overrides_win(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yaml", "train: {steps: 5, seed: 1}\n")
    second = write(tmp_path / "b.yaml", "train: {steps: 6}\n")
    config = load_config([first, second], ["train.seed=3", "train.seed=4"])
    assert (config.train.steps, config.train.seed) == (6, 4)


def test_override_with_list_map_and_quotes() -> None:
    config = load_config(
        [], ["offload.store=[/mnt/a, '/mnt/b c']", 'run.dir="a # b"', "data.source=x: y.jsonl"]
    )
    assert config.offload.store == ("/mnt/a", "/mnt/b c")
    assert config.run.dir == "a # b"
    assert config.data.source == "x: y.jsonl"


def test_random_model_keys_are_guessed_and_merged() -> None:
    config = load_config(["tiny_random"], ["model.config.num_hidden_layers=5", "model.config.use_cache=true"])
    assert config.model.config["num_hidden_layers"] == 5
    assert config.model.config["hidden_size"] == 64
    assert config.model.config["rms_norm_eps"] == 1e-5
    assert config.model.config["use_cache"] is True


@pytest.mark.parametrize("nothing", ["{}", "null", ""])
def test_empty_shape_frees_a_recipe_for_another_model(nothing: str, tmp_path: Path) -> None:
    overrides = [f"model.source={tmp_path}", f"model.config={nothing}"]
    assert load_config(["tiny_random"], overrides).model.config == {}
    file = write(tmp_path / "m.yaml", f"model:\n  source: {tmp_path}\n  config: {nothing}\n")
    config = load_config(["tiny_random", file])
    assert (config.model.config, config.data.source) == ({}, "random")
    assert load_config(["tiny_random"], ["model.config={}", *RANDOM_MODEL]).model.config == SHAPE


def test_every_key_of_an_exported_shape_is_known() -> None:
    shape = ModelConfig.from_hf(SHAPE).to_hf()
    overrides = [f"model.config={json.dumps(shape)}"]
    assert load_config(["tiny_random"], overrides).model.config["hidden_size"] == SHAPE["hidden_size"]


def test_epochs_replace_the_steps_of_defaults_and_recipes() -> None:
    assert load_config([], ["train.epochs=0.5"]).train.steps is None
    assert load_config(["tiny_random"], ["train.epochs=2"]).train.steps is None


def test_steps_and_epochs_of_one_file_are_a_contradiction(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "train: {steps: 3, epochs: 2}\n")
    assert "one of train.steps and train.epochs must be set, both are" in faults_of(file)


def test_report_names_every_fault_with_line_column_and_nearest_key(tmp_path: Path) -> None:
    file = write(
        tmp_path / "bad.yaml",
        "model:\n"
        "  sorce: smollm2-135m\n"
        "learning_rate: 3\n"
        "train.steps: 4\n"
        "train:\n"
        "  steps: abc\n"
        "  micro_batch_size: 0\n"
        "  seed: 1\n"
        "  seed: 2\n"
        "optimizer:\n"
        "  schedule: cosin\n"
        "  b1: 1.5\n"
        "offload:\n"
        "  host_memory: much\n"
        "  store: [/a, /a]\n",
    )
    text = faults_of(file, overrides=("trian.steps=1", "train.stepz=2", "nonsense"))
    for expected in (
        "13 faults",
        f"{file}:2:3: unknown key 'model.sorce'; did you mean 'model.source'?",
        f"{file}:3:1: unknown key 'learning_rate'; did you mean 'optimizer.learning_rate'?",
        f"{file}:4:1: unknown key 'train.steps'; write it as 'steps:' under 'train:'",
        f"{file}:6:10: train.steps: expected a whole number, got 'abc'",
        f"{file}:7:21: train.micro_batch_size: must be at least 1, got '0'",
        f"{file}:9:3: duplicate key 'seed', first given on line 8",
        f"{file}:11:13: optimizer.schedule: expected one of cosine, linear, constant, got 'cosin'; did you mean",
        f"{file}:12:7: optimizer.b1: must be less than 1, got '1.5'",
        f"{file}:14:16: offload.host_memory: expected a size such as 1.2GiB",
        f"{file}:15:10: offload.store names '/a' twice",
        "command line: unknown key 'trian'; did you mean 'train'?",
        "command line: unknown key 'train.stepz'; did you mean 'train.steps'?",
        "command line: expected key=value such as train.steps=10, got 'nonsense'",
    ):
        assert expected in text, expected
    assert "  2 |   sorce: smollm2-135m\n    |   ^^^^^" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: [", "not valid YAML"),
        ("- a\n- b\n", "expected sections such as 'train:'"),
        ("train: 3\n", "train: expected keys with values"),
        ("? [a, b]\n: 3\n", "a key must be text"),
        ("train: &x\n  steps: *x\n", "nested more than"),
        ("a: " + "[" * 40 + "]" * 40, "nested more than"),
        (
            "a: &a [1,1,1,1,1,1,1,1]\n"
            + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 8)}]\n" for a, b in pairwise("abcdefghij")),
            "more than 100000",
        ),
        ("train: {steps: 3}\n---\ntrain: {steps: 4}\n", "not valid YAML"),
        (
            "optimizer: {groups: [{mach: norm}]}\n",
            "unknown key 'optimizer.groups[0].mach'; did you mean 'match'?",
        ),
        ("optimizer: {learning_rate: .nan}\n", "learning_rate"),
        ("optimizer: {learning_rate: -1}\n", "must be more than 0"),
        ("run: {dir: ''}\n", "a path cannot be empty"),
        ("train: {steps: 1.5}\n", "expected a whole number"),
    ],
)
def test_malformed_file_is_one_clear_fault(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in faults_of(write(tmp_path / "bad.yaml", text))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    text = faults_of(tmp_path / "missing.yaml", binary, tmp_path, Path("no_such_recipe"))
    for expected in ("4 faults", "missing.yaml", "not UTF-8", "Is a directory", "the shipped recipes are"):
        assert expected in text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.source=random"], "needs the model's shape"),
        (["model.config.hidden_size=3"], "model.config is only for model.source=random"),
        (["model.source=random", "model.config.hidden_size=3"], "needs a tokenizer"),
        (["data.source=random", "data.eval_source=a.jsonl"], "cannot go with data.source=random"),
        (
            [*RANDOM_MODEL, "model.config.max_position_embeddings=8", "data.seq_len=9"],
            "data.seq_len=9 is more than the model's 8 positions",
        ),
        ([*RANDOM_MODEL, "data.seq_len=2049"], "data.seq_len=2049 is more than the model's 2048 positions"),
        (
            [*RANDOM_MODEL, "model.config.num_attention_heads=7"],
            "model.config: hidden_size 64 is not a multiple of num_attention_heads 7",
        ),
        ([*RANDOM_MODEL, "model.config.hiden_size=128"], "did you mean 'model.config.hidden_size'?"),
        ([*RANDOM_MODEL, "model.config.bogus=65"], "unknown key 'model.config.bogus'"),
        ([*RANDOM_MODEL, "model.config.vocab_size=many"], "model.config: vocab_size is 'many'"),
        ([*RANDOM_MODEL, "model.config.model_type=gpt2"], "model.config: architecture 'gpt2' is not known"),
        (["train.steps=null"], "one of train.steps and train.epochs must be set, neither is"),
        (
            ["train.steps=2", "optimizer.warmup_steps=3"],
            "optimizer.warmup_steps=3 is more than train.steps=2",
        ),
        (["train.eval_every=2", "data.eval_fraction=0"], "train.eval_every needs held-out data"),
        (["optimizer.loss_scale=dynamic"], "optimizer.loss_scale is for model.compute_dtype=float16"),
        (
            ["offload.update=in_backward"],
            "cannot wait for optimizer.clip_norm, which needs the whole gradient before the first update; leave it out"
            " (clip_norm: null) or",
        ),
        (
            ["offload.update=in_backward", "optimizer.skip_nonfinite=true"],
            "optimizer.clip_norm and optimizer.skip_nonfinite, which need the whole gradient before the first update;"
            " leave them out (clip_norm: null) or",
        ),
        (["offload.zone=1"], "unknown key 'offload.zone'; offload has store, host_memory, "),
        (["zone=1"], "unknown key 'zone'\n"),
        (["offload.tracee=1"], "did you mean 'run.trace'?"),
        (["offload.durabilty=step"], "did you mean 'offload.durability'?"),
        (
            ["offload.host_memory=[]"],
            "offload.host_memory: expected a size such as 1.2GiB, 800MB or 4096, got a list",
        ),
        (
            ["offload.device_memory={a: 1}"],
            "expected a size such as 1.2GiB, 800MB or 4096, got keys with values",
        ),
        (["optimizer.loss_scale=[]"], "expected null, dynamic or a positive number, got a list"),
        (
            ["offload.update=in_backward", "optimizer.clip_norm=null", "optimizer.skip_nonfinite=true"],
            "cannot wait for optimizer.skip_nonfinite",
        ),
        (
            ["offload.update=in_backward", "optimizer.clip_norm=null", "model.compute_dtype=float16"],
            "in_backward does not go with model.compute_dtype=float16",
        ),
        (
            ["model.compute_dtype=float16", "optimizer.state_format=split"],
            "model.compute_dtype=float16 needs optimizer.state_format=fp32",
        ),
        (["optimizer.groups=[{match: '['}]"], "not a regular expression"),
        (["optimizer.groups=[{match: norm, forzen: true}]"], "unknown key 'optimizer.groups[0].forzen'"),
        (["offload.store=[a, a]"], "names 'a' twice"),
        (["checkpoint.keep_best=1"], "checkpoint.every saves none"),
        (["checkpoint.keep_best=1", "checkpoint.every=4"], "multiple of train.eval_every, which is 0"),
        (
            ["checkpoint.keep_best=1", "checkpoint.every=4", "train.eval_every=3"],
            "checkpoint.every=4 must be a multiple of train.eval_every, which is 3",
        ),
    ],
)
def test_contradictions_name_the_keys(overrides: list[str], expected: str) -> None:
    assert expected in faults_of(overrides=tuple(overrides))


@pytest.mark.parametrize(
    "override",
    [
        "offload.device_memory=8GiB",
    ],
)
def test_setting_that_nothing_would_obey_is_refused(override: str) -> None:
    assert f"{override.split('=')[0]}" in faults_of(overrides=(override,))
    assert "not available in this version" in faults_of(overrides=(override,))


def test_impossible_model_is_pointed_at(tmp_path: Path) -> None:
    shape = "".join(f"    {key}: {value}\n" for key, value in {**SHAPE, "vocab_size": -3}.items())
    text = f"model:\n  source: random\n  config:\n{shape}data: {{source: random}}\n"
    path = write(tmp_path / "m.yaml", text)
    assert f"{path}:6:17: model.config: vocab_size is -3, expected a positive whole number" in faults_of(path)


def test_contradictions_are_reported_beside_wrong_values() -> None:
    text = faults_of(overrides=("train.seed=x", "model.source=random"))
    assert "train.seed" in text
    assert "needs the model's shape" in text


def test_yaml_reads_back_equal_and_other_readers_see_numbers(tmp_path: Path) -> None:
    config = load_config(["tiny_random"], ["offload.host_memory=1GiB", "optimizer.eps=1e-8", "run.dir=1e5"])
    text = to_yaml(config)
    assert load_config([write(tmp_path / "config.yaml", text)]) == config
    plain = yaml.safe_load(text)
    assert plain["optimizer"]["eps"] == 1e-8
    assert plain["run"]["dir"] == "1e5"


def test_saved_configuration_is_compared_by_what_changes_the_training() -> None:
    saved = to_dict(load_config())
    same = load_config([], ["run.dir=elsewhere", "offload.placement=ssd", "train.samples=3"])
    other = load_config([], ["optimizer.learning_rate=1e-3", "train.seed=5"])
    assert training_changes(saved, same) == []
    changes = training_changes(saved, other)
    assert [str(change) for change in changes] == [
        "optimizer.learning_rate (0.00015 → 0.001)",
        "train.seed (0 → 5)",
    ]
    assert not_allowed(changes, ["train.seed", "data"]) == changes[:1]
    assert not_allowed(changes, ["optimizer", "train"]) == not_allowed(changes, ["all"]) == []
    assert config_digest(same) == config_digest(load_config()) != config_digest(other)


@pytest.mark.parametrize("files", [[], ["smollm2_135m"], ["recipes/tiny_random.yaml"]])
def test_warm_up_that_nobody_chose_fits_the_run(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert load_config(files, ["train.steps=1"]).optimizer.warmup_steps == 1
    assert load_config(files, ["train.steps=5"]).optimizer.warmup_steps == 2


@pytest.mark.parametrize("in_file", [True, False])
def test_warm_up_that_the_user_chose_is_not_shortened(in_file: bool, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("optimizer:\n  warmup_steps: 2\n" if in_file else "")
    overrides = [] if in_file else ["optimizer.warmup_steps=2"]
    with pytest.raises(ConfigError, match=r"optimizer\.warmup_steps=2 is more than train\.steps=1"):
        load_config(["tiny_random", mine], ["train.steps=1", *overrides])


def test_shortened_warm_up_is_read_back(tmp_path: Path) -> None:
    config = load_config([], ["train.steps=1"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config([tmp_path / "config.yaml"]) == config


def test_store_is_in_the_run_folder_unless_told() -> None:
    assert store_paths(load_config([], ["run.dir=a"])) == (Path("a/memascend.store"),)
    assert store_paths(load_config([], ["offload.store=[/b, /c]"])) == (Path("/b"), Path("/c"))


def test_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config().train.steps = 3


def test_configuration_and_command_lines_never_import_jax() -> None:
    code = (
        "import sys, memascend_jax.cli, memascend_jax.recipes.llama_finetune as recipe, memascend_jax.config as c;"
        "c.load_config(['tiny_random']); recipe.build_parser().format_help(); memascend_jax.cli.build_parser();"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("placement", ["host", "memory"])
@pytest.mark.parametrize("asked", ["run.resume=required", "offload.durability=step"])
def test_a_run_without_a_store_cannot_be_asked_for_what_only_a_store_gives(
    placement: str, asked: str
) -> None:
    told = faults_of(overrides=(asked, f"offload.placement={placement}"))
    assert asked in told
    assert f"offload.placement={placement} keeps nothing on disk" in told


def test_a_key_that_an_earlier_version_did_not_have_counts_as_its_default() -> None:
    saved = to_dict(load_config())
    del saved["optimizer"]["skip_nonfinite"]
    assert training_changes(saved, load_config()) == []
    changed = load_config(overrides=["optimizer.skip_nonfinite=true"])
    assert [change.key for change in training_changes(saved, changed)] == ["optimizer.skip_nonfinite"]


def test_groups_are_read_back_and_compared() -> None:
    config = load_config(overrides=["optimizer.groups=[{match: norm, weight_decay: 0}, {match: up}]"])
    assert training_changes(to_dict(config), config) == []
    assert [change.key for change in training_changes(to_dict(load_config()), config)] == ["optimizer.groups"]


def test_a_longer_run_and_keys_of_a_random_model_are_told_apart() -> None:
    saved = to_dict(load_config(["tiny_random"], ["train.steps=10"]))
    longer, shorter, epochs = (
        load_config(["tiny_random"], [f"train.{length}"]) for length in ("steps=11", "steps=9", "epochs=2")
    )
    assert [change.grows for change in training_changes(saved, longer)] == [True]
    assert [change.grows for change in training_changes(saved, shorter)] == [False]
    assert [change.grows for change in training_changes(saved, epochs)] == [False, False]
    theta = load_config(["tiny_random"], ["model.config.rope_theta=5e5", "train.steps=10"])
    assert [str(change) for change in training_changes(saved, theta)] == [
        "model.config.rope_theta (10000.0 → 500000.0)"
    ]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("true", ("all",)),
        ("false", ()),
        ("null", ()),
        ("train.seed", ("train.seed",)),
        (
            "[train.seed, optimizer, model.config.rope_theta]",
            ("train.seed", "optimizer", "model.config.rope_theta"),
        ),
    ],
)
def test_keys_that_may_change_are_a_list_or_all(text: str, keys: tuple[str, ...], tmp_path: Path) -> None:
    config = load_config([], [f"run.allow_changed={text}"])
    assert config.run.allow_changed == keys
    assert load_config([write(tmp_path / "config.yaml", to_yaml(config))]) == config


def test_a_key_that_may_change_must_exist() -> None:
    told = faults_of(overrides=("run.allow_changed=[optimizer.lr, train.sed]",))
    assert "run.allow_changed: there is no key 'optimizer.lr'\n" in told + "\n"
    assert "'train.sed'; did you mean 'train.seed'?" in told
    assert (
        "there is no key 'offload.zone'\n"
        in faults_of(overrides=("run.allow_changed=[offload.zone]",)) + "\n"
    )
