"""Rows of real text: next-token distributions of a trigram teacher and a bigram student.

The text is the English documentation that ships with CPython (``pydoc_data.topics``), cut into
tokens by a byte-level BPE vocabulary trained on it. The models are interpolated counts:

    teacher(w | u, v) = 0.6 * trigram(w | u, v) + 0.4 * bigram(w | v)
    student(w | v)    = bigram(w | v)                       if v was seen at least RELIABLE times
                        0.8 * bigram(w | v) + 0.2 * common(w)                         otherwise

``common`` is the unigram distribution of the COMMON most frequent tokens only, so both models give
most of the vocabulary exactly 0, as distributions truncated by top-k or top-p do. Rows are peaked,
and tied: teacher and student are equal at every common zero, and wherever ``v`` always follows the
same ``u``.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

COMMON = 256
RELIABLE = 8


def corpus() -> str:
    """The English text, in a fixed order."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


@lru_cache(maxsize=2)
def token_ids(vocab: int) -> tuple[NDArray[np.int64], int]:
    """Token ids of the corpus, and the size of the trained vocabulary (at most ``vocab``)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = corpus()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return np.array(tokenizer.encode(text).ids, np.int64), tokenizer.get_vocab_size()


def _histories(*columns: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions sorted by history, and the number of each position's history."""
    key = np.zeros_like(columns[0])
    for column in columns:
        key = key * (int(column.max()) + 1) + column
    number = np.unique(key, return_inverse=True)[1]
    return np.argsort(number, kind="stable"), number


def _conditional(
    histories: tuple[NDArray[np.int64], NDArray[np.int64]],
    following: NDArray[np.int64],
    position: int,
    vocab: int,
) -> NDArray[np.float64]:
    """Relative frequencies of what follows the history at ``position``."""
    order, number = histories
    sorted_numbers = number[order]
    low, high = np.searchsorted(sorted_numbers, [number[position], number[position] + 1])
    counts = np.bincount(following[order[low:high]], minlength=vocab)
    return counts / (high - low)


def text_inputs(tokens: int, vocab: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Student ``p`` and teacher ``q``, float32 ``[tokens, vocab]``, deterministic.

    The positions are spread evenly over the text (and repeat, if there are more tokens than text).
    If the text yields fewer merges than ``vocab`` asks for, the columns beyond the trained
    vocabulary are 0 in every row, like the padding of a model's output layer.
    """
    if vocab < 512:
        raise ValueError(f"text inputs need a vocab of at least 512, got {vocab}")
    ids, size = token_ids(vocab)
    before, last, following = ids[:-2], ids[1:-1], ids[2:]
    bigrams, trigrams = _histories(last), _histories(before, last)
    unigram, seen = np.bincount(ids, minlength=size), np.bincount(last, minlength=size)
    common = np.zeros(size)
    frequent = np.argsort(-unigram, kind="stable")[:COMMON]
    common[frequent] = unigram[frequent] / unigram[frequent].sum()

    p, q = np.zeros((tokens, vocab), np.float32), np.zeros((tokens, vocab), np.float32)
    positions = np.arange(tokens, dtype=np.int64) * len(following) // tokens
    if tokens > len(following):
        positions = np.arange(tokens, dtype=np.int64) % len(following)
    for row, position in enumerate(positions):
        bigram = _conditional(bigrams, following, position, size)
        trigram = _conditional(trigrams, following, position, size)
        reliable = seen[last[position]] >= RELIABLE
        p[row, :size] = bigram if reliable else 0.8 * bigram + 0.2 * common
        q[row, :size] = 0.6 * trigram + 0.4 * bigram
    return p, q
