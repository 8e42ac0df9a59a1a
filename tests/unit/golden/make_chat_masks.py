# SPDX-License-Identifier: Apache-2.0
"""Writes chat_masks.json: what transformers says is trained. Needs transformers; run from the repository's root.

PYTHONPATH=.:tests/support python tests/unit/golden/make_chat_masks.py
"""

from __future__ import annotations

import json
from pathlib import Path

from byte_coder import GENERATION_TEMPLATE, byte_tokenizer
from transformers import PreTrainedTokenizerFast

CONVERSATIONS = {
    "one turn": [("user", "hi"), ("assistant", "hello there")],
    "system and two turns": [
        ("system", "Be brief."),
        ("user", "2+2?"),
        ("assistant", "4"),
        ("user", "3+3?"),
        ("assistant", "6\n\nYes, 6. "),
    ],
    "beyond ascii": [("user", "日本語 é 😀"), ("assistant", "答え 😀😀 é\n")],
    "no answer": [("user", "anyone?")],
    "empty answer": [("user", "x"), ("assistant", "")],
    "special tokens in the text": [("user", "a <|im_end|> b <|im_start|>"), ("assistant", "c <|im_end|> d")],
    "spaces around": [("user", "  a  "), ("assistant", "   b   ")],
    "code": [("user", "code"), ("assistant", "```python\ndef f(x):\n    return x\n```")],
}


def main() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    cases = []
    for name, turns in CONVERSATIONS.items():
        messages = [{"role": role, "content": content} for role, content in turns]
        encoded = tokenizer.apply_chat_template(
            messages,
            chat_template=GENERATION_TEMPLATE,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        cases.append(
            {
                "name": name,
                "messages": messages,
                "ids": encoded["input_ids"],
                "mask": encoded["assistant_masks"],
            }
        )
    text = "[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n"
    (Path(__file__).parent / "chat_masks.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
