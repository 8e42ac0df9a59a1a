# SPDX-License-Identifier: Apache-2.0
"""Settings that contradict each other, and settings this version does not have yet.

Each check returns the keys it is about and a sentence naming them, so that a report can point at the line.
"""

from __future__ import annotations

from collections.abc import Iterator

from memascend_jax.config.faults import ELSEWHERE, nearest
from memascend_jax.config.schema import Config, fields, section_types
from memascend_jax.config.values import ALL
from memascend_jax.models.hf_config import config_faults, known_keys
from memascend_jax.models.model_config import ModelConfig

Finding = tuple[tuple[str, ...], str]


def findings(config: Config) -> Iterator[Finding]:
    """Yields every contradiction in ``config``: the keys involved, the first to point at, and a sentence."""
    yield from _unavailable(config)
    yield from _model_and_data(config)
    yield from _length(config)
    yield from _lora(config)
    yield from _optimizer(config)
    yield from _offload(config)
    yield from _checkpoint(config)
    yield from _allowed(config)


def _unavailable(config: Config) -> Iterator[Finding]:
    if config.offload.device_memory is not None:
        yield (
            ("offload.device_memory",),
            "offload.device_memory is not available in this version, nothing would obey it; use null",
        )


def _model_and_data(config: Config) -> Iterator[Finding]:
    model, data = config.model, config.data
    is_random = model.source == "random"
    if is_random and not model.config:
        yield (
            ("model.source", "model.config"),
            "model.source=random needs the model's shape: set model.config.hidden_size and the other keys",
        )
    if model.config and not is_random:
        yield (
            ("model.config", "model.source"),
            f"model.config is only for model.source=random, but model.source is {model.source!r},"
            " whose shape comes with it; remove model.config",
        )
    if is_random and (data.source != "random" or data.sources):
        key = "data.sources" if data.sources else "data.source"
        yield (
            (key, "model.source"),
            f"{f'data.source={data.source}' if key == 'data.source' else key} needs a tokenizer, which"
            " model.source=random has not; use random data too",
        )
    if is_random and (model.add_tokens or model.vocab_size is not None):
        key = "add_tokens" if model.add_tokens else "vocab_size"
        yield (
            (f"model.{key}", "model.source"),
            f"model.{key} is for a model that is read; of model.source=random set model.config.vocab_size",
        )
    if model.revision is not None and "/" not in model.source:
        yield (
            ("model.revision", "model.source"),
            f"model.revision is for a model in Hugging Face's cache, named as org/name, but model.source is"
            f" {model.source!r}; leave it out",
        )
    if data.eval_source is not None and data.source == "random":
        yield ("data.eval_source", "data.source"), "data.eval_source cannot go with data.source=random"
    yield from _data(config)
    if is_random and model.config:
        yield from _random_model(config)


def _data(config: Config) -> Iterator[Finding]:
    data = config.data
    if data.sources and data.source != type(data)().source:
        yield (
            ("data.source", "data.sources"),
            f"data.source={data.source} and data.sources are both set; leave one out",
        )
    with_weight = [entry.weight is not None for entry in data.sources]
    if any(with_weight) and not all(with_weight):
        number = with_weight.index(False)
        yield (
            ("data.sources",),
            f"data.sources[{number}] ({data.sources[number].path}) has no weight, but others have; give one to all of"
            " them, or to none",
        )
    if any(entry.path == "random" for entry in data.sources):
        yield ("data.sources",), "data.sources cannot hold random data; it is only for data.source"
    if data.length_grouping and data.packing:
        yield (
            ("data.length_grouping", "data.packing"),
            "data.length_grouping is of no use for packed examples, which fill their sequences; set data.packing=false"
            " with it, or leave it out",
        )


def _random_model(config: Config) -> Iterator[Finding]:
    shape, seq_len = config.model.config, config.data.seq_len
    known = known_keys(shape)
    for key in sorted(shape.keys() - known):
        close = nearest(key, sorted(known))
        hint = (
            f"did you mean 'model.config.{close}'?" if close else "it is none of such a model's config.json"
        )
        yield (f"model.config.{key}",), f"unknown key 'model.config.{key}'; {hint}"
    faults = config_faults(shape)
    for fault in faults:
        # Most sentences begin with the key that they are about.
        yield (f"model.config.{fault.split()[0]}",), f"model.config: {fault}"
    positions = 0 if faults else ModelConfig.from_hf(shape).max_position_embeddings
    if 0 < positions < seq_len:
        yield (
            ("data.seq_len", "model.config.max_position_embeddings"),
            f"data.seq_len={seq_len} is more than the model's {positions} positions"
            " (model.config.max_position_embeddings)",
        )


def _length(config: Config) -> Iterator[Finding]:
    train, data = config.train, config.data
    if (train.steps is None) == (train.epochs is None):
        how = "both are" if train.steps is not None else "neither is"
        yield ("train.epochs", "train.steps"), f"one of train.steps and train.epochs must be set, {how}"
    if train.steps is not None and config.optimizer.warmup_steps > train.steps:
        yield (
            ("optimizer.warmup_steps", "train.steps"),
            f"optimizer.warmup_steps={config.optimizer.warmup_steps} is more than train.steps={train.steps}",
        )
    if train.eval_every and data.eval_source is None and data.eval_fraction == 0:
        yield (
            ("train.eval_every", "data.eval_fraction"),
            "train.eval_every needs held-out data: set data.eval_fraction or data.eval_source",
        )


