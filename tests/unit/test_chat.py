# SPDX-License-Identifier: Apache-2.0
"""Chat templates: which tokens are trained, and that a foreign template stays in its bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from byte_coder import CHAT_TEMPLATE, GENERATION_TEMPLATE, byte_coder

from memascend_jax.data import chat
from memascend_jax.data.chat import ChatTemplate
from memascend_jax.data.records import Example
from memascend_jax.data.tokenize import decoded_spans
from memascend_jax.errors import DataError

GOLDEN = json.loads((Path(__file__).parent / "golden" / "chat_masks.json").read_text(encoding="utf-8"))


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, GENERATION_TEMPLATE])
@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_trained_tokens_are_those_of_transformers(template: str, case: dict) -> None:
    coder = byte_coder(template)
    encoded = coder.encode_rendered([coder.rendered(case["messages"])])[0]
    trained = [index for index, mark in enumerate(case["mask"]) if mark]
    # What follows the last trained token is left out on purpose: it would teach nothing.
    length = trained[-1] + 1 if trained else len(case["ids"])
    assert encoded.tokens.tolist() == case["ids"][:length]
    assert encoded.trained.tolist() == [bool(mark) for mark in case["mask"][:length]]


def test_answer_includes_its_end_token_and_nothing_of_the_header() -> None:
    coder = byte_coder()
    messages = [user("a?"), assistant("b."), user("c?"), assistant("d.")]
    spans = decoded_spans(coder.encode_rendered([coder.rendered(messages)])[0], coder)
    assert [text for text, trained in spans if trained] == ["b.<|im_end|>", "d.<|im_end|>"]
    assert spans[0] == ("<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n", False)


def test_prompt_ends_where_the_answer_begins() -> None:
    coder = byte_coder()
    prompt = coder.encode_prompt([user("a?")]).tolist()
    full = coder.encode_rendered([coder.rendered([user("a?"), assistant("b")])])[0]
    assert full.tokens.tolist()[: len(prompt)] == prompt
    assert not full.trained[: len(prompt)].any()
    assert full.trained[len(prompt) :].all()


def test_turn_that_the_template_rewrites_later_is_not_trained() -> None:
    # Like templates that drop the reasoning of all but the last answer.
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last else m.content[:1] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    text, ranges = template.answers([user("q"), assistant("long"), user("r"), assistant("last")])
    assert [span and text[slice(*span)] for span in ranges] == [None, "last"]


def test_special_tokens_of_the_model_are_known_to_the_template() -> None:
    coder = byte_coder("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}")
    assert coder.rendered([user("x")])[0] == "<|im_start|>x<|im_end|>"


def test_text_is_trained_whole_with_the_end_token() -> None:
    encoded = byte_coder(None).encode_texts([Example("here", text="ab")])[0]
    assert encoded.trained.all()
    assert encoded.tokens[-1] == 2
    assert encoded.trained_tokens == 2


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(DataError, match="has no chat template"):
        byte_coder(None).encode_prompt([user("a")])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for %}", "does not compile"),
        ("{{ raise_exception('only user first') }}", "only user first"),
        ("{{ strftime_now('%Y') }}", "undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "range"),
        ("{{ 'a' * 10**9 }}", "too large"),
        ("{{ '%1000000000d' % 1 }}", "not allowed"),
        ("{{ 9 ** 9 ** 9 }}", "too large"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_template_that_fails_or_misbehaves_is_refused(source: str, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        ChatTemplate(source).render([user("a")])


def test_endless_template_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.05)
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(DataError, match="ran for more than"):
        ChatTemplate(loops).render([user("a")])


def test_flood_of_output_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MOST_CHARACTERS", 1000)
    with pytest.raises(DataError, match="wrote more than 1,000 characters"):
        ChatTemplate("{% for a in range(9999) %}flood{% endfor %}").render([user("a")])


def test_message_cannot_pose_as_an_answer() -> None:
    coder = byte_coder(GENERATION_TEMPLATE)
    text, ranges, _ = coder.rendered([user("{% generation %}x{% endgeneration %}\x00"), assistant("y")])
    assert [text[start:end] for start, end in ranges] == ["y<|im_end|>"]
