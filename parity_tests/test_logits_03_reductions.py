"""Clauses 3, 4 and 6 for logits: reductions, ignored tokens, dtypes."""

from typing import Any

import numpy as np
import pytest

from parity_tests import inputs, logits_oracle, routes
from parity_tests.logits_budget import logits
from parity_tests.routes import Route
from parity_tests.x64 import enable_x64
from tvd_core.contract import NORMALIZED_REDUCTIONS, REDUCTIONS, TOKEN_REDUCTIONS
from tvd_core.reference import logits_reference, logits_reference_grad

TOKENS, VOCAB = 5, 600
FUNCTIONS = ("tvd_from_logits", "acceptance_loss", "hybrid_loss", "cross_entropy_tvd_loss")


def upstream_for(reduction: str) -> np.ndarray | float:
    rng = np.random.default_rng(3)
    shape = {"none": (TOKENS, VOCAB), "per_token": (TOKENS,)}.get(reduction)
    return -1.75 if shape is None else rng.standard_normal(shape).astype(np.float32)


def without_kernels(route: Route) -> Route:
    if route.is_kernel:
        pytest.skip("kernels have no reduction 'none' of logits")
    return route


@pytest.mark.parametrize(
    ("reduction", "extra"),
    inputs.latin(TOKEN_REDUCTIONS, ["plain", "labels", "weights", "labels and weights"], 2),
)
def test_logits_reduction(logits_route: Route, reduction: str, extra: str) -> None:
    s, t = logits(TOKENS, VOCAB)
    labels = inputs.labels_for(TOKENS, seed=2) if "labels" in extra else None
    weights = inputs.weights_for(TOKENS) if "weights" in extra else None
    upstream = upstream_for(reduction)
    logits_oracle.check(
        logits_route, s, t, labels, weights=weights, reduction=reduction, upstream=upstream
    )


@pytest.mark.parametrize("reduction", NORMALIZED_REDUCTIONS)
@pytest.mark.parametrize("normalizer", [7, 2.5, np.array(3.0, np.float32)], ids=str)
def test_logits_normalizer(logits_route: Route, reduction: str, normalizer: Any) -> None:
    s, t = logits(TOKENS, VOCAB)
    options = {"reduction": reduction, "normalizer": normalizer}
    logits_oracle.check(logits_route, s, t, **options)
    weights = inputs.weights_for(TOKENS)
    logits_oracle.check(logits_route, s, t, inputs.labels_for(TOKENS), weights=weights, **options)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_logits_reduction_none(logits_route: Route, temperature: float) -> None:
    """Element by element, as far as the sign of p - q is certain; the budgets are of rows."""
    route = without_kernels(logits_route)
    s, t = logits(TOKENS, VOCAB)
    options = {
        "labels": inputs.labels_for(TOKENS, seed=2),
        "weights": inputs.weights_for(TOKENS),
        "reduction": "none",
        "temperature": temperature,
    }
    upstream = upstream_for("none")
    result = route.run(s, t, function="tvd_from_logits", upstream=upstream, **options)
    assert result.loss.shape == s.shape
    np.testing.assert_allclose(result.loss, logits_reference(s, t, **options), atol=1e-6)
    right = logits_reference_grad(s, t, upstream=upstream, **options)
    for actual, expected in zip((result.dp, result.dq), right, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)
        assert not actual[~expected.any(-1)].any()  # ignored


def test_logits_reduction_none_of_no_named_implementation(logits_torch_route: Route) -> None:
    import tvd_torch

    s, t = (logits_torch_route.array(x) for x in logits(2, 70))
    assert tvd_torch.tvd_from_logits(s, t, reduction="none").shape == s.shape


# --- ignored tokens ------------------------------------------------------------------------------


def ignoring(how: str) -> dict[str, np.ndarray]:
    """Options that ignore tokens 0 and 2."""
    if how == "labels":
        return {"labels": np.array([-100, 5, -100, 0], np.int32)}
    weights = np.array([0.0, 1.5, -0.0, 0.5], np.float32)
    return {"labels": np.array([1, 2, 3, 4], np.int32), "weights": weights}


