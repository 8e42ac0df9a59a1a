# SPDX-License-Identifier: Apache-2.0
"""Makes ``architectures.npz``: what transformers computes of each tiny architecture, in float32.

    PYTHONPATH=tests/support python tests/golden/make_architectures.py

Needs torch and transformers (made with 2.13.0 on CPU, and 5.24.0). Keys: ``<variant>/logits/document.<n>``, the logits
of each document alone, and ``<variant>/gradients/<tensor>`` of the mean loss.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tiny_architectures import VARIANTS, tiny_batch
from transformers_reference import reference_logits_and_gradients


def main() -> None:
    arrays = {}
    for variant, config in VARIANTS.items():
        logits, gradients = reference_logits_and_gradients(config, tiny_batch())
        arrays |= {f"{variant}/logits/{name}": value for name, value in logits.items()}
        arrays |= {f"{variant}/gradients/{name}": value for name, value in gradients.items()}
    np.savez_compressed(Path(__file__).with_name("architectures.npz"), **arrays)


if __name__ == "__main__":
    main()
