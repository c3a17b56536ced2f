"""Runs a route and holds what it gives against the float64 oracle and the NumPy bit model."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from parity_tests import budget
from parity_tests.routes import Result, Route, identity
from tvd_core.reference import reduce_float32, tvd_reference, tvd_reference_grad


def check(
    route: Route,
    p: np.ndarray,
    q: np.ndarray,
    labels: np.ndarray | None = None,
    *,
    upstream: Any = 1.0,
    wrt: str = "pq",
    layout: Callable[[Any], Any] = identity,
    **options: Any,
) -> Result:
    """Value and gradients of one call inside the error budget; dtypes as the contract says.

    ``layout`` makes the loss see a view of p and q; outside of it the gradient has to be 0.
    """
    result = route.run(p, q, labels, upstream=upstream, wrt=wrt, layout=layout, **options)
    seen_p, seen_q = layout(p), layout(q)
    expected = tvd_reference(seen_p, seen_q, labels, **options)
    gradients = tvd_reference_grad(seen_p, seen_q, labels, upstream=upstream, **options)
    tokens = math.prod(seen_p.shape[:-1])
    budget.check_loss(result.loss, expected, tokens, seen_p.shape[-1])
    assert (result.dp is not None, result.dq is not None) == ("p" in wrt, "q" in wrt)
    checked = (("dp", result.dp, p, gradients[0]), ("dq", result.dq, q, gradients[1]))
    for name, gradient, x, right in checked:
        if gradient is None:
            continue
        assert (gradient.dtype, gradient.shape) == (x.dtype, x.shape)
        budget.check_gradient(name, layout(gradient), right, tokens, route=route)
        outside = np.ones(x.shape, bool)
        layout(outside)[...] = False
        assert not gradient[outside].any()
    return result


def bits(x: np.ndarray) -> np.ndarray:
    """Bit pattern, so that NaN compares equal to itself and 0 differs from -0."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def assert_same_bits(name: str, actual: np.ndarray, expected: np.ndarray) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
    np.testing.assert_array_equal(bits(actual), bits(expected), err_msg=f"{name}: bits")


def divisor_float32(kept: np.ndarray, vocab: int, reduction: str) -> np.float32:
    """The divisor bit for bit: kept weights in the order of ``reduce_float32``, then the vocab."""
    if reduction not in ("batchmean", "mean"):
        return np.float32(1.0)
    total = reduce_float32(kept)
    return total * np.float32(vocab) if reduction == "mean" else total


def gradient_float32(
    p: np.ndarray, q: np.ndarray, scale: np.ndarray | np.float32, kept: np.ndarray
) -> np.ndarray:
    """dp before its rounding to the dtype of p: the sign of p - q times the float32 scale.

    A 0 is +0 here; which of the two it is, is not promised.
    """
    with np.errstate(invalid="ignore"):
        difference = p.astype(np.float32) - q.astype(np.float32)
        signed = np.select([difference > 0, difference < 0, difference == 0], [1, -1, 0], np.nan)
        gradient = signed.astype(np.float32) * np.asarray(scale, np.float32)[..., None]
    return np.where(kept[..., None] == 0, np.float32(0), gradient + np.float32(0))
