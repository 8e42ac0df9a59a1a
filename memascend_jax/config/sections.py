# SPDX-License-Identifier: Apache-2.0
"""The sections of the configuration: every key, its type, its default and one sentence with its unit.

The defaults are the default recipe (``recipes/smollm2_135m.yaml``), which a test holds equal.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from memascend_jax.config.values import (
    Count,
    FreeForm,
    KeyNames,
    LossScale,
    Number,
    PathList,
    PathText,
    PositiveCount,
    Size,
    Text,
)

Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Decay = Annotated[Number, Field(ge=0, lt=1)]
RecordKind = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, every field described."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    """Which model is trained and in which precision it computes."""

    source: Text = Field(
        default="smollm2-135m",
        description="smollm2-135m (fetched once, 93 MB), a Hugging Face folder, org/name in Hugging Face's local cache,"
        " a GGUF file, a checkpoint, a store that memascend import made, or random.",
    )
    revision: Text | None = Field(
        default=None,
        description="Branch, tag or commit of a model.source that is in Hugging Face's cache; null: main.",
    )
    config: FreeForm = Field(
        default_factory=dict,
        description="Hugging Face config keys of a random model, as model.config.hidden_size=64;"
        " only with model.source=random.",
    )
    add_tokens: tuple[Text, ...] = Field(
        default=(),
        description="Texts that become tokens of the model, each with a row of its own; they are in the exported"
        " tokenizer too.",
    )
    vocab_size: PositiveCount | None = Field(
        default=None,
        description="Rows of the embedding, and of the head; null: those of the model, or as many as its tokens need.",
    )
    new_rows: Literal["mean", "normal", "zeros"] = Field(
        default="mean",
        description="What added rows begin as: the mean of the model's rows, normal (drawn with mean and deviation of"
        " each column), or zeros.",
    )
    compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Element type of activations and matrix products; auto: bfloat16."
    )


class DataSource(Section):
    """One of several sources of examples."""

    path: Text = Field(description="As data.source: a file, a folder, a pattern of names, or pydocs.")
    weight: Annotated[Number, Field(gt=0)] | None = Field(
        default=None,
        description="Its share of the sequences, in proportion to the other weights; without weights every source is"
        " as large as it is.",
    )
    kind: RecordKind | None = Field(default=None, description="As data.kind; null: data.kind.")


class DataSection(Section):
    """What the model learns from."""

    source: Text = Field(
        default="pydocs",
        description="pydocs (questions on the installed Python standard library); a file of JSONL, JSON, Parquet, Arrow"
        " or plain text (.txt, .md), also as .gz; a folder of them, or one that datasets saved; a pattern such as"
        " data/*.jsonl; or random tokens.",
    )
    sources: tuple[DataSource, ...] = Field(
        default=(),
        description="List of {path, weight, kind}: several sources, with their shares, instead of data.source.",
    )
    kind: RecordKind = Field(
        default="auto",
        description="Kind of the records, where their keys do not tell it: messages, sharegpt, alpaca,"
        " prompt_completion or text; auto: by their keys.",
    )
    eval_source: Text | None = Field(
        default=None,
        description="Held-out examples, as data.source; null: a part of what is trained on is held out.",
    )
    eval_fraction: Annotated[Number, Field(ge=0, lt=1)] = Field(
        default=0.1,
        description="Share of data.source that is held out, 0 to 1; unused with data.eval_source.",
    )
    eval_sequences: PositiveCount | None = Field(
        default=6,
        description="Most sequences of data.seq_len tokens that an evaluation reads; null: all.",
    )
    seq_len: Annotated[PositiveCount, Field(ge=2)] = Field(
        default=256,
        description="Tokens per sequence; short examples are packed together, each sees only itself.",
    )
    too_long: Literal["cut", "cut_right", "cut_left", "drop"] = Field(
        default="cut",
        description="What happens to an example of more than data.seq_len tokens, counted in any case: cut (a text is"
        " cut into sequences, anything else keeps its beginning), cut_right (all keep their beginning), cut_left"
        " (all keep their end) or drop.",
    )
    packing: bool = Field(
        default=True,
        description="Pack several examples into a sequence, each seeing only itself; false: one in each, the rest is"
        " padding.",
    )
    length_grouping: bool = Field(
        default=False,
        description="Put examples of about one length into one micro-batch; only with packing=false.",
    )
    chat_template: Text | None = Field(
        default=None,
        description="Chat template: chatml, llama3, mistral, qwen, gemma, or the path of a .jinja file; null: the"
        " model's. The exported model has it too.",
    )
    train_on: Literal["all", "last"] = Field(
        default="all", description="Which answers of a conversation are trained: all, or the last."
    )
    system_prompt: Text | None = Field(
        default=None, description="System message of conversations that have none; null: they stay without."
    )
    bad_records: Literal["refuse", "skip"] = Field(
        default="refuse",
        description="What happens when a record is broken or of no known kind: refuse (the run ends, with file and"
        " line), or skip (it is left out and counted).",
    )
    stream: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether data is read beside the training instead of held in memory; auto: sources of more than"
        " 64 MiB of text.",
    )
    cache: Text = Field(
        default="auto",
        description="Folder in which tokens are kept for other runs and epochs; auto: token_cache in run.dir, for"
        " streamed data; off: none.",
    )


class TrainSection(Section):
    """How long and in which portions the model is trained."""

    steps: PositiveCount | None = Field(
        default=14, description="Optimizer steps of the run; null when train.epochs says how long."
    )
    epochs: Positive | None = Field(
        default=None,
        description="Passes over the training data, may be a fraction; instead of train.steps.",
    )
    micro_batch_size: PositiveCount = Field(
        default=1, description="Sequences that go through a stage at once."
    )
    gradient_accumulation_steps: PositiveCount = Field(
        default=1, description="Micro-batches per optimizer step."
    )
    seed: Annotated[Count, Field(lt=2**32)] = Field(
        default=0, description="Seed of the data order, of random data and of a random model."
    )
    eval_every: Count = Field(
        default=0,
        description="Steps between evaluations during the run; 0: never. Before and after it always runs.",
    )
    samples: Count = Field(
        default=1,
        description="Held-out questions answered by the model before and after training; 0: none.",
    )


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


class ParameterGroup(Section):
    """Parameters that are trained differently from the rest."""

    match: Annotated[Text, AfterValidator(_expression)] = Field(
        description="Regular expression found in the tensor's Hugging Face name."
    )
    learning_rate: NotNegative | None = Field(
        default=None, description="Peak learning rate; null: the run's."
    )
    weight_decay: NotNegative | None = Field(default=None, description="Weight decay; null: the run's.")
    frozen: bool = Field(
        default=False,
        description="Not trained at all: read-only on SSD, without state, gradient or a write.",
    )


class LoraSection(Section):
    """LoRA adapters: the model's own tensors stay as they are, and small factors beside them are trained."""

    rank: Count = Field(
        default=0, description="Rank r of the adapters; 0: none, the model's own tensors are trained."
    )
    alpha: Positive | None = Field(
        default=None,
        description="The adapters' output is multiplied by alpha / rank; null: twice the rank.",
    )
    targets: tuple[Annotated[Text, AfterValidator(_expression)], ...] = Field(
        default=(),
        description="Linear layers with an adapter: names such as q_proj or self_attn.q_proj, regular expressions for"
        " the whole name, or all-linear; empty: queries and values (q_proj and v_proj, or qkv_proj).",
    )
    rslora: bool = Field(
        default=False, description="Multiply by alpha / sqrt(rank) instead (rank-stabilised LoRA)."
    )
    init: Literal["kaiming", "gaussian"] = Field(
        default="kaiming",
        description="What factor A begins as, drawn by train.seed: kaiming (uniform up to 1 / sqrt(inputs), PEFT's"
        " default), or gaussian (deviation 1 / rank). B begins as zeros.",
    )
    dropout: NotNegative = Field(
        default=0.0, description="Dropout before the adapters; only 0 is there in this version."
    )
    source: PathText | None = Field(
        default=None, description="Folder of a PEFT adapter that the training begins with; null: a new one."
    )


