# SPDX-License-Identifier: Apache-2.0
"""Makes ``smollm2_logits.npz``: what transformers computes of SmolLM2-135M-Instruct in float32.

Run with torch, transformers and gguf installed, on the GGUF file that ``checkpoints.smollm2`` fetches:

    python tests/golden/make_smollm2_logits.py FOLDER_WITH_THE_GGUF_FILE

For each prompt: its tokens, at every position the 16 largest logits with their tokens and 64 logits spread
over the vocabulary, and the greedy continuation.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOP, SPREAD, CONTINUATION = 16, 64, 24

PROMPTS = (
    "The capital of France is",
    "<|im_start|>user\nWhat does `json.dumps(obj)` do?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)


def main() -> None:
    folder = sys.argv[1]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    spread = np.arange(SPREAD) * (model.config.vocab_size // SPREAD)
    golden = {
        "spread": spread,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }
    for index, prompt in enumerate(PROMPTS):
        tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = model(tokens).logits[0]
            continued = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=CONTINUATION,
                min_new_tokens=CONTINUATION,
                do_sample=False,
            )
        top = logits.topk(TOP)
        golden |= {
            f"prompt_{index}": prompt,
            f"tokens_{index}": tokens[0].numpy().astype(np.int32),
            f"top_tokens_{index}": top.indices.numpy().astype(np.int32),
            f"top_logits_{index}": top.values.numpy(),
            f"spread_logits_{index}": logits[:, spread].numpy(),
            f"greedy_{index}": continued[0, tokens.shape[1] :].numpy().astype(np.int32),
        }
    np.savez_compressed(Path(__file__).with_name("smollm2_logits.npz"), **golden)


if __name__ == "__main__":
    main()
