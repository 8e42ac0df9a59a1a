# SPDX-License-Identifier: Apache-2.0
"""``memascend import|export`` and ``memascend store convert|resize-vocab``: arguments and output only."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memascend_jax.observe.output import print_json

#: Adds one command: (subparsers, name, function, help) -> its parser.
AddCommand = Callable[[Any, str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add_import_command(commands: Any, add: AddCommand) -> None:
    """Adds ``import``."""
    parser = add(commands, "import", _import, "puts a model into a store of its own, byte for byte")
    parser.add_argument(
        "source",
        metavar="MODEL",
        help="Hugging Face folder, org/name in Hugging Face's local cache, GGUF file, or smollm2-135m; not changed",
    )
    parser.add_argument(
        "paths", metavar="STORE", nargs="+", help="paths of the store to make, one per member; must not exist"
    )
    _add_dtype(parser, "what the weights are rounded to; default: as they are")
    _add_revision(parser)


def add_export_command(commands: Any, add: AddCommand) -> None:
    """Adds ``export``."""
    parser = add(
        commands, "export", _export, "writes a model as a Hugging Face folder, which must not exist yet"
    )
    parser.add_argument(
        "paths",
        metavar="SOURCE",
        nargs="+",
        help="a run's folder, its store (one path per member), a checkpoint, a store that import made, a Hugging Face "
        "folder or org/name in its cache, a GGUF file; and behind it the folder to make, DIR, unless --out says it",
    )
    parser.add_argument("--out", metavar="DIR", help="folder to make; must not exist")
    _add_dtype(
        parser,
        "type of the weights, rounded from a run's masters, exact for float32; default: as they are kept",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help="such as 5GB: a larger model is written in several files; default: the files that it came in, else 5GB",
    )
    parser.add_argument(
        "--step", metavar="N", type=int, help="which step of a checkpoint; default: the newest"
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="of a LoRA run the whole model, its adapters added to the weights; default: a PEFT folder of the adapters",
    )
    _add_revision(parser)


def _add_dtype(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help=text)


def _add_revision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--revision", metavar="R", help="branch, tag or commit of a model in the cache; default: main"
    )


def add_store_changes(verbs: Any, add: AddCommand) -> None:
    """Adds the verbs of ``store`` that write a store's contents once more, changed."""
    convert = add(
        verbs, "convert", _convert, "puts a run's state in another state format, from which the run goes on"
    )
    convert.add_argument(
        "--state-format",
        required=True,
        metavar="FORMAT",
        help="fp32, split, split_bf16, bf16 or int8: fp32 and split become each other bit for bit; the others hold "
        "less, rounded without bias",
    )
    _add_into(convert)

    resize = add(
        verbs,
        "resize-vocab",
        _resize,
        "gives a model, of a run or alone, more tokens or another size of vocabulary",
    )
    resize.add_argument(
        "--size",
        metavar="N",
        type=int,
        help="rows of the embedding, and of the head; default: those there are and as many as the tokens need",
    )
    resize.add_argument(
        "--add-token",
        metavar="TEXT",
        action="append",
        default=[],
        help="a text that becomes a token; once per token",
    )
    resize.add_argument(
        "--init",
        choices=("mean", "normal", "zeros"),
        default="mean",
        help="what new rows begin as: the mean of the old ones (default), normal with the mean and deviation of each "
        "column, or zeros; moments are zero",
    )
    _add_into(resize)


def _add_into(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--into",
        metavar="PATH",
        action="append",
        help="path of the new store, once per member, with the old one kept; without it the old one, if it is one "
        "file, is replaced when the new one is whole. There must be room for both either way",
    )


def _import(options: argparse.Namespace) -> int:
    from memascend_jax.observe.screen import Screen
    from memascend_jax.recipes.model_import import import_model

    with Screen() as screen:
        facts = import_model(options.source, options.paths, options.dtype, screen, options.revision)
    return _report(
        options,
        facts,
        f"{', '.join(facts['paths'])} holds the model of {facts['parameters']:,} parameters; to train it: "
        f"model.source={facts['paths'][0]}",
    )


def _export(options: argparse.Namespace) -> int:
    from memascend_jax.errors import ConfigError
    from memascend_jax.observe.screen import Screen
    from memascend_jax.recipes.store_export import export_model
    from memascend_jax.store_commands import size_option

    *paths, last = options.paths
    out = options.out or last
    paths = options.paths if options.out else paths
    if not paths:
        raise ConfigError(
            f"cannot export '{last}': the folder to make is missing; memascend export {last} DIR"
        )
    size = None
    if options.max_shard_size is not None:
        size = size_option(options.max_shard_size, "--max-shard-size")
        if size <= 0:
            raise ConfigError(f"--max-shard-size: a file has at least a byte, got {options.max_shard_size}")
    with Screen() as screen:
        facts = export_model(
            paths,
            Path(out).expanduser(),
            screen,
            dtype=options.dtype,
            max_shard_bytes=size,
            step=options.step,
            revision=options.revision,
            merge=options.merge,
        )
    is_adapter = facts.get("adapter", False)
    step = (
        f", the {'adapter' if is_adapter else 'model'} after step {facts['step']}" if "step" in facts else ""
    )
    return _report(
        options,
        facts,
        f"wrote {facts['path']}, {facts['bytes']:,} bytes of {facts['dtype']}{step}"
        + ("; --merge writes the whole model" if is_adapter else ""),
    )


def _convert(options: argparse.Namespace) -> int:
    from memascend_jax.observe.screen import Screen
    from memascend_jax.recipes.store_convert import convert_store

    with Screen() as screen:
        facts = convert_store(options.paths, options.state_format, options.into, screen)
    return _report(
        options,
        facts,
        f"{', '.join(facts['paths'])} holds the run at step {facts['step']} in state format {facts['to']}; to go on: "
        f"optimizer.state_format={facts['to']}" + _store_hint(options),
    )


def _resize(options: argparse.Namespace) -> int:
    from memascend_jax.errors import ConfigError
    from memascend_jax.observe.screen import Screen
    from memascend_jax.recipes.store_vocabulary import resize_vocabulary

    if options.size is not None and options.size < 1:
        raise ConfigError(f"--size: a vocabulary has at least one token, got {options.size}")
    with Screen() as screen:
        facts = resize_vocabulary(
            options.paths, options.size, options.add_token, options.init, options.into, screen
        )
    settings = " ".join(map(shlex.quote, facts["settings"]))
    return _report(
        options,
        facts,
        f"{', '.join(facts['paths'])} has a vocabulary of {facts['rows']:,}, before {facts['rows_before']:,}"
        + (f"; to go on: {settings}{_store_hint(options)}" if settings else ""),
    )


def _store_hint(options: argparse.Namespace) -> str:
    return f" offload.store=[{','.join(options.into)}]" if options.into else ""


def _report(options: argparse.Namespace, facts: dict[str, Any], text: str) -> int:
    if options.json:
        print_json(facts)
    else:
        sys.stderr.write(f"memascend: {text}\n")
    return 0
