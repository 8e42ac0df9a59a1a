# SPDX-License-Identifier: Apache-2.0
"""Sequences of tokens drawn at random, all trained: data for models without a tokenizer, and for measuring."""

from __future__ import annotations

import numpy as np

from memascend_jax.data.collection import Counts
from memascend_jax.data.examples import Encoded, ExampleBuilder
from memascend_jax.data.packing import PackedExamples, pack

RANDOM_HELD_OUT = 16
#: Up to this many tokens or sequences are drawn; the epochs after them repeat.
_MOST_TOKENS = 1 << 20
_MOST_SEQUENCES = 512
_FEWEST_SEQUENCES = 8


def random_sequences(
    vocab_size: int, seq_len: int, held_out: int, seed: int
) -> tuple[PackedExamples, PackedExamples]:
    """Returns training and ``held_out`` held-out sequences, uniform over the vocabulary."""
    count = max(_FEWEST_SEQUENCES, min(_MOST_SEQUENCES, _MOST_TOKENS // seq_len))
    generator = np.random.Generator(np.random.Philox(key=[seed, 0x72616E64]))
    builder = ExampleBuilder()
    for _ in range(count + held_out):
        tokens = generator.integers(0, vocab_size, seq_len + 1, np.int32)
        builder.add(Encoded(tokens, np.ones(seq_len + 1, np.bool_)))
    examples = builder.finish()
    train = pack(examples, range(count), seq_len, pad_id=0, seed=seed)
    return train, pack(examples, range(count, count + held_out), seq_len, pad_id=0, seed=seed)


def full_counts(sequences: int, seq_len: int) -> Counts:
    """Returns the counts of ``sequences`` examples that fill a sequence each."""
    return Counts(kept=sequences, tokens=sequences * (seq_len + 1), trained_tokens=sequences * seq_len)
