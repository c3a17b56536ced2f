"""Contract clause 4: ignored tokens contribute exactly 0, whatever their rows hold."""

import numpy as np
import pytest

from parity_tests import inputs, oracle
from parity_tests.routes import Route
from tvd_core.contract import REDUCTIONS

TOKENS, VOCAB = 4, 600


def upstream_for(reduction: str) -> np.ndarray | float:
    shape = {"none": (TOKENS, VOCAB), "per_token": (TOKENS,)}.get(reduction, ())
    return np.full(shape, 3.0)


def ignoring(how: str, dtype: type = np.int32) -> dict[str, np.ndarray]:
    """Options that ignore tokens 0 and 2."""
    if how == "labels":
        return {"labels": np.array([-100, 5, -100, 0], dtype)}
    return {"weights": np.array([0.0, 1.5, -0.0, 0.5], np.float32)}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("how", ["labels", "weights"])
def test_clause_04_ignored_rows_may_hold_anything(
    route: Route, reduction: str, poison: float, how: str
) -> None:
    p, q = inputs.rows(TOKENS, VOCAB)
    clean = oracle.check(
        route, p, q, **ignoring(how), reduction=reduction, upstream=upstream_for(reduction)
    )
    p[0], q[2], p[2, 1] = poison, -poison, poison
    poisoned = oracle.check(
        route, p, q, **ignoring(how), reduction=reduction, upstream=upstream_for(reduction)
    )
    for name in ("loss", "dp", "dq"):
        np.testing.assert_array_equal(getattr(clean, name), getattr(poisoned, name))
    assert not poisoned.dp[[0, 2]].any() and not poisoned.dq[[0, 2]].any()


@pytest.mark.parametrize("reduction", ["batchmean", "per_token", "none"])
@pytest.mark.parametrize("how", ["labels", "weights"])
def test_clause_04_ignored_rows_may_hold_anything_in_whole_tiles(
    kernel_route: Route, reduction: str, how: str
) -> None:
    """The kernels take tiles that are aligned and full on a way of their own."""
    vocab = 4160  # two of them, and a part of one
    p, q = inputs.rows(TOKENS, vocab)
    p[0], q[2, 1] = np.nan, np.inf
    shape = {"none": (TOKENS, vocab), "per_token": (TOKENS,)}.get(reduction, ())
    upstream = np.full(shape, 3.0)
    if shape:
        upstream[0] = np.nan
    result = oracle.check(
        kernel_route, p, q, **ignoring(how), reduction=reduction, upstream=upstream
    )
    assert np.isfinite(result.loss).all()
    assert not result.dp[[0, 2]].any() and not result.dq[[0, 2]].any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("how", ["labels", "weights"])
def test_clause_04_no_token_kept(route: Route, reduction: str, how: str) -> None:
    p, q = inputs.rows(TOKENS, VOCAB)
    p[1] = np.nan
    nothing = {
        "labels": {"labels": np.full(TOKENS, -100, np.int32)},
        "weights": {"weights": np.zeros(TOKENS, np.float32)},
    }[how]
    result = oracle.check(
        route, p, q, **nothing, reduction=reduction, upstream=upstream_for(reduction)
    )
    assert not result.loss.any() and not result.dp.any() and not result.dq.any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_clause_04_no_token_at_all(route: Route, reduction: str) -> None:
    p, q = inputs.rows(0, VOCAB)
    shape = {"none": (0, VOCAB), "per_token": (0,)}.get(reduction, ())
    upstream = np.ones(shape)
    result = oracle.check(route, p, q, reduction=reduction, upstream=upstream)
    assert result.loss.shape == shape
    assert result.dp.shape == result.dq.shape == (0, VOCAB)
    labels, weights = np.zeros(0, np.int32), np.zeros(0, np.float32)
    oracle.check(route, p, q, labels, weights=weights, reduction=reduction, upstream=upstream)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8])
def test_clause_04_labels_of_any_integer_dtype(route: Route, dtype: type) -> None:
    """-100 is 156 in uint8: those labels do not match, and no token is ignored."""
    p, q = inputs.rows(TOKENS, VOCAB)
    labels = np.array([-100, 5, -100, 0], np.int64).astype(dtype)
    oracle.check(route, p, q, labels, reduction="sum")


@pytest.mark.parametrize("ignore_index", [0, 7, -1, 2**31 - 1])
def test_clause_04_ignore_index(route: Route, ignore_index: int) -> None:
    p, q = inputs.rows(TOKENS, VOCAB)
    labels = np.array([ignore_index, 5, ignore_index, -100], np.int32)
    oracle.check(route, p, q, labels, ignore_index=ignore_index)


@pytest.mark.parametrize("ignore_index", [2**31 - 100 + 2**31, -(2**40), 2**62])
def test_clause_04_ignore_index_beyond_the_labels_dtype_matches_nothing(
    route: Route, ignore_index: int
) -> None:
    """2**32 - 100 must not wrap around to -100 in a 32-bit comparison."""
    p, q = inputs.rows(TOKENS, VOCAB)
    labels = np.array([-100, 5, -100, 0], np.int32)
    oracle.check(route, p, q, labels, ignore_index=ignore_index)


def test_clause_04_zero_loss_of_kept_tokens_is_zero_whatever_the_divisor(route: Route) -> None:
    p, _ = inputs.rows(TOKENS, VOCAB)
    weights = np.array([1.0, -1.0, 2.0, -2.0], np.float32)  # sum to 0
    assert route.loss(p, p, weights=weights) == 0


def test_clause_04_wide_labels_are_not_narrowed(route: Route) -> None:
    """2**32 - 100 is -100 in 32 bits, and 2**64 - 100 is in 64: neither label is ignored."""
    p, q = inputs.rows(2, 40)
    everything = route.loss(p, q, reduction="sum")
    wide = np.array([2**32 - 100, 1])
    for labels in (wide, wide.astype(np.uint64), np.array([2**64 - 100, 1], np.uint64)):
        given = labels if route.framework == "jax" else route.array(labels)
        with route.running():
            loss = route.call(route.array(p), route.array(q), given, reduction="sum")
        # Not to the bit: XLA sums in another order outside of jit. Ignoring a token halves it.
        assert float(loss) == pytest.approx(float(everything), rel=1e-6)


def test_clause_04_a_total_of_zero_keeps_its_gradient(route: Route) -> None:
    """Weights that cancel make the loss 0, and not the divisor of the gradient 1."""
    p = np.array([[0.25, 0.75], [0.5, 0.5]], np.float32)
    q = np.array([[0.5, 0.5], [0.0, 1.0]], np.float32)
    dp = route.run(p, q, weights=np.array([4.0, -2.0], np.float32)).dp
    np.testing.assert_array_equal(dp, [[-1.0, 1.0], [-0.5, 0.5]])