@pytest.mark.parametrize(
    ("function", "reduction"), inputs.latin(FUNCTIONS, ["batchmean", "per_token"])
)
@pytest.mark.parametrize("how", ["labels", "weights"])
def test_logits_ignored_rows_may_hold_anything(
    logits_route: Route, function: str, reduction: str, how: str
) -> None:
    s, t = logits(4, VOCAB, masked=0.0)
    options = {"function": function, "reduction": reduction, **ignoring(how)}
    upstream = np.array([np.nan, 3.0, np.inf, 3.0]) if reduction == "per_token" else 3.0
    clean = logits_route.run(s, t, upstream=upstream, **options)
    s[0], t[2], s[2, 1] = np.nan, -np.inf, np.inf
    poisoned = logits_route.run(s, t, upstream=upstream, **options)
    for name in ("loss", "dp", "dq"):
        np.testing.assert_array_equal(getattr(clean, name), getattr(poisoned, name))
    assert np.isfinite(poisoned.loss).all() and poisoned.loss.any()
    for gradient in (poisoned.dp, poisoned.dq):
        assert not gradient[[0, 2]].any() and np.isfinite(gradient).all()
        assert gradient[[1, 3]].any(-1).all()


@pytest.mark.parametrize("how", ["labels", "weights"])
def test_logits_ignored_rows_may_hold_anything_in_none(logits_route: Route, how: str) -> None:
    route = without_kernels(logits_route)
    s, t = logits(4, VOCAB)
    s[0], t[2] = np.nan, -np.inf
    upstream = np.full((4, VOCAB), 3.0)
    upstream[0] = np.nan
    options = {"function": "tvd_from_logits", "reduction": "none", **ignoring(how)}
    result = route.run(s, t, upstream=upstream, **options)
    for x in (result.loss, result.dp, result.dq):
        assert np.isfinite(x).all() and not x[[0, 2]].any() and x[[1, 3]].any(-1).all()


@pytest.mark.parametrize(("function", "reduction"), inputs.latin(FUNCTIONS, TOKEN_REDUCTIONS, 2))
def test_logits_no_token_kept(logits_route: Route, function: str, reduction: str) -> None:
    s, t = logits(3, 70)
    s[1] = np.nan
    labels = np.full(3, -100, np.int32)
    upstream = np.ones(3) if reduction == "per_token" else 1.0
    result = logits_route.run(
        s, t, labels, function=function, reduction=reduction, upstream=upstream
    )
    assert not result.loss.any() and not result.dp.any() and not result.dq.any()


# --- dtypes --------------------------------------------------------------------------------------


# Of 1001 and 4092 elements, rows of two dtypes are filled up to two widths for Pallas.
DTYPE_CASES = [(*pair, 600) for pair in inputs.DTYPE_PAIRS]
DTYPE_CASES += [("float32", "bfloat16", 1001), ("float16", "float32", 4092)]


@pytest.mark.parametrize(("s_dtype", "t_dtype", "vocab"), DTYPE_CASES)
def test_logits_dtype_pair(logits_route: Route, s_dtype: str, t_dtype: str, vocab: int) -> None:
    """Gradients in their inputs' dtypes and a float32 loss: checked by ``logits_oracle``."""
    s, t = logits(3, vocab, s_dtype, t_dtype)
    if vocab > 2048:  # a row that is summed again, the teacher's end included
        s[1, :2000], t[1, vocab - 2] = -np.inf, 40
    logits_oracle.check(logits_route, s, t, upstream=64.0, temperature=1.5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_logits_float64_in_eager_pytorch(reduction: str) -> None:
    torch = pytest.importorskip("torch")
    import tvd_torch

    arrays = [x.astype(np.float64) for x in logits(3, 70)]
    s, t = (torch.tensor(x, requires_grad=True) for x in arrays)
    loss = tvd_torch.tvd_from_logits(s, t, reduction=reduction, temperature=1.3)
    loss.sum().backward()
    assert loss.dtype == s.grad.dtype == torch.float64
    _check_float64(arrays, reduction, loss.detach().numpy(), s.grad.numpy(), t.grad.numpy())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_logits_float64_in_xla(reduction: str) -> None:
    pytest.importorskip("jax")
    arrays = [x.astype(np.float64) for x in logits(3, 70)]
    options = {"reduction": reduction, "temperature": 1.3, "function": "tvd_from_logits"}
    with enable_x64():
        result = routes.get("jax-xla").run(*arrays, **options)
    assert result.loss.dtype == result.dp.dtype == np.float64
    _check_float64(arrays, reduction, result.loss, result.dp, result.dq)


def _check_float64(arrays: Any, reduction: str, *actual: np.ndarray) -> None:
    options = {"reduction": reduction, "temperature": 1.3}
    shape = {"none": (3, 70), "per_token": (3,)}.get(reduction, ())
    right = logits_reference_grad(*arrays, upstream=np.ones(shape), **options)
    expected = logits_reference(*arrays, **options), *right
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-15)
