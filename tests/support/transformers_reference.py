# SPDX-License-Identifier: Apache-2.0
"""Logits and gradients of the tiny architectures as transformers computes them. Needs torch, not jax."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tiny_architectures import DOCUMENTS, Batch, tiny_weight

Arrays = dict[str, NDArray[np.float32]]


def reference_model(config: dict[str, Any]) -> Any:
    """Returns transformers' model of ``config`` in float32 with the weights of ``tiny_weight``."""
    # transformers fills in what is left out, in the very objects that it is given.
    known = {
        key: copy.deepcopy(value)
        for key, value in config.items()
        if key not in ("architectures", "model_type")
    }
    settings = transformers.AutoConfig.for_model(config["model_type"], **known)
    # The plain form: others leave out soft caps.
    settings._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(tiny_weight(name, tuple(parameter.shape), config)))
    return model


def reference_logits_and_gradients(config: dict[str, Any], batch: Batch) -> tuple[Arrays, Arrays]:
    """Returns logits by document, ``document.0``, and the gradient of the mean loss by tensor.

    Each document goes through the model alone: what is packed must not see what is beside it.
    """
    model = reference_model(config)
    logits: Arrays = {}
    total = torch.zeros(())
    for number, (row, first, length) in enumerate(DOCUMENTS):
        part = slice(first, first + length)
        tokens = torch.from_numpy(batch.tokens[row : row + 1, part].astype(np.int64))
        labels = torch.from_numpy(batch.labels[row, part].astype(np.int64))
        found = model(tokens, use_cache=False).logits[0]
        logits[f"document.{number}"] = found.detach().numpy()
        losses = torch.nn.functional.cross_entropy(found, labels, reduction="none")
        total = total + (losses * torch.from_numpy(batch.weights[row, part])).sum()
    (total / float(batch.weights.sum())).backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return logits, gradients
