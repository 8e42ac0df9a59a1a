# SPDX-License-Identifier: Apache-2.0
"""Results of commands on stdout: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

#: Raised when a key of the JSON output changes its meaning or goes away.
SCHEMA = 1


def print_tables(*renderables: Any) -> None:
    """Prints rich renderables on stdout."""
    from memascend_jax.observe.screen import build_console

    console = build_console(stderr=False)
    for renderable in renderables:
        console.print(renderable)


def print_json(facts: Mapping[str, Any]) -> None:
    """Prints ``facts`` as one JSON object with the number of its schema."""
    sys.stdout.write(json.dumps({"schema": SCHEMA, **facts}, indent=2) + "\n")
