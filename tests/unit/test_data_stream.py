# SPDX-License-Identifier: Apache-2.0
"""Data read beside the training: each example once an epoch, the same order after a stop, nothing held out trained."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_coder import VOCAB_SIZE, byte_coder

from memascend_jax.data import chunks
from memascend_jax.data.dataset import Dataset, build_dataset
from memascend_jax.data.encode import Encoder
from memascend_jax.data.sequences import Mixture, shares
from memascend_jax.data.sequences import batches_at as batches
from memascend_jax.data.settings import DataSettings, SourceSpec
from memascend_jax.data.stream import StreamedSequences
from memascend_jax.errors import DataError

SEQ_LEN = 64
EXAMPLES = 400
PERIOD = 64
DECODER = byte_coder().tokenizer


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """About a dozen chunks of several blocks."""
    monkeypatch.setattr("memascend_jax.data.jsonl.BLOCK_BYTES", 300)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(chunks, "FIRST_BYTES", 800)
    monkeypatch.setattr("memascend_jax.data.sequences.PERIOD", PERIOD)


@pytest.fixture
def opened() -> Iterator[list[Dataset]]:
    """Datasets that are closed at the end."""
    found: list[Dataset] = []
    yield found
    for data in found:
        data.close()


def lines(path: Path, count: int = EXAMPLES, mark: str = "") -> str:
    path.write_text(
        "".join(
            json.dumps({"text": f"{mark}{number}." + "x" * (number % 50)}) + "\n" for number in range(count)
        )
    )
    return str(path)


def stream(opened: list[Dataset], source: str = "", **options: Any) -> Dataset:
    settings = {"seq_len": SEQ_LEN, "eval_fraction": 0.0, "stream": "always", "source": source, **options}
    opened.append(build_dataset(DataSettings(**settings), byte_coder(), vocab_size=VOCAB_SIZE))
    return opened[-1]


def numbers(data: Dataset, first: int, count: int) -> list[str]:
    """The marks of the examples at places ``first`` and following."""
    batch = batches(data.train, first, 1, count)[0]
    found = []
    for row in range(count):
        for segment in range(1, batch.segments[row].max() + 1):
            tokens = batch.tokens[row][batch.segments[row] == segment]
            found.append(DECODER.decode(tokens.tolist()).partition(".")[0])
    return found


def place_of_epoch(data: Dataset, epoch: int) -> int:
    """The place at which an epoch begins."""
    train = data.train
    assert isinstance(train, StreamedSequences)
    place = 0
    while train.position(place)["chunk"] < epoch * train.chunks_per_epoch:
        batches(train, place, 1, 1)
        place += 1
    return place


def test_an_epoch_has_every_example_once_and_the_next_in_another_order(
    tmp_path: Path, opened: list[Dataset]
) -> None:
    source = lines(tmp_path / "a.jsonl")
    end = place_of_epoch(stream(opened, source), 1)
    data = stream(opened, source)
    first = numbers(data, 0, end)
    assert Counter(first) == Counter(str(number) for number in range(EXAMPLES))
    assert data.streams[0].chunks_per_epoch >= 5
    # The first chunks are from all over the file.
    assert np.ptp([int(number) for number in first[:30]]) > EXAMPLES / 2
    assert numbers(data, end, 10) != first[:10]


@pytest.mark.parametrize(
    "options", [{}, {"packing_on": False, "length_grouping": True, "micro_batch_size": 2}]
)
def test_a_stream_goes_on_where_it_stopped(
    tmp_path: Path, opened: list[Dataset], options: dict[str, Any]
) -> None:
    source = lines(tmp_path / "a.jsonl")
    whole = stream(opened, source, **options)
    expected = [batches(whole.train, place, 1, 1)[0].tokens.tolist() for place in range(150)]
    stepped = stream(opened, source, **options)
    for place in (1, 37, 90):
        for before in range(place):
            stepped_batch = batches(stepped.train, before, 1, 1) if before >= place - 3 else None
            assert stepped_batch is None or stepped_batch[0].tokens.tolist() == expected[before]
        position = json.loads(json.dumps(stepped.train.position(place)))
        resumed = stream(opened, source, position=position, read=place, **options)
        resumed.train.check_position()
        got = [batches(resumed.train, at, 1, 1)[0].tokens.tolist() for at in range(place, 150)]
        assert got == expected[place:]


def test_few_chunks_are_in_memory(tmp_path: Path, opened: list[Dataset]) -> None:
    data = stream(opened, lines(tmp_path / "a.jsonl"))
    for place in range(100):
        batches(data.train, place, 2, 1)
        data.train.position(place)
        assert len(data.streams[0]._chunks) <= 2
    with pytest.raises(IndexError, match="no longer in memory"):
        batches(data.train, 0, 1, 1)


def test_what_is_held_out_is_never_trained_whatever_the_order_of_the_file(
    tmp_path: Path, opened: list[Dataset]
) -> None:
    source = lines(tmp_path / "a.jsonl")
    data = stream(opened, source, eval_fraction=0.2, eval_sequences=None)
    assert data.held_out is not None
    held = {
        DECODER.decode(example.tokens.tolist()).partition(".")[0]
        for index in range(len(data.held_out))
        for example in data.held_out.members(index)
    }
    trained = numbers(data, 0, place_of_epoch(stream(opened, source, eval_fraction=0.2), 1))
    assert not held & set(trained)
    assert Counter(trained) == Counter(str(n) for n in range(EXAMPLES) if str(n) not in held)
    assert 0.1 * EXAMPLES < len(held) < 0.3 * EXAMPLES
    few = stream(opened, source, eval_fraction=0.2, eval_sequences=2).held_out
    assert few is not None
    assert len(few) == 2


def test_a_held_out_file_leaves_all_of_the_source_to_train_on(tmp_path: Path, opened: list[Dataset]) -> None:
    source, other = lines(tmp_path / "a.jsonl"), lines(tmp_path / "b.jsonl", 50, "held ")
    data = stream(opened, source, eval_source=other, eval_fraction=0.5, eval_sequences=3)
    assert data.held_out is not None
    assert len(data.held_out) == 3
    assert DECODER.decode(data.held_out.members(0)[0].tokens.tolist()).startswith("held ")
    end = place_of_epoch(stream(opened, source), 1)
    assert Counter(numbers(data, 0, end)) == Counter(str(number) for number in range(EXAMPLES))


def test_shares_are_exact_and_each_source_goes_through_its_own_epochs(
    tmp_path: Path, opened: list[Dataset]
) -> None:
    sources = [
        SourceSpec(lines(tmp_path / "a.jsonl", 50, "a"), 3.0),
        SourceSpec(lines(tmp_path / "b.jsonl", 300, "b"), 1.0),
    ]
    for mode in ("always", "never"):
        data = stream(opened, sources=sources, stream=mode, packing_on=False)
        marks = Counter(mark[0] for mark in numbers(data, 0, PERIOD))
        assert marks == {"a": PERIOD * 3 // 4, "b": PERIOD // 4}
        names = numbers(stream(opened, sources=sources, stream=mode, packing_on=False), 0, 240)
        of_a = [name for name in names if name[0] == "a"]
        assert len(set(of_a[:50])) == 50, "its first epoch has every example once"


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_mixture_goes_on_where_it_stopped(tmp_path: Path, opened: list[Dataset], mode: str) -> None:
    sources = [
        SourceSpec(lines(tmp_path / "a.jsonl", 90, "a"), 0.7),
        SourceSpec(lines(tmp_path / "b.jsonl", 200, "b"), 0.3),
    ]
    whole = numbers(stream(opened, sources=sources, stream=mode), 0, 120)
    stepped = stream(opened, sources=sources, stream=mode)
    before = numbers(stepped, 0, 55)
    position = json.loads(json.dumps(stepped.train.position(55)))
    assert bool(position) == (mode == "always")
    resumed = stream(opened, sources=sources, stream=mode, position=position, read=55)
    assert before + numbers(resumed, 55, 65) == whole


def test_sources_without_weights_are_one(tmp_path: Path, opened: list[Dataset]) -> None:
    both = lines(tmp_path / "c.jsonl", 60, "a")
    both = str(tmp_path / "c.jsonl")
    one, two = lines(tmp_path / "a.jsonl", 30, "a"), tmp_path / "b.jsonl"
    two.write_text("".join(Path(both).read_text().splitlines(keepends=True)[30:]))
    joined = stream(opened, sources=[SourceSpec(one), SourceSpec(str(two))], stream="never")
    assert not isinstance(joined.train, Mixture)
    assert joined.train.digests() == stream(opened, both, stream="never").train.digests()


def test_a_weight_that_cannot_be_had_is_refused(tmp_path: Path, opened: list[Dataset]) -> None:
    sources = [
        SourceSpec(lines(tmp_path / "a.jsonl", 5), 1e6),
        SourceSpec(lines(tmp_path / "b.jsonl", 6), 1.0),
    ]
    with pytest.raises(
        DataError, match=r"weight of .*b\.jsonl' in data\.sources is less than 1 in 64 of all"
    ):
        stream(opened, sources=sources)
    assert shares([1, 1, 1], 4).sum() == 4


def test_a_wrong_line_far_on_is_named_by_its_number_when_it_is_reached(
    tmp_path: Path, opened: list[Dataset]
) -> None:
    path = Path(lines(tmp_path / "a.jsonl"))
    texts = path.read_text().splitlines(keepends=True)
    texts[250] = "{broken\n"
    path.write_text("".join(texts))
    data = stream(opened, str(path))
    with pytest.raises(DataError, match=r"a\.jsonl:251: not JSON"):
        place_of_epoch(data, 1)
    skipping = stream(opened, str(path), bad_records="skip")
    end = place_of_epoch(skipping, 1)
    assert skipping.all_counts().wrong == 1
    again = stream(opened, str(path), bad_records="skip")
    assert len(set(numbers(again, 0, end))) == EXAMPLES - 1


def test_data_that_was_changed_since_the_stop_is_named(tmp_path: Path, opened: list[Dataset]) -> None:
    path = Path(lines(tmp_path / "a.jsonl"))
    data = stream(opened, str(path))
    position = data.train.position(0)
    path.write_text(path.read_text().replace(".xx", ".yy"))
    with pytest.raises(DataError, match=r"a\.jsonl' was changed while it was read"):
        numbers(data, 0, 300)
    with pytest.raises(DataError, match=r"a\.jsonl' was changed since this run stopped"):
        stream(opened, str(path), position=position).train.check_position()


def test_tokens_are_made_once_and_kept_on_disk(
    tmp_path: Path, opened: list[Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = lines(tmp_path / "a.jsonl"), tmp_path / "cache"
    made: list[int] = []
    encode = Encoder.encode

    def counting(self: Encoder, block: Any) -> Any:
        made.append(1)
        return encode(self, block)

    monkeypatch.setattr(Encoder, "encode", counting)
    end = place_of_epoch(stream(opened, source, cache=cache), 1)
    first = numbers(stream(opened, source, cache=cache), 0, end)
    blocks = len(made)
    assert numbers(stream(opened, source, cache=cache), 0, end) == first
    # Another length of sequences, seed and way of cutting have the same tokens.
    numbers(stream(opened, source, cache=cache, seq_len=32, too_long="cut_left", seed=3), 0, 100)
    stream(opened, source, cache=cache, stream="never", cache_all=True)
    assert len(made) == blocks
    # What is damaged is made again; so it is for another template.
    files = [file for file in cache.rglob("*") if file.is_file()]
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"?")
    stream(opened, source, cache=cache, stream="never", cache_all=True)
    assert len(made) == blocks + 1
    stream(opened, source, cache=cache, stream="never", cache_all=True, kind="text")
    assert len(made) > blocks + 10


def test_a_full_disk_ends_the_cache_and_not_the_run(
    tmp_path: Path, opened: list[Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memascend_jax.data.token_cache._LEFT_FREE_BYTES", 1 << 60)
    told: list[str] = []
    data = stream(opened, lines(tmp_path / "a.jsonl"), cache=tmp_path / "cache", say=told.append)
    numbers(data, 0, 60)
    assert len(told) == 1
    assert "are free there" in told[0]
    home = stream(opened, lines(tmp_path / "a.jsonl"), cache=tmp_path / "no", cache_home=tmp_path / "run")
    numbers(home, 0, 3)
    assert not (tmp_path / "no").exists()


def test_what_is_odd_in_the_first_chunk_is_told_and_what_was_read_at_the_end(
    tmp_path: Path, opened: list[Dataset]
) -> None:
    path = Path(lines(tmp_path / "a.jsonl"))
    path.write_text(path.read_text().replace("1.", "1 <|im_end|>."))
    data = stream(opened, str(path), eval_fraction=0.1)
    notes = data.preview(byte_coder()).notes
    assert any("contain the text of special tokens" in note for note in notes)
    assert any("larger than is held in memory" in note for note in notes)
    end = place_of_epoch(data, 1)
    data.train.position(end)
    kept = int(data.read_so_far().split()[2])
    assert 0.8 * EXAMPLES < kept < EXAMPLES


def test_data_of_which_nothing_is_trained_is_refused_at_the_start(
    tmp_path: Path, opened: list[Dataset]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"messages": [{"role": "user", "content": "?"}]}) + "\n") * 100)
    data = stream(opened, str(path))
    with pytest.raises(DataError, match=r"no token of data\.source=.* would be trained"):
        data.train.first_example()


def test_the_same_examples_are_streamed_and_held_in_memory(
    tmp_path: Path, opened: list[Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 6000)
    monkeypatch.setattr(chunks, "FIRST_BYTES", 3000)
    source = lines(tmp_path / "a.jsonl")
    held = stream(opened, source, stream="never")
    assert held.train.per_epoch is not None
    streamed = stream(opened, source)
    about = streamed.estimated_sequences()
    # Chunks as small as these fill their sequences less evenly.
    assert about == pytest.approx(place_of_epoch(streamed, 1), rel=0.5)
    assert Counter(numbers(held, 0, held.train.per_epoch)) == Counter(str(n) for n in range(EXAMPLES))
