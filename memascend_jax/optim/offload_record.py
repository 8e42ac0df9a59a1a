# SPDX-License-Identifier: Apache-2.0
"""What a commit keeps of offloaded states in the store's run state: the numbers of each handle, by name.

JSON, beside whatever the user keeps there. Values are exact: the bytes of each number, in hexadecimal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from memascend_jax.dtypes import to_dtype
from memascend_jax.optim.offload_handle import is_key

_KEY = "memascend_offload"
_USER = "user"
#: Before the name of the generator, where a value is a typed random key.
_KEY_PREFIX = "key:"


@dataclass(frozen=True, slots=True)
class StateRecord:
    """A handle's numbers at a commit: ``values`` by the path of each in the transform's state."""

    version: int
    skipped: int
    values: Mapping[str, Any]


def user_bytes(run_state: bytes) -> bytes:
    """Returns what the user keeps in a store's run state."""
    found = _parsed(run_state)
    return run_state if found is None else bytes.fromhex(found.get(_USER, ""))


def record_of(run_state: bytes, name: str) -> StateRecord | None:
    """Returns the record of the state called ``name``, or None when the run state has none."""
    found = (_parsed(run_state) or {}).get(_KEY, {}).get(name)
    if found is None:
        return None
    values = {path: _decoded(*value) for path, value in found["values"].items()}
    return StateRecord(int(found["version"]), int(found["skipped"]), values)


def with_record(run_state: bytes, name: str, record: StateRecord, user: bytes | None = None) -> bytes:
    """Returns ``run_state`` with the record of ``name`` replaced; ``user`` None keeps the user's bytes."""
    states = dict((_parsed(run_state) or {}).get(_KEY, {}))
    states[name] = {
        "version": record.version,
        "skipped": record.skipped,
        "values": {path: _encoded(value) for path, value in record.values.items()},
    }
    kept = user_bytes(run_state) if user is None else user
    return json.dumps({_KEY: states, _USER: kept.hex()}, separators=(",", ":")).encode()


def _parsed(run_state: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(run_state)
    except ValueError:
        return None
    return found if isinstance(found, dict) and _KEY in found else None


def _encoded(value: Any) -> list[Any]:
    if is_key(value.dtype):
        _, shape, data = _encoded(np.asarray(jax.random.key_data(value)))
        return [_KEY_PREFIX + str(jax.random.key_impl(value)), shape, data]
    array = np.asarray(value)
    return [array.dtype.name, list(array.shape), array.tobytes().hex()]


def _decoded(dtype: str, shape: list[int], data: str) -> Any:
    if dtype.startswith(_KEY_PREFIX):
        return jax.random.wrap_key_data(_decoded("uint32", shape, data), impl=dtype.removeprefix(_KEY_PREFIX))
    return np.frombuffer(bytes.fromhex(data), to_dtype(dtype)).reshape(shape).copy()