def _lora(config: Config) -> Iterator[Finding]:
    lora, model = config.lora, config.model
    if lora.dropout:
        yield (
            ("lora.dropout",),
            f"lora.dropout={lora.dropout:g} is not available in this version: a layer is computed once more in the"
            " backward, and must be the same then; use 0",
        )
    if not lora.rank:
        defaults = type(lora)()
        without = [key for key in type(lora).model_fields if getattr(lora, key) != getattr(defaults, key)]
        for key in sorted(set(without) - {"rank", "dropout"}):
            yield (
                (f"lora.{key}", "lora.rank"),
                f"lora.{key} is set, but lora.rank=0 makes no adapters; set lora.rank, or leave lora.{key} out",
            )
        return
    for key in ("add_tokens", "vocab_size"):
        if getattr(model, key):
            yield (
                (f"model.{key}", "lora.rank"),
                f"model.{key} changes the embedding, which is not trained beside adapters (lora.rank={lora.rank}), and"
                " no adapter could be loaded beside the model as it was; make the larger model first (memascend import,"
                " memascend store resize-vocab, memascend export), and give that as model.source",
            )


def _optimizer(config: Config) -> Iterator[Finding]:
    optimizer, compute = config.optimizer, config.model.compute_dtype
    for index, group in enumerate(optimizer.groups):
        for key in ("learning_rate", "weight_decay"):
            if group.frozen and getattr(group, key) is not None:
                yield (
                    ("optimizer.groups",),
                    f"optimizer.groups[{index}] is frozen: true, but has a {key}, which nothing would obey; leave one"
                    " of the two out",
                )
    if optimizer.log_noise_scale and config.train.gradient_accumulation_steps < 2:
        yield (
            ("optimizer.log_noise_scale", "train.gradient_accumulation_steps"),
            "optimizer.log_noise_scale compares the gradients of micro-batches with their sum, and needs"
            " train.gradient_accumulation_steps of 2 or more, not 1",
        )
    if optimizer.loss_scale is not None and compute != "float16":
        yield (
            ("optimizer.loss_scale", "model.compute_dtype"),
            f"optimizer.loss_scale is for model.compute_dtype=float16, which is {compute}",
        )
    if compute in ("float16", "float32") and optimizer.state_format != "fp32":
        yield (
            ("optimizer.state_format", "model.compute_dtype"),
            f"model.compute_dtype={compute} needs optimizer.state_format=fp32, not {optimizer.state_format},"
            " whose parameters are bfloat16",
        )


def _offload(config: Config) -> Iterator[Finding]:
    offload, optimizer = config.offload, config.optimizer
    coupled = [
        key
        for key, is_on in (
            ("optimizer.clip_norm", optimizer.clip_norm is not None),
            ("optimizer.loss_scale", optimizer.loss_scale is not None),
            ("optimizer.skip_nonfinite", optimizer.skip_nonfinite),
        )
        if is_on
    ]
    if offload.update == "in_backward" and coupled:
        need, them = ("needs", "it") if len(coupled) == 1 else ("need", "them")
        how = " (clip_norm: null)" if "optimizer.clip_norm" in coupled else ""
        yield (
            ("offload.update", *coupled),
            f"offload.update=in_backward cannot wait for {' and '.join(coupled)}, which {need} the whole gradient"
            f" before the first update; leave {them} out{how} or use offload.update=exact",
        )
    if offload.update == "in_backward" and config.model.compute_dtype == "float16":
        yield (
            ("offload.update", "model.compute_dtype"),
            "offload.update=in_backward does not go with model.compute_dtype=float16, where a step with an overflow"
            " is skipped: that is known only when the last gradient is there; use offload.update=exact",
        )
    if offload.placement in ("host", "memory"):
        where = f"offload.placement={offload.placement} keeps nothing on disk"
        if config.run.resume == "required":
            yield (
                ("run.resume", "offload.placement"),
                f"run.resume=required needs a run on disk to go on with, but {where}; use offload.placement=ssd",
            )
        if offload.durability in ("step", "checkpoint"):
            yield (
                ("offload.durability", "offload.placement"),
                f"offload.durability={offload.durability} is about a store, but {where}; leave it out, or use"
                " offload.placement=ssd",
            )
    if len(set(offload.store)) != len(offload.store):
        twice = next(path for path in offload.store if offload.store.count(path) > 1)
        yield ("offload.store",), f"offload.store names {twice!r} twice; each path is another SSD"


def _allowed(config: Config) -> Iterator[Finding]:
    known = [key for key, _ in fields()]
    for name in config.run.allow_changed:
        if name in (ALL, *section_types(), *known) or name.startswith("model.config."):
            continue
        # By the last part: the section, which is most of the name, would make everything in it near.
        section, _, word = name.rpartition(".")
        last = nearest(word, [key.partition(".")[2] for key in known if key.startswith(f"{section}.")])
        last = last or nearest(word, [key.partition(".")[2] for key in known], likeness=ELSEWHERE)
        close = nearest(name, [key for key in known if key.partition(".")[2] == last])
        hint = f"; did you mean {close!r}?" if close else ""
        yield ("run.allow_changed",), f"run.allow_changed: there is no key {name!r}{hint}"


def _checkpoint(config: Config) -> Iterator[Finding]:
    checkpoint, every = config.checkpoint, config.train.eval_every
    if checkpoint.keep_best and not checkpoint.every:
        yield (
            ("checkpoint.keep_best", "checkpoint.every"),
            "checkpoint.keep_best keeps checkpoints, but checkpoint.every saves none: set checkpoint.every",
        )
    elif checkpoint.keep_best and (not every or (checkpoint.every or 0) % every):
        yield (
            ("checkpoint.keep_best", "train.eval_every", "checkpoint.every"),
            f"checkpoint.keep_best needs the held-out loss of every checkpoint: checkpoint.every={checkpoint.every}"
            f" must be a multiple of train.eval_every, which is {every}",
        )
