# SPDX-License-Identifier: Apache-2.0
"""What a commit keeps of an offloaded state in the store's records: the numbers of its handle, and what it is of.

Fit for JSON. Values are exact: the bytes of each number, in hexadecimal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from memascend_jax.dtypes import to_dtype
from memascend_jax.optim.offload_handle import is_key

#: Before the name of the generator, where a value is a typed random key.
_KEY_PREFIX = "key:"


@dataclass(frozen=True, slots=True)
class StateRecord:
    """A handle's numbers at a commit.

    Attributes:
        values: by the path of each in the transform's state.
        state_id: tells states apart that were made under one name; empty in stores of earlier releases.
        identity: of which transform and parameters it is (``offload_identity``); empty in those stores.
    """

    version: int
    skipped: int
    values: Mapping[str, Any]
    state_id: str = ""
    identity: Mapping[str, Any] = field(default_factory=dict)


def encoded(record: StateRecord) -> dict[str, Any]:
    """Returns ``record`` as plain values."""
    return {
        "version": record.version,
        "skipped": record.skipped,
        "values": {path: _encoded(value) for path, value in record.values.items()},
        "id": record.state_id,
        "of": dict(record.identity),
    }


def decoded(found: Mapping[str, Any]) -> StateRecord:
    """Returns the record of plain values."""
    return StateRecord(
        int(found["version"]),
        int(found["skipped"]),
        {path: _decoded(*value) for path, value in found["values"].items()},
        found.get("id", ""),
        found.get("of", {}),
    )


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
