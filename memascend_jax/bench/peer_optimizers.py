# SPDX-License-Identifier: Apache-2.0
"""Runs in another interpreter, where the peers are installed: DeepSpeed's and PyTorch's fused AdamW on request.

Reads a name per line from standard input, such as ``torch_adamw`` or ``overflow_float16``, does that work once
and answers with a line of JSON: ``{"seconds": ...}`` or ``{"error": "..."}``. It imports nothing of this package, whose
dependencies the other interpreter does not have. Threads are set by OMP_NUM_THREADS.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any


class Peers:
    """The work of each name, prepared when it is first asked for."""

    def __init__(self, elements: int, threads: int) -> None:
        torch = import_module("torch")

        self._torch = torch
        torch.set_num_threads(threads)
        self._elements = elements
        self._work: dict[str, Callable[[], Any]] = {}

    def run(self, name: str) -> float:
        if name not in self._work:
            self._work[name] = getattr(self, f"_{name}")()
            self._work[name]()
        began = time.perf_counter()
        self._work[name]()
        return time.perf_counter() - began

    def _parameter(self) -> Any:
        torch = self._torch
        parameter = torch.nn.Parameter(torch.full((self._elements,), 0.02))
        parameter.grad = torch.randn(self._elements)
        return parameter

    def _torch_adamw(self) -> Callable[[], Any]:
        options = {"lr": 1e-4, "weight_decay": 0.01, "fused": True}
        return self._torch.optim.AdamW([self._parameter()], **options).step  # type: ignore[no-any-return]

    def _deepspeed_adamw(self) -> Callable[[], Any]:
        adam = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        options = {"lr": 1e-4, "weight_decay": 0.01, "adamw_mode": True}
        return adam([self._parameter()], **options).step  # type: ignore[no-any-return]

    def _whole_gradient_check(self, dtype: Any) -> Callable[[], Any]:
        """The check that DeepSpeed's ZeRO-3 runs on its whole flat gradient."""
        torch = self._torch
        gradient = torch.randn((1 << 30) // dtype.itemsize).to(dtype)

        def check() -> bool:
            found = torch.zeros(1, dtype=torch.bool)
            found.logical_or_(torch.isinf(gradient).any())
            found.logical_or_(torch.isnan(gradient).any())
            return bool(found[0])

        return check

    def _overflow_bfloat16(self) -> Callable[[], Any]:
        return self._whole_gradient_check(self._torch.bfloat16)

    def _overflow_float16(self) -> Callable[[], Any]:
        return self._whole_gradient_check(self._torch.float16)

    def _overflow_float32(self) -> Callable[[], Any]:
        return self._whole_gradient_check(self._torch.float32)


def main() -> None:
    answers = sys.stdout
    elements, threads = int(sys.argv[1]), int(sys.argv[2])
    # Building an extension talks on the standard output, where the answers belong.
    with contextlib.redirect_stdout(sys.stderr):
        peers: Peers | None = None
        for line in sys.stdin:
            try:
                peers = peers or Peers(elements, threads)
                answer: dict[str, Any] = {"seconds": peers.run(line.strip())}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
