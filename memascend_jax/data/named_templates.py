# SPDX-License-Identifier: Apache-2.0
"""Chat templates by name, and from files: in the formats of known families, with the answers marked.

The texts (``templates/*.jinja``) are ours. They write the formats that the families were trained with, mark what the
assistant says with ``{% generation %}``, and know tools; what a family's own template adds besides, such as a date or a
default system prompt, they do not.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from tokenizers import Tokenizer

from memascend_jax.errors import DataError

#: By name: the tokens that a tokenizer should have as one, each.
NAMED: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
}


def chat_template(named: str) -> str:
    """Returns the jinja2 source that ``data.chat_template`` names: one of ``NAMED``, or a file.

    Raises:
        DataError: it is neither.
    """
    if named in NAMED:
        place = resources.files("memascend_jax.data").joinpath("templates", f"{named}.jinja")
        return place.read_text(encoding="utf-8")
    path = Path(named).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"the chat template '{path}' is not UTF-8 text: {error}") from error
    except OSError as error:
        raise DataError(
            f"data.chat_template={named} is neither a known template ({', '.join(NAMED)}) nor a file that can be read: "
            f"{error.strerror}"
        ) from error


def missing_tokens(named: str, tokenizer: Tokenizer) -> str | None:
    """Returns a sentence about the template's tokens that the tokenizer has not, or None."""
    missing = [token for token in NAMED.get(named, ()) if tokenizer.token_to_id(token) is None]
    if not missing:
        return None
    listed = ", ".join(missing)
    return (
        f"the tokenizer has no {listed}, which data.chat_template={named} writes: they are made of several ordinary "
        f"tokens; model.add_tokens=['{missing[0]}', …] makes one of each"
    )