class OptimizerSection(Section):
    """The optimizer, its schedule and the form its state has on disk."""

    name: Literal["adamw"] = Field(default="adamw", description="The optimizer.")
    groups: tuple[ParameterGroup, ...] = Field(
        default=(),
        description="List of {match, learning_rate, weight_decay} or {match, frozen: true}: settings by tensor name,"
        " the first whose match (a regular expression) is found in the name wins.",
    )
    learning_rate: Positive = Field(default=1.5e-4, description="Peak learning rate, per step.")
    layer_decay: Annotated[Number, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Layer-wise decay d of the learning rate: of L layers, layer i (from 0) learns with d^(L-i) times"
        " its rate, the embedding with d^(L+1), tied or not, final norm and head with 1; null: none.",
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine",
        description="Course of the learning rate after the warm-up; cosine and linear end at 0.",
    )
    warmup_steps: Count = Field(
        default=2,
        description="Steps over which the learning rate rises from 0; unless set, no more than train.steps.",
    )
    b1: Decay = Field(default=0.9, description="Decay of the first moment per step.")
    b2: Decay = Field(default=0.999, description="Decay of the second moment per step.")
    eps: Positive = Field(default=1e-8, description="Added to the root of the second moment.")
    weight_decay: NotNegative = Field(
        default=0.0, description="Decoupled weight decay, multiplied by the learning rate, per step."
    )
    clip_norm: Positive | None = Field(
        default=1.0,
        description="Largest global norm of the gradient, above which it is scaled down; null: none.",
    )
    log_norms: bool = Field(
        default=False,
        description="Write the gradient's norm of the embedding, of each layer and of the head to metrics.jsonl.",
    )
    log_noise_scale: bool = Field(
        default=False,
        description="Write the gradient noise scale to metrics.jsonl, in trained tokens; needs"
        " train.gradient_accumulation_steps of 2 or more.",
    )
    state_format: Literal["fp32", "split", "split_bf16", "bf16", "int8"] = Field(
        default="fp32", description="Form of the parameters' masters and moments on disk."
    )
    loss_scale: LossScale = Field(
        default=None,
        description="Factor on the loss for float16: dynamic (halved when a gradient overflows, doubled after 2,000"
        " good steps), a number, or null: dynamic with float16.",
    )
    skip_nonfinite: bool = Field(
        default=False,
        description="Skip and count a step whose loss or gradient is inf or nan, instead of ending the run;"
        " with float16 always.",
    )


