"""Clause 7 for logits: the same bits from run to run, for a row alone, on every kernel route."""

import functools
from typing import Any

import numpy as np
import pytest

from parity_tests import routes
from parity_tests.logits_budget import logits
from parity_tests.oracle import assert_same_bits
from parity_tests.routes import Route

# A window, several with a tail, rows that start anywhere.
VOCABS = (96, 4096, 20000, 1271, 8207)
SAMPLE_TOO_LOW = 20001


def results(
    route: Route, s: np.ndarray, t: np.ndarray, **options: Any
) -> dict[str, np.ndarray | None]:
    upstream = np.linspace(0.5, 2, len(s))
    result = route.run(
        s, t, function="tvd_from_logits", reduction="per_token", upstream=upstream, **options
    )
    return {"per token": result.loss, "student": result.dp, "teacher": result.dq}


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name, x in first.items():
        assert_same_bits(name, x, second[name])


@functools.cache
def inputs(tokens: int, vocab: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    s, t = logits(tokens, vocab, dtype)
    if vocab == SAMPLE_TOO_LOW:  # the sums are made again from the true maximum
        s[:, :4000], t[:, 5000] = -np.inf, 400
    return s, t


@pytest.mark.parametrize("vocab", [*VOCABS, SAMPLE_TOO_LOW])
def test_logits_run_to_run_and_a_row_alone(logits_kernel_route: Route, vocab: int) -> None:
    s, t = inputs(5, vocab)
    together = results(logits_kernel_route, s, t)
    assert_same(together, results(logits_kernel_route, s, t))
    for row in (0, 3):
        upstream = np.linspace(0.5, 2, 5)[row : row + 1]
        alone = logits_kernel_route.run(
            s[row : row + 1],
            t[row : row + 1],
            function="tvd_from_logits",
            reduction="per_token",
            upstream=upstream,
        )
        assert_same_bits("per token", alone.loss, together["per token"][row : row + 1])
        assert_same_bits("student", alone.dp, together["student"][row : row + 1])
        assert_same_bits("teacher", alone.dq, together["teacher"][row : row + 1])


@pytest.mark.parametrize("vocab", [*VOCABS, SAMPLE_TOO_LOW, 50257, 151936])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_routes_agree_bit_for_bit(vocab: int, dtype: str) -> None:
    compiled = [r for r in routes.runnable(kernels=True) if r.has_logits and r.compiled_on_gpu]
    if len(compiled) < 2:
        pytest.skip("needs two kernel routes compiled on a GPU")
    s, t = inputs(7, vocab, dtype)
    first, *others = (results(route, s, t, temperature=1.5) for route in compiled)
    for other in others:
        assert_same(first, other)


@pytest.mark.parametrize("reduction", ["batchmean", "sum", "mean"])
def test_logits_reductions_agree_bit_for_bit(reduction: str) -> None:
    compiled = [r for r in routes.runnable(kernels=True) if r.has_logits and r.compiled_on_gpu]
    if len(compiled) < 2:
        pytest.skip("needs two kernel routes compiled on a GPU")
    s, t = inputs(700, 96)
    weights = np.random.default_rng(0).uniform(0.5, 2, 700).astype(np.float32)
    options = {"function": "tvd_from_logits", "reduction": reduction, "weights": weights}
    first, *others = (route.run(s, t, upstream=3.7, **options) for route in compiled)
    for other in others:
        assert_same_bits("loss", first.loss, other.loss)
        assert_same_bits("student", first.dp, other.dp)
