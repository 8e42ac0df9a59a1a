# SPDX-License-Identifier: Apache-2.0
"""A store's description and the outcome of a check as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from memascend_jax.units import counted, format_bytes


def store_tables(facts: Mapping[str, Any]) -> list[Table]:
    """Returns what the store is, its members, and its tensors; ``facts`` as ``TensorStore.inspect`` gives them."""
    tables = [_facts(facts), *_run(facts.get("run")), _members(facts["members"]), _tensors(facts["tensors"])]
    if "endurance" in facts:
        tables.insert(len(tables) - 1, _endurance(facts["endurance"]))
    return tables


def verify_table(facts: Mapping[str, Any]) -> Table:
    """Returns what a check has read and how many faults it found."""
    faults = len(facts["faults"])
    result = [counted(faults, "fault", "faults")] if faults else []
    if facts["dirty"]:
        result.append("overwritten in place after the last commit")
    return _pairs(
        "verified",
        [
            ("generation", f"{facts['generation']}"),
            ("tensors", f"{facts['tensors']:,}"),
            ("tiles", f"{facts['tiles']:,}"),
            ("read", format_bytes(facts["bytes"])),
            ("result", ", ".join(result) or "every checksum matches"),
        ],
    )


def _facts(facts: Mapping[str, Any]) -> Table:
    created = datetime.fromtimestamp(facts["created_s"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return _pairs(
        "store",
        [
            ("id", facts["store_id"]),
            ("created", created),
            ("generation", f"{facts['generation']}"),
            ("state", "overwritten after the last commit" if facts["dirty"] else "committed"),
            ("durability", facts["durability"]),
            ("used", f"{format_bytes(facts['used_bytes'])} of {format_bytes(facts['capacity_bytes'])}"),
            ("I/O", "; ".join(_rungs(facts))),
            ("written so far", format_bytes(facts["bytes_written"])),
        ],
    )


def _run(run: Mapping[str, Any] | None) -> list[Table]:
    if run is None:
        return []
    return [
        _pairs(
            "training run",
            [
                ("step", f"{run['step']}" + (", complete" if run["finished"] else "")),
                ("state format", f"{run['state_format']}, compute dtype {run['compute_dtype']}"),
                ("model", run["model"]),
                ("folder", run["run_dir"]),
            ],
        )
    ]


def _rungs(facts: Mapping[str, Any]) -> list[str]:
    """Returns the engine in use, and each fallback with its reason."""
    falls = [f"{f['used']} instead of {f['wanted']} ({f['reason']})" for f in facts["fallbacks"]]
    return falls or [facts["io_backend"]]


def _members(members: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("members", "path", "kind", "size", "weight", "I/O")
    for member in members:
        kind = "block device" if member["block_device"] else f"file on {member['file_system']}"
        io = "direct" if member["direct"] else "page cache"
        size = format_bytes(member["bytes"])
        table.add_row(Text(member["path"]), Text(kind), size, f"{member['weight']}", io)
    return table


def _endurance(members: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("endurance", "path", "written", "rated", "used", "per day", "left at this pace")
    for member in members:
        days = member["days_left"]
        table.add_row(
            Text(member["path"]),
            format_bytes(member["bytes_written"]),
            format_bytes(member["rated_bytes"]),
            f"{100 * member['used']:.3g} %",
            format_bytes(member["bytes_per_day"]) if days is not None else "",
            f"{days / 365.25:,.1f} years" if days is not None else "too early to say",
        )
    return table


def _tensors(tensors: Sequence[Mapping[str, Any]]) -> Table:
    """One row per parameter; its optimizer state, ``name#leaf``, is summed up beside it."""
    leaves: dict[str, list[Mapping[str, Any]]] = {}
    for tensor in tensors:
        leaves.setdefault(tensor["name"].partition("#")[0], []).append(tensor)
    table = _table(f"tensors ({len(tensors)})", "name", "dtype", "shape", "size", "tiles", "state")
    for name, group in leaves.items():
        own = next((tensor for tensor in group if tensor["name"] == name), group[0])
        rest = [tensor for tensor in group if tensor is not own]
        shape = "x".join(map(str, own["shape"])) or "scalar"
        cells = (own["name"], own["dtype"], shape, _size([own]), f"{own['tiles']}", _state(rest))
        table.add_row(*map(Text, cells))
    return table


def _state(tensors: Sequence[Mapping[str, Any]]) -> str:
    names = ", ".join(tensor["name"].partition("#")[2] for tensor in tensors)
    return f"{names}  {_size(tensors)}" if tensors else ""


def _size(tensors: Sequence[Mapping[str, Any]]) -> str:
    if not any(tensor["written"] for tensor in tensors):
        return "not written"
    return format_bytes(sum(tensor["bytes"] for tensor in tensors))


def _pairs(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column()
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
