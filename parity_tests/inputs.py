"""Inputs of the parity tests, made once in NumPy and handed to every route as they are."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}
# Every dtype with itself, and every dtype mixed with another on either side.
DTYPE_PAIRS = (
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "bfloat16"),
    ("bfloat16", "float16"),
    ("float16", "float32"),
)
# Tail only, ends of a lane group and of a tile, one element more and less, several tiles.
TILE_EDGES = (1, 3, 511, 512, 513, 2047, 2048, 2049, 4500)


def cast(x: Any, dtype: str) -> np.ndarray:
    """``x`` in the dtype of that name."""
    return np.asarray(x).astype(DTYPES[dtype])


def _softmax_rows(rng: np.random.Generator, tokens: int, vocab: int) -> np.ndarray:
    logits = 3.0 * rng.standard_normal((tokens, vocab))
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True, initial=-np.inf))
    return weights / weights.sum(-1, keepdims=True)


def rows(
    tokens: int, vocab: int, p_dtype: str = "float32", q_dtype: str | None = None, *, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Peaked random distributions with ties and exact zeros, as real rows have them."""
    rng = np.random.default_rng([seed, tokens, vocab])
    p, q = _softmax_rows(rng, tokens, vocab), _softmax_rows(rng, tokens, vocab)
    # Exact in every dtype, so that a tie stays one after the casts to two of them.
    tie = rng.choice([0.0, 0.25, 2.0**-7], size=(tokens, vocab))
    tied = rng.random((tokens, vocab)) < 0.2
    p, q = np.where(tied, tie, p), np.where(tied, tie, q)
    q = np.where(rng.random((tokens, vocab)) < 0.1, 0.0, q)
    return cast(p, p_dtype), cast(q, q_dtype or p_dtype)


def labels_for(tokens: int, *, ignored: float = 0.3, seed: int = 0) -> np.ndarray:
    """Labels, some of which are -100. The first token is kept."""
    rng = np.random.default_rng([seed, tokens])
    labels = rng.integers(0, 1000, tokens).astype(np.int32)
    labels[1:][rng.random(max(tokens - 1, 0)) < ignored] = -100
    return labels


def weights_for(tokens: int, *, seed: int = 0) -> np.ndarray:
    """Float32 weights, every third of which is 0."""
    rng = np.random.default_rng([seed, tokens, 7])
    weights = rng.uniform(0.25, 3.0, tokens).astype(np.float32)
    weights[2::3] = 0.0
    return weights


def latin(first: Sequence[Any], second: Sequence[Any], times: int = 1) -> list[tuple[Any, Any]]:
    """Pairs in which every value of both comes up, each with ``times`` different partners or all.

    For parameters that meet in one line of the code, where the product would test that line again.
    """
    count = max(len(first), len(second))
    return [
        (first[i % len(first)], second[(i + shift) % len(second)])
        for shift in range(times)
        for i in range(count)
    ]