class OffloadSection(Section):
    """Where the training state lives and what it may use."""

    store: PathList = Field(
        default=(),
        description="Paths of the store, one per SSD: files, folders or block devices;"
        " empty: memascend.store in run.dir.",
    )
    host_memory: Size | None = Field(
        default=None,
        description="Most memory the whole process may have resident, as 1.2GiB or bytes;"
        " null: what is available at the start.",
    )
    device_memory: Size | None = Field(
        default=None,
        description="Not there yet: a value is refused. Most device memory the run may use, as 8GiB or bytes;"
        " null: what the device has.",
    )
    placement: Literal["plan", "ssd", "host", "memory"] = Field(
        default="plan",
        description="Home of the training state: ssd, host (all of it in pinned memory, nothing on disk"
        " before the export), memory (the same, one thing after the other: the reference), or plan: ssd,"
        " with as much cached as the budget holds.",
    )
    update: Literal["plan", "exact", "in_backward"] = Field(
        default="plan",
        description="When the optimizer runs: exact (after the global norm is known), in_backward, or plan.",
    )
    durability: Literal["plan", "step", "checkpoint"] = Field(
        default="plan",
        description="step: every step survives a crash, for twice the disk space; checkpoint: only"
        " checkpoints do; plan: step when the disk has room.",
    )
    io_backend: Literal["auto", "io_uring", "threads"] = Field(
        default="auto",
        description="How the disk is read and written; auto: io_uring where the kernel allows it.",
    )
    direct_io: Literal["required", "optional", "off"] = Field(
        default="required",
        description="O_DIRECT, without which the page cache grows: required, optional"
        " (fall back and say so), or off.",
    )


class CheckpointSection(Section):
    """Copies of the state besides the store, which orbax and tensorstore read too."""

    every: Count | None = Field(default=0, description="Steps between checkpoints; 0 or null: none.")
    keep: PositiveCount = Field(default=2, description="Newest checkpoints that are kept.")
    keep_best: Count = Field(
        default=0,
        description="Checkpoints of the lowest held-out loss that are kept besides; needs train.eval_every.",
    )
    dir: PathText | None = Field(
        default=None,
        description="Folder of the checkpoints, for one run alone; null: checkpoints in run.dir.",
    )


class RunSection(Section):
    """The run itself: its folder, how it goes on, what it leaves."""

    dir: PathText = Field(
        default="runs/smollm2_135m",
        description="Folder of the run's files: config, plan, metrics, store, export.",
    )
    resume: Literal["auto", "never", "required"] = Field(
        default="auto",
        description="Go on with an unfinished run found in run.dir: auto, never, or required.",
    )
    restore: Text | None = Field(
        default=None,
        description="Checkpoint that a new run begins with, moments and step included: a folder of steps"
        " (the newest), one step's folder, or a step of checkpoint.dir.",
    )
    allow_changed: KeyNames = Field(
        default=(),
        description="Keys that change the training and may differ from the saved ones in a resume,"
        " as [optimizer.learning_rate]; true: any.",
    )
    deterministic: bool = Field(
        default=False, description="Ask XLA for results that repeat bit for bit on a GPU."
    )
    trace: bool = Field(
        default=False, description="Write trace.json, a timeline of reads, writes, stages, tiles and waits."
    )
    trace_gzip: bool = Field(default=False, description="Compress the timeline: trace.json.gz.")
    meter_seconds: Positive = Field(
        default=0.25, description="Time between the samples of memory in meter.jsonl, in seconds."
    )
    export: bool = Field(default=True, description="Write export/, a Hugging Face folder, at the end.")
