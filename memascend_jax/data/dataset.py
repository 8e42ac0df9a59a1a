# SPDX-License-Identifier: Apache-2.0
"""From sources of examples to training and held-out sequences, with nothing left out silently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memascend_jax.data.collect import Collected, check_vocabulary, nothing_trained
from memascend_jax.data.collection import Collection, Counts, Question
from memascend_jax.data.encode import QUESTIONS
from memascend_jax.data.examples import ExampleBuilder
from memascend_jax.data.packing import PackedExamples
from memascend_jax.data.random_tokens import RANDOM_HELD_OUT, full_counts, random_sequences
from memascend_jax.data.sequences import Mixture, OrderedSequences, Packing, TrainingSequences
from memascend_jax.data.settings import DataSettings
from memascend_jax.data.split import Held, Part, held_out_of, open_parts, read_part
from memascend_jax.data.stream import StreamedSequences
from memascend_jax.data.tokenize import Coder, decoded_spans
from memascend_jax.errors import DataError
from memascend_jax.observe.example import Preview
from memascend_jax.units import counted

RANDOM = "random"
_COUNTED = (
    ("examples kept", "kept"),
    ("examples cut", "cut"),
    ("examples dropped, too long", "dropped"),
    ("examples empty, nothing to train", "empty"),
    ("records skipped, wrong", "wrong"),
    ("tokens", "tokens"),
    ("tokens trained", "trained_tokens"),
    ("tokens cut off", "tokens_cut"),
)
#: Shown only when there are some.
_RARE = ("wrong",)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Training and held-out sequences, what became of the examples, and questions to show answers to.

    ``held_out`` is None when nothing is held out. ``questions`` are held out where anything is. ``notes`` are
    sentences that a user should see. ``counts`` and ``collected`` are of what is in memory; ``streams`` have their own.
    """

    train: TrainingSequences
    held_out: PackedExamples | None
    counts: Counts
    held_out_counts: Counts
    questions: tuple[Question, ...] = ()
    notes: tuple[str, ...] = ()
    streams: tuple[StreamedSequences, ...] = ()
    collected: tuple[Collected, ...] = ()

    @property
    def sequences(self) -> int:
        """Sequences that are held in memory, held-out ones included."""
        return self.train.held + (len(self.held_out) if self.held_out else 0)

    def all_counts(self) -> Counts:
        """Returns what became of all training examples that have been read."""
        return sum((stream.counts() for stream in self.streams), self.counts)

    def read_so_far(self) -> str:
        """Returns what became of the examples that have been read, as a sentence."""
        counts = self.all_counts()
        skipped = f", {counts.wrong:,} skipped" if counts.wrong else ""
        return (
            f"examples read: {counts.kept:,} kept, {counts.cut:,} cut, {counts.dropped:,} dropped, {counts.empty:,} "
            f"empty{skipped}; {counts.tokens:,} tokens, {counts.trained_tokens:,} of them trained, "
            f"{counts.tokens_cut:,} cut off"
        )

    def estimated_sequences(self) -> int:
        """Returns about how many sequences a pass over all sources has, by the first chunks of streams."""
        held = self.train.parts if isinstance(self.train, Mixture) else [self.train]
        return sum(part.per_epoch or 0 for part in held) + sum(
            stream.estimated_per_epoch() for stream in self.streams
        )

    def preview(self, coder: Coder | None) -> Preview:
        """Returns what became of the examples, and the first of the training data as text."""
        counts, held_out = self.all_counts(), self.held_out
        rows = [
            (what, f"{getattr(counts, key):,}", f"{getattr(self.held_out_counts, key):,}")
            for what, key in _COUNTED
            if key not in _RARE or getattr(counts + self.held_out_counts, key)
        ]
        sequences = self.train.per_epoch
        shown = f"{self.train.held:,}" if sequences is None else f"{sequences:,}"
        if sequences is not None:
            rows.append(("sequences", shown, f"{len(held_out) if held_out else 0:,}"))
        streams = [stream.first_chunk().collected for stream in self.streams]
        notes = [
            *self.notes,
            *_about_records([*self.collected, *streams]),
            *(_about_stream(stream) for stream in self.streams),
        ]
        return Preview(decoded_spans(self.train.first_example(), coder), rows, notes)

    def close(self) -> None:
        """Stops what is done beside the training, and closes the files."""
        self.train.close()


