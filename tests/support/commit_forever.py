# SPDX-License-Identifier: Apache-2.0
"""A process to be killed: for each line on stdin, forks a child that commits generations until it is.

Line: ``paths<TAB>backend<TAB>durability``. The child writes one byte to stdout when it has opened the store, and
the generation as text after every commit. Forking saves the start of an interpreter per kill; the parent starts
no thread.
"""

from __future__ import annotations

import os
import sys

import numpy as np

from memascend_jax.storage.tensor_store import TensorStore

TENSORS = 3


def contents(generation: int, index: int) -> np.ndarray:
    """What tensor ``index`` holds in ``generation``: each generation changes one tensor whole, another in part."""
    values = np.arange(40_000, dtype=np.float32) + 1000 * index
    last = generation - (generation - index) % TENSORS
    if last >= 0:
        values[:20_480] += last
    return values


def run(paths: list[str], backend: str) -> None:
    with TensorStore.open(paths, io_backend=backend, direct_io="optional") as store:  # type: ignore[arg-type]
        report(f"open {store.generation}")
        while True:
            generation = store.generation + 1
            index = generation % TENSORS
            values = contents(generation, index)
            for start in range(0, 20_480, 2048):
                store.write_elements(f"t{index}", start, values[start : start + 2048])
            store.commit(str(generation).encode())
            report(f"done {generation}")


def report(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def main() -> None:
    for line in iter(sys.stdin.readline, ""):
        paths, backend = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            try:
                run(paths.split("|"), backend)
            finally:
                os._exit(1)
        report(f"child {child}")
        os.waitpid(child, 0)
        report("gone")


if __name__ == "__main__":
    main()
