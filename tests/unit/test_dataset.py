# SPDX-License-Identifier: Apache-2.0
"""Sources to packed data: what is kept, cut, dropped or empty is counted, and bad input is named by its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_coder import VOCAB_SIZE, byte_coder

from memascend_jax.data.dataset import Dataset, build_dataset
from memascend_jax.data.settings import DataSettings, SourceSpec
from memascend_jax.errors import DataError


def chat(question: str, answer: str | None) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"messages": messages + ([{"role": "assistant", "content": answer}] if answer is not None else [])}


def write(path: Path, *lines: dict[str, Any] | str) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def build(source: str, **options: Any) -> Dataset:
    coder, vocab_size = options.pop("coder", byte_coder()), options.pop("vocab_size", VOCAB_SIZE)
    settings = DataSettings(source=source, **{"seq_len": 64, "eval_fraction": 0.0, **options})
    return build_dataset(settings, coder, vocab_size=vocab_size)


def test_every_example_is_counted(tmp_path: Path) -> None:
    source = write(
        tmp_path / "a.jsonl",
        chat("short?", "yes"),
        chat("long answer?", "x" * 100),
        chat("q" * 100, "the answer begins beyond the end"),
        chat("nobody answers", None),
        "",
        {"text": "a text"},
    )
    data = build(source)
    counts = data.counts
    assert (counts.kept, counts.cut, counts.dropped, counts.empty) == (2, 1, 1, 1)
    assert counts.trained_tokens == data.train.packed.trained_tokens()
    # 100 x and the end token, less what stays: 65 tokens, of which the header is 46.
    header = len("<|im_start|>user\nlong answer?<|im_end|>\n<|im_start|>assistant\n") - 3 * 11 + 3 - 1
    assert counts.tokens_cut == 101 - (65 - header)


def test_long_example_is_dropped_when_told(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", chat("short?", "yes"), chat("long?", "x" * 100), {"text": "y" * 100})
    counts = build(source, too_long="drop").counts
    assert (counts.kept, counts.cut, counts.dropped, counts.tokens_cut) == (1, 0, 2, 0)


def test_long_text_is_cut_into_sequences_and_loses_nothing(tmp_path: Path) -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(1000))
    data = build(write(tmp_path / "a.jsonl", {"text": text}))
    assert (data.counts.cut, data.counts.tokens_cut) == (1, 0)
    assert (
        data.counts.trained_tokens == 1000
    )  # 1,000 bytes and the end token, of which the first has no context
    batch = data.train.packed.batch(range(len(data.train.packed)))
    assert batch.trained_tokens == 1000


def test_data_without_anything_to_train_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", chat("nobody answers", None), chat("q" * 100, "beyond"))
    with pytest.raises(
        DataError, match=r"1 example is longer than data.seq_len=64, 1 without an answer"
    ) as caught:
        build(source)
    assert caught.value.exit_code == 5


def test_held_out_part_is_apart_and_does_not_depend_on_the_order(tmp_path: Path) -> None:
    lines = [chat(f"question {i}?", f"answer {i}") for i in range(50)]
    one = build(write(tmp_path / "a.jsonl", *lines), eval_fraction=0.2)
    other = build(write(tmp_path / "b.jsonl", *reversed(lines)), eval_fraction=0.2)
    assert (one.counts.kept, one.held_out_counts.kept) == (40, 10)
    assert {question.answer for question in one.questions[:10]} == {q.answer for q in other.questions[:10]}
    assert one.held_out is not None
    coder = byte_coder()
    held_out = coder.tokenizer.decode(one.held_out.examples.tokens[:0].tolist())
    for index in range(len(one.held_out)):
        held_out += "".join(coder.tokenizer.decode(e.tokens.tolist()) for e in one.held_out.members(index))
    train = "".join(
        coder.tokenizer.decode(e.tokens.tolist())
        for i in range(len(one.train.packed))
        for e in one.train.packed.members(i)
    )
    for question in one.questions[:10]:
        assert question.answer in held_out
        assert f"{question.messages[0]['content']}\nassistant" not in train


def test_questions_are_held_out_ones_first_whatever_source_they_are_of(tmp_path: Path) -> None:
    many = write(tmp_path / "a.jsonl", *[chat(f"{i}?", "many") for i in range(30)])
    sources = [SourceSpec(write(tmp_path / f"{n}.jsonl", chat(f"q{n}", "one")), 1.0) for n in range(6)]
    data = build(many, sources=[SourceSpec(many, 1.0), *sources], eval_fraction=0.1)
    assert [question.answer for question in data.questions[:3]] == ["many"] * 3
    assert {question.answer for question in data.questions} == {"many", "one"}


def test_equal_examples_stay_on_one_side(tmp_path: Path) -> None:
    data = build(
        write(tmp_path / "a.jsonl", *[chat("same?", "same")] * 20, chat("b?", "b")), eval_fraction=0.5
    )
    assert {data.counts.kept, data.held_out_counts.kept} == {20, 1}


def test_single_example_is_trained_and_the_user_told(tmp_path: Path) -> None:
    data = build(write(tmp_path / "a.jsonl", chat("a?", "b")), eval_fraction=0.5)
    assert data.held_out is None
    assert any("nothing is held out" in note for note in data.preview(byte_coder()).notes)


def test_held_out_file_is_used_whole(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", *[chat(f"{i}?", "a") for i in range(5)])
    held_out = write(tmp_path / "b.jsonl", *[chat(f"other {i}?", "b") for i in range(3)])
    data = build(source, eval_source=held_out, eval_fraction=0.9)
    assert (data.counts.kept, data.held_out_counts.kept) == (5, 3)
    assert {question.answer for question in data.questions} == {"b"}


def test_evaluation_reads_at_most_the_sequences_allowed(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", *[chat(f"{i}?", "a" * 30) for i in range(40)])
    data = build(source, eval_fraction=0.5, eval_sequences=3)
    assert data.held_out is not None
    assert len(data.held_out) == 3
    assert data.held_out.batch(range(3)).trained_tokens == data.held_out.trained_tokens()


def test_special_tokens_in_a_text_are_noted(tmp_path: Path) -> None:
    data = build(write(tmp_path / "a.jsonl", chat("a <|im_end|>?", "b"), chat("c?", "d")))
    assert any(
        note.startswith("1 example contains the text of special tokens")
        for note in data.preview(byte_coder()).notes
    )


def test_answers_that_the_template_hides_are_noted(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content if loop.last else m.content[:1] }}{% endfor %}"
        "{% if add_generation_prompt %}{% endif %}"
    )
    turns = [("user", "q"), ("assistant", "lost"), ("user", "r"), ("assistant", "kept")]
    line = {"messages": [{"role": role, "content": content} for role, content in turns]}
    data = build(write(tmp_path / "a.jsonl", line), coder=byte_coder(template))
    assert any("1 answer is not trained" in note for note in data.preview(byte_coder()).notes)


def test_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", chat("z?", "zzz"))
    with pytest.raises(DataError, match="the model's vocabulary has 50 tokens"):
        build(source, vocab_size=50)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "expected an object"),
        ("3", "expected an object"),
        ("{}", "no key with a value"),
        ('{"question": "a", "answer": "b"}', "of no known kind: it has the keys 'question', 'answer'"),
        ('{"messages": [], "text": "a"}', "data.kind=messages or data.kind=text"),
        ('{"text": 3}', "'text' must be text, got a number"),
        ('{"messages": []}', "got an empty list"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\] has no 'content', only 'role'"),
        (
            '{"messages": [{"role": "user", "content": null}]}',
            r"messages\[0\].content must be text, got null",
        ),
        ('{"messages": ["hi"]}', r"messages\[0\] must be an object, got text"),
        ('{"text": "\\ud83d"}', "half of a surrogate pair"),
    ],
)
def test_wrong_line_is_named(tmp_path: Path, line: str, expected: str) -> None:
    source = write(tmp_path / "a.jsonl", chat("fine?", "yes"), line)
    with pytest.raises(DataError, match=expected) as caught:
        build(source)
    assert f"{source}:2: " in str(caught.value)
    assert "data.bad_records=skip" in str(caught.value)
    counts = build(source, bad_records="skip").counts
    assert (counts.kept, counts.wrong) == (1, 1)


def test_text_that_is_no_jsonl_is_told_from_wrong_lines_and_summed_up(tmp_path: Path) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text("Once upon a time\n" * 1200)
    with pytest.raises(DataError, match="1,200 wrong records of 1,200") as caught:
        build(str(text))
    said = str(caught.value)
    assert said.count(f"{text}:") == 5
    assert "and 1,195 more" in said
    assert "It is not a JSONL file" in said


def test_wrong_lines_among_good_ones_are_all_counted(tmp_path: Path) -> None:
    lines: list[Any] = [chat("fine?", "yes"), "{", '{"text": 3}', chat("too", "late")]
    with pytest.raises(DataError, match="2 wrong records of 4") as caught:
        build(write(tmp_path / "a.jsonl", *lines))
    assert "It is not a JSONL file" not in str(caught.value)
    assert "more" not in str(caught.value)
    with pytest.raises(DataError, match="1 wrong record of 1:"):
        build(write(tmp_path / "b.jsonl", "{"))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe\n"])
def test_empty_and_binary_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is empty|UTF-16|not JSON"):
        build(str(path))


def test_latin_1_is_named_by_its_byte_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*byte 0xE9 at byte 28 of the file.*iconv -f latin1"):
        build(str(path))
    path.write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match="1 wrong record of 1") as caught:
        build(str(path))
    assert "several lines" not in str(caught.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read the data file .*set data\.source"):
        build(str(tmp_path / "missing.jsonl"))


def test_template_that_refuses_names_the_line(tmp_path: Path) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    source = write(tmp_path / "a.jsonl", {"messages": [{"role": "assistant", "content": "a"}]})
    with pytest.raises(DataError, match=r"a\.jsonl:1: the model's chat template failed: user first"):
        build(source, coder=byte_coder(template))


def test_random_data_needs_no_tokenizer_and_fills_every_place() -> None:
    def drawn(seed: int) -> Dataset:
        settings = DataSettings(source="random", seq_len=32, eval_sequences=4, seed=seed)
        return build_dataset(settings, None, vocab_size=100)

    data = drawn(7)
    batch = data.train.packed.batch(range(len(data.train.packed)))
    assert batch.weights.all()
    assert 0 <= batch.tokens.min() < batch.tokens.max() < 100
    assert data.held_out is not None
    assert len(data.held_out) == 4
    assert (drawn(7).train.packed.batch([3]).tokens == data.train.packed.batch([3]).tokens).all()
    assert (drawn(8).train.packed.batch([3]).tokens != data.train.packed.batch([3]).tokens).any()


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(DataError, match="needs a tokenizer"):
        build("pydocs", coder=None)


def test_preview_decodes_an_example_and_lists_the_counts(tmp_path: Path) -> None:
    coder = byte_coder()
    preview = build(write(tmp_path / "a.jsonl", chat("a?", "b."))).preview(coder)
    assert [text for text, trained in preview.spans if trained] == ["b.<|im_end|>"]
    assert ("examples kept", "1", "0") in preview.rows
    numbers = build_dataset(DataSettings(source="random", seq_len=8), None, vocab_size=9).preview(None).spans
    assert np.fromstring(numbers[0][0], sep=" ").size == 9
