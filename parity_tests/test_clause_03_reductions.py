"""Contract clause 3: batchmean, sum, mean, none, per_token; normalizer."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from parity_tests import budget, inputs, oracle
from parity_tests.routes import Route
from tvd_core.contract import NORMALIZED_REDUCTIONS, REDUCTIONS
from tvd_core.reference import tvd_reference

TOKENS, VOCAB = 5, 600


def upstream_for(reduction: str) -> np.ndarray | float:
    """An upstream gradient of the reduction's shape, different in every place."""
    rng = np.random.default_rng(3)
    if reduction == "none":
        return rng.standard_normal((TOKENS, VOCAB)).astype(np.float32)
    if reduction == "per_token":
        return rng.standard_normal(TOKENS).astype(np.float32)
    return -1.75


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("extra", ["plain", "labels", "weights", "labels and weights"])
def test_clause_03_reduction(route: Route, reduction: str, extra: str) -> None:
    p, q = inputs.rows(TOKENS, VOCAB)
    labels = inputs.labels_for(TOKENS, seed=2) if "labels" in extra else None
    weights = inputs.weights_for(TOKENS) if "weights" in extra else None
    result = oracle.check(
        route,
        p,
        q,
        labels,
        weights=weights,
        reduction=reduction,
        upstream=upstream_for(reduction),
    )
    assert result.loss.shape == {"none": p.shape, "per_token": (TOKENS,)}.get(reduction, ())


def test_clause_03_batchmean_is_the_default(route: Route) -> None:
    p, q = inputs.rows(TOKENS, VOCAB)
    default, named = route.loss(p, q), route.loss(p, q, reduction="batchmean")
    oracle.assert_same_bits("loss", default, named)


def test_clause_03_mean_is_batchmean_over_vocab(route: Route) -> None:
    p, q = inputs.rows(TOKENS, VOCAB)
    mean, batchmean = (route.loss(p, q, reduction=r) for r in ("mean", "batchmean"))
    budget.check_loss(mean, np.float64(batchmean) / VOCAB, TOKENS, VOCAB)


@pytest.mark.parametrize("reduction", NORMALIZED_REDUCTIONS)
@pytest.mark.parametrize(
    "normalizer",
    [7, 2.5, np.array(3.0, np.float32), np.array(12, np.int32)],
    ids=["int", "float", "float array", "int array"],
)
def test_clause_03_normalizer_replaces_the_denominator(
    route: Route, reduction: str, normalizer: float | np.ndarray
) -> None:
    p, q = inputs.rows(TOKENS, VOCAB)
    labels, weights = inputs.labels_for(TOKENS, seed=2), inputs.weights_for(TOKENS)
    oracle.check(route, p, q, labels, weights=weights, reduction=reduction, normalizer=normalizer)
    oracle.check(route, p, q, reduction=reduction, normalizer=normalizer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_clause_03_weights_of_any_float_dtype(route: Route, dtype: str) -> None:
    p, q = inputs.rows(TOKENS, VOCAB)
    weights = inputs.cast(inputs.weights_for(TOKENS), dtype)
    oracle.check(route, p, q, weights=weights)
    oracle.check(route, p, q, weights=weights, reduction="per_token", upstream=np.ones(TOKENS))


def test_clause_03_many_tokens(route: Route) -> None:
    """More tokens than the sum over tokens has lanes; an interpreter takes 15 ms a token."""
    tokens = 513 if route.interpreted else 2600
    p, q = inputs.rows(tokens, 3)
    labels, weights = inputs.labels_for(tokens), inputs.weights_for(tokens)
    loss = route.loss(p, q, labels, weights=weights)
    budget.check_loss(loss, tvd_reference(p, q, labels, weights=weights), tokens, 3)


NUMPY_NUMBERS = [
    np.int64(8),
    np.float16(8),
    np.float32(8),
    np.float64(8),
    ml_dtypes.bfloat16(8),
    np.array(8),
    np.array(8, np.float32),
]


@pytest.mark.parametrize("number", NUMPY_NUMBERS, ids=lambda x: f"{x.dtype} {type(x).__name__}")
def test_clause_03_normalizer_may_be_a_numpy_number(route: Route, number: Any) -> None:
    p, q = inputs.rows(3, 40)
    with route.running():
        arrays = route.array(p), route.array(q)
        assert float(route.call(*arrays, normalizer=number)) == float(
            route.call(*arrays, normalizer=8)
        )
        route.call(*arrays, ignore_index=np.int64(5))
