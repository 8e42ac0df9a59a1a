# SPDX-License-Identifier: Apache-2.0
"""The named chat templates: ids and trained tokens as transformers has them, in the format of each family."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from byte_coder import byte_tokenizer
from conversations import conversation
from family_tokenizers import FAMILIES, family_tokenizer
from tiny_checkpoints import hf_config, random_tensors, write_folder
from tokenizers import Tokenizer

from memascend_jax.config import load_config
from memascend_jax.data.chat import ChatTemplate
from memascend_jax.data.named_templates import NAMED, chat_template, missing_tokens
from memascend_jax.data.records import example_of
from memascend_jax.data.tokenize import Coder
from memascend_jax.errors import DataError
from memascend_jax.recipes.inputs import open_model

HERE = Path(__file__).parent / "golden"
GOLDEN = json.loads((HERE / "template_masks.json").read_text(encoding="utf-8"))


def makers() -> ModuleType:
    """The script that made the golden values; needs transformers."""
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("make_template_masks", HERE / "make_template_masks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def coder_of(family: str, tokenizer: Tokenizer) -> Coder:
    _, bos, eos = FAMILIES[family]
    ids = {name: tokenizer.token_to_id(token) for name, token in (("bos", bos), ("eos", eos)) if token}
    return Coder(tokenizer, chat_template(family), ids)


def ours(coder: Coder, number: int) -> tuple[list[int], list[int]]:
    """Ids and mask of a conversation, of which none is cut off."""
    chat = coder.rendered_example(example_of(conversation(number), number))
    assert chat is not None
    encoded = coder.encode_rendered([chat])[0]
    ids = coder.tokenizer.encode(chat.text, add_special_tokens=False).ids
    assert encoded.tokens.tolist() == ids[: len(encoded.tokens)]
    mask = [int(mark) for mark in encoded.trained]
    return ids, mask + [0] * (len(ids) - len(mask))


def digest(ids: list[int], mask: list[int]) -> str:
    import hashlib

    text = json.dumps([ids, mask])
    return f"{len(ids)}/{sum(mask)}/{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_masks_are_those_of_transformers(family: str) -> None:
    coder = coder_of(family, family_tokenizer(family))
    assert [digest(*ours(coder, number)) for number in range(len(GOLDEN[family]))] == GOLDEN[family]
    assert len(GOLDEN[family]) == 200


def test_tokens_and_masks_with_smollm2_s_tokenizer_are_those_of_transformers() -> None:
    from memascend_jax.checkpoints.gguf_checkpoint import GgufCheckpoint
    from memascend_jax.checkpoints.smollm2 import cached_smollm2_135m

    path = cached_smollm2_135m()
    if path is None:
        pytest.skip("SmolLM2's file is not in the cache")
    coder = coder_of("chatml", GgufCheckpoint(path).tokenizer())
    assert [digest(*ours(coder, number)) for number in range(200)] == GOLDEN["smollm2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_here_says_the_same(family: str) -> None:
    theirs = makers().by_transformers(family, family_tokenizer(family))
    coder = coder_of(family, family_tokenizer(family))
    for number, pair in enumerate(theirs):
        assert ours(coder, number) == pair, number


SIMPLE = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "R"},
]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "chatml",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
            "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user"
            "<|end_header_id|>\n\nQ<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nR<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("mistral", "<s>[INST] S\n\nQ[/INST] A</s>[INST] R[/INST]"),
        (
            "gemma",
            "<bos><start_of_turn>user\nS\n\nQ<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n<start_of_turn>user\n"
            "R<end_of_turn>\n<start_of_turn>model\n",
        ),
    ],
)
def test_the_format_is_the_family_s(name: str, text: str) -> None:
    assert ChatTemplate(chat_template(name)).render(SIMPLE, add_generation_prompt=True) == text
    if name == "chatml":
        assert ChatTemplate(chat_template("qwen")).render(SIMPLE, add_generation_prompt=True) == text


def test_a_file_is_a_template_and_what_is_neither_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    assert chat_template(str(tmp_path / "mine.jinja")) == "{{ messages[0].content }}"
    with pytest.raises(DataError, match=r"data\.chat_template=chatlm is neither a known template \(chatml, "):
        chat_template("chatlm")
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    with pytest.raises(DataError, match="is not UTF-8 text"):
        chat_template(str(tmp_path / "latin.jinja"))


def test_the_exported_model_has_the_template_that_was_chosen(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", hf_config(), random_tensors(hf_config()))
    source = [f"model.source={folder}", "data.seq_len=16"]
    for chosen, text in (([], None), (["data.chat_template=chatml"], chat_template("chatml"))):
        model = open_model(load_config([], [*source, *chosen]))
        files = model.export_files()
        model.close()
        assert files.get("chat_template.jinja") == (text and text.encode())
    assert any("has no <|im_start|>" in note for note in model.notes)


def test_tokens_that_the_tokenizer_has_not_are_told() -> None:
    assert missing_tokens("chatml", byte_tokenizer()) is None
    said = missing_tokens("llama3", byte_tokenizer())
    assert said is not None
    assert "no <|start_header_id|>, <|end_header_id|>, <|eot_id|>" in said
    assert missing_tokens("mine.jinja", byte_tokenizer()) is None
    assert set(NAMED) == set(FAMILIES)
