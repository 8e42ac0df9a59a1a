# SPDX-License-Identifier: Apache-2.0
"""From files and overrides to one validated ``Config``, or one error that names every fault.

Later sources win: defaults < files in order < ``key=value`` overrides in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from memascend_jax.config.checks import findings
from memascend_jax.config.faults import Fault, KeyPath, Place, config_error, dotted
from memascend_jax.config.messages import fault_message
from memascend_jax.config.schema import Config, section_types
from memascend_jax.config.yaml_source import Source, read_value, read_yaml

COMMAND_LINE = "command line"
_LARGEST_FILE_BYTES = 1 << 20


def load_config(files: Iterable[str | Path] = (), overrides: Iterable[str] = ()) -> Config:
    """Returns the configuration of ``files`` (YAML, or the name of a shipped recipe) under ``overrides``.

    Args:
        files: paths in order, later ones win; ``"tiny_random"`` finds the recipe of that name.
        overrides: ``"train.steps=10"``; a value that starts with ``[``, ``{`` or a quote is read as YAML.

    Raises:
        ConfigError: with all faults at once, each with its place, what was expected and the nearest key.
    """
    sources = [_read_file(str(file)) for file in files] + [_read_override(text) for text in overrides]
    faults = [fault for source in sources for fault in source.faults]
    values: dict[str, Any] = {}
    for source in sources:
        _forget_rivals(values, source.values)
        values = _merged(values, source.values)
    config, more = _validated(values, sources)
    faults += more
    if faults or config is None:
        raise config_error(faults)
    return config


def recipe_path(name: str) -> Path | None:
    """Returns the file of the shipped recipe ``name``, or None."""
    for folder in _recipe_folders():
        path = folder / f"{name.removesuffix('.yaml')}.yaml"
        if path.is_file():
            return path
    return None


def recipe_names() -> list[str]:
    """Returns the names of the recipes that came with the package."""
    return sorted({path.stem for folder in _recipe_folders() for path in folder.glob("*.yaml")})


def _recipe_folders() -> list[Path]:
    package = Path(__file__).resolve().parent.parent
    # Installed, the files lie in the package; in a source tree they lie beside it.
    return [package / "recipes", package.parent / "recipes"]


def _read_file(name: str) -> Source:
    path = Path(name).expanduser()
    is_name = path.parent == Path() and not path.exists()
    found = (recipe_path(name) if is_name else None) or path
    try:
        if found.is_file() and found.stat().st_size > _LARGEST_FILE_BYTES:
            return _unreadable(name, f"is larger than {_LARGEST_FILE_BYTES} bytes; it is not a configuration")
        text = found.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        hint = f"; the shipped recipes are {', '.join(recipe_names())}" if is_name else ""
        return _unreadable(name, f"does not exist{hint}")
    except UnicodeDecodeError as error:
        return _unreadable(name, f"is not UTF-8 text (byte {error.start})")
    except OSError as error:
        return _unreadable(name, f"cannot be read: {error.strerror}")
    return read_yaml(str(found), text)


def _unreadable(name: str, why: str) -> Source:
    return Source(name, faults=[Fault((), f"cannot read the configuration file {name!r}: it {why}")])


def _read_override(text: str) -> Source:
    key, equals, value = text.partition("=")
    key = key.strip()
    place = Place(COMMAND_LINE, 0, 1, len(key) or 1, text)
    path = tuple(key.split("."))
    if not equals or not all(path):
        message = f"expected key=value such as train.steps=10, got {text!r}"
        return Source(COMMAND_LINE, faults=[Fault((), message, Place(COMMAND_LINE))])
    if len(path) == 1 and key in section_types():
        message = f"{key!r} is a section, not a key; set one of its keys, such as {key}.{_first_key(key)}=…"
        return Source(COMMAND_LINE, faults=[Fault(path, message, place)])
    return read_value(COMMAND_LINE, path, value.strip(), place)


def _first_key(section: str) -> str:
    return next(iter(section_types()[section].model_fields))


def _forget_rivals(values: dict[str, Any], newer: dict[str, Any]) -> None:
    # An empty shape replaces that of a recipe, for another model.source, instead of adding nothing to it.
    model = newer.get("model")
    if (
        isinstance(model, dict)
        and model.get("config", True) in (None, {})
        and isinstance(values.get("model"), dict)
    ):
        values["model"]["config"] = {}
    # Steps and epochs exclude each other: the one that a later source sets replaces the other of an earlier
    # one, so that `train.epochs=2` on top of a recipe with steps needs no `train.steps=null` besides.
    train, given = values.get("train"), newer.get("train")
    if not isinstance(train, dict) or not isinstance(given, dict):
        return
    for key, rival in (("epochs", "steps"), ("steps", "epochs")):
        if given.get(key) is not None and rival not in given:
            train[rival] = None


def _merged(base: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in newer.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _validated(values: dict[str, Any], sources: Sequence[Source]) -> tuple[Config | None, list[Fault]]:
    faults: list[Fault] = []
    wrong: set[str] = set()
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        for detail in error.errors():
            path, message, at_key = fault_message(detail)
            faults.append(Fault(path, message, _place(sources, path, at_key)))
            wrong.add(dotted(path))
            values = _without(values, path)
        try:
            # The rest is still checked, so that one report shows everything.
            config = Config.model_validate(values)
        except ValidationError:
            return None, faults
    config = _with_fitting_warmup(config, sources)
    for keys, message in findings(config):
        if not wrong.intersection(keys):
            path = next((p for p in map(_path, keys) if _place(sources, p, False)), _path(keys[0]))
            faults.append(Fault(path, message, _place(sources, path, at_key=False)))
    return config, faults


def _with_fitting_warmup(config: Config, sources: Sequence[Source]) -> Config:
    """Returns ``config``, its warm-up shortened to the run if it is the default or a shipped recipe's.

    `train.steps=1` alone must do; a warm-up that the user chose and that is too long is a contradiction.
    """
    steps, warmup = config.train.steps, config.optimizer.warmup_steps
    chosen = [source for source in sources if ("optimizer", "warmup_steps") in source.value_places]
    if steps is None or warmup <= steps or not all(_is_shipped(source.name) for source in chosen):
        return config
    optimizer = config.optimizer.model_copy(update={"warmup_steps": steps})
    return config.model_copy(update={"optimizer": optimizer})


def _is_shipped(name: str) -> bool:
    """Whether a source is a shipped recipe, or an unchanged copy of it, such as that of the source tree."""
    path = Path(name)
    shipped = recipe_path(path.stem)
    return shipped is not None and path.is_file() and path.read_bytes() == shipped.read_bytes()


def _path(key: str) -> KeyPath:
    return tuple(key.split("."))


def _place(sources: Sequence[Source], path: KeyPath, at_key: bool) -> Place | None:
    """Returns where the value (or key) that won stands: in the last source that has it, or its parent."""
    for depth in range(len(path), 0, -1):
        for source in reversed(sources):
            places = source.key_places if at_key else source.value_places
            if path[:depth] in places:
                return places[path[:depth]]
    return None


def _without(values: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    key = path[0] if path else None
    if not isinstance(key, str) or key not in values:
        return values
    inner = values[key]
    rest = {name: value for name, value in values.items() if name != key}
    if len(path) > 1 and isinstance(inner, dict):
        rest[key] = _without(inner, path[1:])
    return rest
