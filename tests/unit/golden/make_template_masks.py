# SPDX-License-Identifier: Apache-2.0
"""Writes template_masks.json: ids and masks by transformers for 200 conversations in each template, as digests.

Needs transformers, no jax; run from the repository's root. ``--tokenizers`` learns the small tokenizers anew first.

PYTHONPATH=.:tests/support python tests/unit/golden/make_template_masks.py
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from conversations import conversation
from family_tokenizers import FAMILIES, FOLDER, family_tokenizer, learned
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from memascend_jax.data.named_templates import chat_template

COUNT = 200


def by_transformers(
    family: str, tokenizer: Tokenizer, count: int = COUNT
) -> list[tuple[list[int], list[int]]]:
    """Returns ids and mask of each conversation."""
    _, bos, eos = FAMILIES[family]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
    found = []
    for number in range(count):
        record = conversation(number)
        encoded = wrapped.apply_chat_template(
            record["messages"],
            tools=record.get("tools"),
            chat_template=chat_template(family),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        found.append((list(encoded["input_ids"]), list(encoded["assistant_masks"])))
    return found


def digest(ids: list[int], mask: list[int]) -> str:
    """Returns what is kept of a conversation: its tokens, the trained ones, and eight hex digits of both."""
    text = json.dumps([[int(token) for token in ids], [int(mark) for mark in mask]])
    return f"{len(ids)}/{sum(mask)}/{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def smollm2_tokenizer() -> Tokenizer | None:
    """Returns SmolLM2's from its GGUF file in the cache, or None."""
    from memascend_jax.checkpoints.gguf_checkpoint import GgufCheckpoint
    from memascend_jax.checkpoints.smollm2 import cached_smollm2_135m

    path = cached_smollm2_135m()
    return GgufCheckpoint(path).tokenizer() if path is not None else None


def main() -> None:
    if "--tokenizers" in sys.argv:
        FOLDER.mkdir(exist_ok=True)
        texts = [message["content"] for n in range(COUNT) for message in conversation(n)["messages"]]
        for family in FAMILIES:
            learned(family, texts).save(str(FOLDER / f"{family}.json"), pretty=False)
    golden: dict[str, Any] = {
        family: [digest(*pair) for pair in by_transformers(family, family_tokenizer(family))]
        for family in FAMILIES
    }
    smollm2 = smollm2_tokenizer()
    if smollm2 is not None:
        golden["smollm2"] = [digest(*pair) for pair in by_transformers("chatml", smollm2)]
    text = json.dumps(golden, indent=0) + "\n"
    (Path(__file__).parent / "template_masks.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
