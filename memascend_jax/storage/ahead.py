# SPDX-License-Identifier: Apache-2.0
"""One thing is made while the one before is in use."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
_END: Any = object()


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yields ``items``, each made on a thread of its own while the one before is in use: at most two are there at once.

    What making one raises is raised where it would have been yielded.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="memascend-ahead") as thread:
        pending = thread.submit(next, items, _END)
        while (item := pending.result()) is not _END:
            pending = thread.submit(next, items, _END)
            yield item