def build_dataset(settings: DataSettings, coder: Coder | None, *, vocab_size: int) -> Dataset:
    """Returns the data that ``settings`` describe.

    Args:
        coder: the model's tokenizer and template; None only for random data.
        vocab_size: of the model; a token beyond it is refused.

    Raises:
        DataError: a source is missing, malformed or empty, or no token of it is trained.
    """
    if settings.is_random:
        return _random(settings, vocab_size)
    if coder is None:
        raise DataError(
            f"data.source={settings.named} needs a tokenizer, which this model has not; use random data"
        )
    packing = settings.packing(coder.pad_id)
    builder = ExampleBuilder()
    parts = open_parts(settings, coder)
    for part in parts:
        read_part(part, settings, builder)
    held = _held_out(parts, settings, coder, builder)
    examples = builder.finish()
    check_vocabulary(examples, vocab_size)
    numbers = [number for some in held for number in some.numbers()]
    held_out = packing.packed(examples, numbers)
    streams: list[StreamedSequences] = []
    trained: list[TrainingSequences] = []
    counts = Counts()
    for index, part in enumerate(parts):
        if part.collection is None:
            position = settings.position_of(index, weighted=len(parts) > 1)
            streams.append(
                StreamedSequences(
                    part.reader,
                    packing,
                    vocab_size=vocab_size,
                    held_out=0.0 if settings.eval_source is not None else settings.eval_fraction,
                    position=position,
                    read=settings.read,
                )
            )
            trained.append(streams[-1])
            continue
        chosen = part.trained(settings)
        part_counts = part.collection.counts(chosen) + Counts(wrong=part.collection.wrong)
        if not part_counts.trained_tokens:
            raise DataError(nothing_trained(part.name, part_counts, settings.seq_len))
        counts += part_counts
        packed = packing.packed(examples, part.collection.numbers(chosen))
        trained.append(OrderedSequences(packed, packing.order(packed)))
    weights = [part.weight or 1.0 for part in parts]
    names = [part.name for part in parts]
    return Dataset(
        train=trained[0] if len(trained) == 1 else Mixture(names, trained, weights, settings.seed),
        held_out=held_out.first(settings.eval_sequences) if len(held_out) else None,
        counts=counts,
        held_out_counts=sum((some.counts() for some in held), Counts()),
        questions=tuple(_questions(held)),
        notes=(*settings.notes, *_about_held_out(parts, settings, len(held_out))),
        streams=tuple(streams),
        collected=_collected(parts, held),
    )


def _random(settings: DataSettings, vocab_size: int) -> Dataset:
    seq_len, seed = settings.seq_len, settings.seed
    apart = (settings.eval_sequences or RANDOM_HELD_OUT) if settings.eval_fraction else 0
    train, rest = random_sequences(vocab_size, seq_len, apart, seed)
    counts, held_out_counts = full_counts(len(train), seq_len), full_counts(len(rest), seq_len)
    ordered = OrderedSequences(train, Packing(seq_len, 0, seed=seed).order(train))
    return Dataset(ordered, rest if apart else None, counts, held_out_counts)


def _held_out(
    parts: Sequence[Part], settings: DataSettings, coder: Coder, builder: ExampleBuilder
) -> list[Held]:
    """What is held out of the sources, or all of the source that is named for it."""
    if settings.eval_source is None:
        return [held_out_of(part, settings, builder) for part in parts]
    held = []
    for part in open_parts(settings, coder, evaluation=True):
        read_part(part, settings, builder)
        held.append(held_out_of(part, settings, builder))
        part.close()
        if not held[-1].counts().trained_tokens:
            raise DataError(nothing_trained(part.name, held[-1].counts(), settings.seq_len))
    return held


def _about_stream(stream: StreamedSequences) -> str:
    chunks = counted(stream.chunks_per_epoch, "chunk", "chunks")
    return (
        f"{stream.name} is larger than is held in memory: it is read in {chunks} from all over it, the next one beside "
        "the training; the counts are those of what has been read"
    )


def _questions(held: Sequence[Held]) -> list[Question]:
    """The questions of all sources: those that are held out first, by rank."""
    found = []
    for some in held:
        ranks = some.ranks()
        found += [(rank not in ranks, rank, question) for rank, question in some.collection.questions]
    return [question for _, _, question in sorted(found, key=lambda item: item[:2])[:QUESTIONS]]


def _collected(parts: Sequence[Part], held: Sequence[Held]) -> tuple[Collected, ...]:
    """What is told of the collections, of each once: of a source in memory the held-out part is in its collection."""
    found: list[Collection] = []
    for collection in (*(part.collection for part in parts), *(some.collection for some in held)):
        if collection is not None and not any(collection is other for other in found):
            found.append(collection)
    return tuple(
        Collected(Counts(), one.kinds, one.with_special_text, one.answers_not_found) for one in found
    )


def _about_records(collected: Sequence[Collected]) -> Iterator[str]:
    kinds: Counter[str] = Counter()
    for some in collected:
        kinds += some.kinds
    if len(kinds) > 1:
        listed = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
        yield f"the records are of several kinds: {listed}; data.kind takes only one of them"
    special = sum(some.with_special_text for some in collected)
    if special:
        yield (
            f"{counted(special, 'example contains', 'examples contain')} the text of special tokens, such as"
            " an end of turn, which the model reads as such"
        )
    not_found = sum(some.answers_not_found for some in collected)
    if not_found:
        yield (
            f"{counted(not_found, 'answer is', 'answers are')} not trained: the chat template writes"
            " them otherwise, or not at all, once more messages follow"
        )


def _about_held_out(parts: Sequence[Part], settings: DataSettings, held_out: int) -> Iterator[str]:
    if held_out or not (settings.eval_fraction or settings.eval_source is not None):
        return
    if all(part.collection is not None for part in parts):
        yield "nothing is held out: the data has only one distinct example"
    else:
        yield (
            f"nothing is held out: data.eval_fraction={settings.eval_fraction:g} chose no example of those that "
            "were looked at; raise it, or give data.eval_source"
        )
