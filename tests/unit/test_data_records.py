# SPDX-License-Identifier: Apache-2.0
"""Records of every kind: what they become, how they are recognised, and what is said of wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
from byte_coder import GENERATION_TEMPLATE, byte_coder

from memascend_jax.data.named_templates import chat_template
from memascend_jax.data.records import Example, example_of
from memascend_jax.data.tokenize import Coder, decoded_spans
from memascend_jax.errors import DataError

ASKED = {"role": "user", "content": "q"}
ANSWERED = {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def trained(example: Example, coder: Coder) -> list[str]:
    chat = coder.rendered_example(example)
    encoded = (coder.encode_texts([example]) if chat is None else coder.encode_rendered([chat]))[0]
    return [text for text, is_trained in decoded_spans(encoded, coder) if is_trained]


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [ASKED, ANSWERED]}, [ASKED, ANSWERED]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, ANSWERED]},
            [{"role": "user", "content": "ab"}, ANSWERED],
        ),
        (
            {
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
                "system": "s",
            },
            [{"role": "system", "content": "s"}, ASKED, ANSWERED],
        ),
        ({"conversations": [ASKED, ANSWERED]}, [ASKED, ANSWERED]),
        ({"instruction": "q", "input": "", "output": "a"}, [ASKED, ANSWERED]),
        (
            {"instruction": "do", "input": "it", "output": "a", "history": [["q", "a"]], "text": None},
            [ASKED, ANSWERED, {"role": "user", "content": "do\n\nit"}, ANSWERED],
        ),
        ({"prompt": [ASKED], "completion": "a"}, [{**ASKED, "weight": 0}, ANSWERED]),
        (
            {"conversations": [{"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}]},
            [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
        ),
    ],
)
def test_records_of_every_kind_become_messages(record: dict[str, Any], messages: list[Any]) -> None:
    assert example_of(record, "here").messages == messages


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1, "y": None}])
def test_tool_calls_have_one_form_and_nulls_of_tables_go(arguments: Any) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments, "strict": None}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "name": None}
    found = example_of({"messages": [message], "tools": '[{"name": "f", "about": null}]'}, "here")
    expected = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1}}}
    assert found.messages == [{"role": "assistant", "content": "", "tool_calls": [expected]}]
    assert found.tools == [{"name": "f"}]


def test_a_completion_is_trained_and_its_prompt_is_not() -> None:
    example = example_of({"prompt": "What? ", "completion": "That."}, "here")
    assert trained(example, byte_coder()) == ["That.<|im_end|>"]
    assert trained(example_of({"text": "All of it"}, "here"), byte_coder()) == ["All of it<|im_end|>"]


@pytest.mark.parametrize("template", [None, GENERATION_TEMPLATE])
def test_only_the_last_answer_or_those_with_a_weight_are_trained(template: str | None) -> None:
    coder = byte_coder(template) if template else byte_coder()
    turns = [
        ASKED,
        {**ANSWERED, "weight": 0},
        ASKED,
        ANSWERED,
        ASKED,
        {"role": "assistant", "content": "end"},
    ]
    example = example_of({"messages": turns}, "here")
    assert trained(example, coder) == ["a<|im_end|>", "end<|im_end|>"]
    coder.train_on = "last"
    assert trained(example, coder) == ["end<|im_end|>"]


def test_what_tools_say_is_context() -> None:
    turns = [ASKED, {"role": "tool", "content": "42"}, ANSWERED]
    assert trained(example_of({"messages": turns}, "here"), byte_coder(GENERATION_TEMPLATE)) == [
        "a<|im_end|>"
    ]


def test_calls_that_the_template_hides_are_refused() -> None:
    example = example_of(
        {"messages": [ASKED, {"role": "assistant", "tool_calls": [CALL], "content": None}]}, ""
    )
    coder = byte_coder("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match=r"does not show calls of tools, such as that of 'f'.*chatml"):
        coder.rendered_example(example)
    assert trained(example, byte_coder(chat_template("chatml"))) == [
        '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>'
    ]


def test_a_system_prompt_is_added_where_there_is_none() -> None:
    coder = byte_coder()
    coder.system_prompt = "Be brief."
    assert coder.messages_of(example_of({"messages": [ASKED, ANSWERED]}, ""))[0] == {
        "role": "system",
        "content": "Be brief.",
    }
    own = [{"role": "system", "content": "own"}, ASKED, ANSWERED]
    assert coder.messages_of(example_of({"messages": own}, "")) == own
    assert coder.messages_of(example_of({"text": "t"}, "")) == []


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "p"}, "of no known kind: it has the keys 'prompt'"),
        (
            {"instruction": "i", "output": "o", "text": "t"},
            "choose one with data.kind=alpaca or data.kind=text",
        ),
        ({"conversations": [{"from": "martian", "value": "?"}]}, r"\.from is 'martian'; known are human"),
        ({"prompt": [ASKED], "completion": [3]}, r"completion\[0\] must be an object, got a number"),
        ({"prompt": "p", "completion": [ANSWERED]}, "must be both text"),
        ({"messages": [ASKED, {**ANSWERED, "weight": 0.5}]}, r"messages\[1\]\.weight must be 0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "of type 'image_url'"),
        ({"messages": [ASKED], "tools": "no json"}, "'tools' is text, but not JSON"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\] has no 'role', only 'content'"),
        ({"instruction": "i", "output": 3}, "'output' must be text, got a number"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(record: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        example_of(record, "here")


def test_a_kind_that_is_asked_for_is_taken_and_another_is_wrong() -> None:
    both = {"instruction": "q", "output": "a", "text": "t"}
    assert example_of(both, "here", "text").text == "t"
    assert example_of(both, "here", "alpaca").kind == "alpaca"
    with pytest.raises(ValueError, match=r"expected a record of data\.kind=messages"):
        example_of(both, "here", "messages")
