"""Contract clause 5: dL/dp = 0.5 * sign(p - q) * upstream, dL/dq = -dL/dp, each if asked for."""

import numpy as np
import pytest

from parity_tests import inputs, oracle
from parity_tests.routes import Route

TOKENS, VOCAB = 3, 600


@pytest.mark.parametrize("wrt", ["p", "q", "pq"])
def test_clause_05_each_gradient_only_if_asked_for(route: Route, wrt: str) -> None:
    result = oracle.check(route, *inputs.rows(TOKENS, VOCAB), wrt=wrt)
    if wrt == "pq":
        np.testing.assert_array_equal(result.dq, -result.dp)


def test_clause_05_sign_of_ties_and_nan(route: Route) -> None:
    nan, inf = np.nan, np.inf
    p = np.array([[0.5, 0.0, -0.0, nan, 0.5, inf, inf, -inf, 0.25]], np.float32)
    q = np.array([[0.5, -0.0, 0.0, 0.5, nan, inf, -inf, 0.0, 0.5]], np.float32)
    result = route.run(p, q, reduction="sum")
    right = [[0, 0, 0, nan, nan, nan, 0.5, -0.5, -0.5]]
    np.testing.assert_array_equal(result.dp, np.array(right, np.float32))
    np.testing.assert_array_equal(result.dq, -np.array(right, np.float32))
    assert np.isnan(result.loss)


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
@pytest.mark.parametrize("upstream", [0.0, 1.0, -2.0, 1 / 3, 1e4])
def test_clause_05_upstream_gradient(route: Route, reduction: str, upstream: float) -> None:
    p, q = inputs.rows(TOKENS, VOCAB)
    oracle.check(route, p, q, reduction=reduction, upstream=np.float32(upstream))


@pytest.mark.parametrize("reduction", ["batchmean", "none"])
@pytest.mark.parametrize("upstream", [np.nan, np.inf])
def test_clause_05_upstream_that_is_not_finite(
    route: Route, reduction: str, upstream: float
) -> None:
    """An ignored token has gradient 0 by selection; a tie has 0 * upstream, so NaN is seen."""
    p = np.array([[0.5, 0.5], [0.25, 0.75]], np.float32)
    q = np.array([[0.5, 0.25], [0.75, 0.25]], np.float32)
    labels = np.array([1, -100], np.int32)
    shape = p.shape if reduction == "none" else ()
    result = route.run(p, q, labels, reduction=reduction, upstream=np.full(shape, upstream))
    assert not result.dp[1].any() and not result.dq[1].any()
    assert np.isnan(result.dp[0, 0]) and np.isnan(result.dq[0, 0])
    assert not np.isfinite(result.dp[0, 1]) and not np.isfinite(result.dq[0, 1])


@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("upstream", [np.nan, np.inf])
def test_clause_05_upstream_that_is_not_finite_in_whole_tiles(
    kernel_route: Route, upstream: float, dtype: str
) -> None:
    p, q = (inputs.cast(np.tile(x, (2, 2080)), dtype) for x in ([[0.5, 0.5]], [[0.5, 0.25]]))
    result = kernel_route.run(p, q, np.array([1, -100], np.int32), upstream=upstream)
    for gradient in (result.dp.astype(np.float32), result.dq.astype(np.float32)):
        assert not gradient[1].any()
        assert np.isnan(gradient[0, 0::2]).all()
        assert not np.isfinite(gradient[0, 1::2]).any()


@pytest.mark.parametrize("reduction", ["batchmean", "mean"])
def test_clause_05_fp16_gradient_does_not_underflow_on_the_way(
    route: Route, reduction: str
) -> None:
    """0.5 / 2**26 is 0 in fp16; times the upstream gradient it is not."""
    p, q = inputs.rows(3, 600, "float16")
    result = oracle.check(
        route, p, q, reduction=reduction, normalizer=2**26, upstream=np.float32(2.0**20)
    )
    assert np.abs(result.dp.astype(np.float64)).max() > 0


@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_clause_05_gradient_is_rounded_once(route: Route, dtype: str) -> None:
    """1 / 3 through two roundings (to the dtype before and after a scale) ends elsewhere."""
    if dtype == "bfloat16" and (route.name, route.interpreted) == ("torch-triton", True):
        pytest.skip("Triton's interpreter truncates float32 to bfloat16")
    p = inputs.cast(np.array([[0.75, 0.25]] * 7), dtype)
    q = inputs.cast(np.array([[0.25, 0.75]] * 7), dtype)
    upstream = np.float32(1 / 3)
    result = route.run(p, q, upstream=upstream)
    once = inputs.cast((upstream * np.float32(0.5)) / np.float32(7), dtype)
    spacing = float(np.spacing(np.float32(once))) if dtype == "float32" else 0.0
    assert abs(float(result.dp[0, 0]) - float(once)) <= spacing
    assert result.dp[0, 1] == -result.dp[0, 0] == result.dq[0, 0]
