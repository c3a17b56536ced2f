"""Clauses 1, 2 and 9 for logits: tvd_loss of the softmaxes; any shape, vocab and temperature."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from parity_tests import inputs, logits_oracle, routes
from parity_tests.logits_budget import logits
from parity_tests.routes import Route
from tvd_core.reference import logits_reference, logits_reference_grad, tvd_reference

INF = np.inf
# One element, a few, no multiple of 16, whole windows, a large vocabulary with a tail.
VOCABS = (1, 2, 3, 1271, 4096, 8192, 50257)
LEADING = [(), (1,), (2, 3), (1, 2, 1)]


def run(route: Route, *arrays: Any, **options: Any) -> routes.Result:
    return route.run(*arrays, function="tvd_from_logits", **options)


@pytest.mark.parametrize("vocab", VOCABS)
def test_logits_value_and_gradient(logits_route: Route, vocab: int) -> None:
    logits_oracle.check(logits_route, *logits(2, vocab), upstream=-1.75)


@pytest.mark.parametrize("temperature", [0.25, 0.7, 3.0, 100.0])
def test_logits_temperature(logits_route: Route, temperature: float) -> None:
    logits_oracle.check(logits_route, *logits(3, 600), temperature=temperature)


@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_logits_any_leading_shape(logits_route: Route, leading: tuple[int, ...]) -> None:
    s, t = (x.reshape(*leading, 70) for x in logits(math.prod(leading), 70))
    result = logits_oracle.check(
        logits_route, s, t, reduction="per_token", upstream=np.ones(leading)
    )
    assert result.loss.shape == leading
    assert logits_oracle.check(logits_route, s, t).loss.shape == ()


@pytest.mark.parametrize("vocab", [3, 600, 4160])
def test_logits_that_are_equal_have_distance_and_gradient_0(
    logits_route: Route, vocab: int
) -> None:
    s, _ = logits(3, vocab)
    result = run(logits_route, s, s)
    assert result.loss == 0 and not result.dp.any() and not result.dq.any()


def test_logits_that_share_no_token_have_distance_1(logits_route: Route) -> None:
    s, t = logits(2, 600, masked=0.0)
    s[:, ::2], t[:, 1::2] = -INF, -INF
    result = run(logits_route, s, t, reduction="per_token")
    np.testing.assert_allclose(result.loss, 1.0, rtol=2e-6)
    assert np.isfinite(result.dp).all() and np.isfinite(result.dq).all()


def test_logits_masked_elements_have_probability_and_gradient_0(logits_route: Route) -> None:
    """A masked element is as good as one that is not there."""
    s, t = logits(3, 600, masked=0.0)
    masked = np.zeros(600, bool)
    masked[5::7] = True
    masked_s, masked_t = (np.where(masked, -INF, x).astype(np.float32) for x in (s, t))
    result = logits_oracle.check(logits_route, masked_s, masked_t)
    assert not result.dp[:, masked].any() and not result.dq[:, masked].any()
    short = logits_reference(s[:, ~masked], t[:, ~masked])
    np.testing.assert_allclose(result.loss, short, rtol=1e-5)


@pytest.mark.parametrize("wrong", ["all masked", "NaN", "inf"])
@pytest.mark.parametrize("which", ["student", "teacher"])
def test_logits_row_that_is_no_distribution_is_seen(
    logits_route: Route, wrong: str, which: str
) -> None:
    s, t = logits(3, 600)
    x = s if which == "student" else t
    if wrong == "all masked":
        x[1] = -INF
    else:
        x[1, 7] = {"NaN": np.nan, "inf": INF}[wrong]
    result = run(logits_route, s, t, reduction="per_token", upstream=np.ones(3))
    np.testing.assert_array_equal(np.isnan(result.loss), [False, True, False])
    gradient = result.dp if which == "student" else result.dq
    assert np.isnan(gradient[1]).any()
    for x in (result.dp, result.dq):
        assert np.isfinite(x[[0, 2]]).all()


@pytest.mark.parametrize("level", [1e4, -1e4])
def test_logits_do_not_overflow(logits_route: Route, level: float) -> None:
    """Shifted by what is exact: the budget takes the shift into its difference from the maximum."""
    s, t = (np.round(x * 64) / 64 for x in logits(2, 600))
    shifted_s, shifted_t = (np.float32(x + level) for x in (s, t))
    plain = run(logits_route, np.float32(s), np.float32(t))
    shifted = run(logits_route, shifted_s, shifted_t)
    np.testing.assert_array_equal(shifted_s - np.float32(level), np.float32(s))
    assert np.isfinite(shifted.loss)
    # A kernel may scale before it subtracts: |level| * log2(e) roundings of 2**-24 in an exponent.
    np.testing.assert_allclose(shifted.loss, plain.loss, rtol=4 * 1e4 * 2.0**-24)


@pytest.mark.parametrize(
    ("dtype", "temperature"),
    # Not float16 at 1e4: there its lowest number, -65504, is a logit like any other.
    [("float32", 0.5), ("float32", 1e4), ("bfloat16", 1.0), ("float16", 1.0)],
)
def test_logits_masked_by_the_lowest_number(
    logits_route: Route, dtype: str, temperature: float
) -> None:
    """Programs mask with finfo.min as well as with -inf; the student's mask covers any sample."""
    plain, masks = logits(2, 2100, dtype), []
    for value in (-INF, ml_dtypes.finfo(inputs.DTYPES[dtype]).min):
        s, t = (x.copy() for x in plain)
        s[:, :2080], t[1, 1:] = value, value
        masks.append(run(logits_route, s, t, temperature=temperature, upstream=3.0))
    for name in ("loss", "dp", "dq"):
        np.testing.assert_array_equal(getattr(masks[1], name), getattr(masks[0], name))
        assert np.isfinite(masks[0].loss)


@pytest.mark.parametrize("level", [1e8, -1e8, float(np.finfo(np.float32).min)])
def test_logits_of_one_enormous_level(logits_route: Route, level: float) -> None:
    """Uniform rows. Kernels scale before they subtract: NaN, not a wrong number, beyond 1e9."""
    x = np.full((1, 600), level, np.float32)
    s, t = x.copy(), x.copy()
    s[0, 300:], t[0, :300] = -INF, -INF
    result = run(logits_route, s, t)
    if abs(level) > 1e9 and logits_route.is_kernel:
        assert np.isnan(result.loss) and np.isnan(result.dp).any() and np.isnan(result.dq).any()
    else:
        np.testing.assert_allclose(result.loss, 1.0, rtol=1e-6)
        for gradient in (result.dp, result.dq):
            np.testing.assert_allclose(gradient, 0.0, atol=1e-9)


def test_logits_far_apart(logits_route: Route) -> None:
    s = np.array([[1e4, -1e4, 0.0, 9999.0], [-1e4, 1e4, 0.0, 0.0]], np.float32)
    t = np.array([[9999.0, -1e4, 0.0, 1e4], [1e4, -1e4, -INF, 0.0]], np.float32)
    result = run(logits_route, s, t, reduction="per_token", upstream=np.ones(2))
    np.testing.assert_allclose(result.loss, [math.tanh(0.5), 1.0], rtol=2e-3)
    assert np.isfinite(result.dp).all() and np.isfinite(result.dq).all()


@pytest.mark.parametrize("temperature", [2.0**-126, 1e-30, 1e30, 3.4028234e38])
def test_logits_extreme_temperature(logits_route: Route, temperature: float) -> None:
    """Cold: the largest logit takes all. Hot: every logit but -inf is alike."""
    s = np.array([[1e4, -1e4, 3.0, -INF], [1.0, 2.0, -INF, 0.0]], np.float32)
    t = np.array([[1e4, 2.0, -3.0, 0.0], [3.0, 2.0, 1.0, -1.0]], np.float32)
    result = run(
        logits_route, s, t, temperature=temperature, reduction="per_token", upstream=np.ones(2)
    )
    expected = [0.0, 1.0] if temperature < 1 else [0.25, 0.25]
    np.testing.assert_allclose(result.loss, expected, rtol=1e-6)
    assert np.isfinite(result.dp).all() and np.isfinite(result.dq).all()


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-9, 1e-20, 1e-30])
def test_logits_of_cold_rows(logits_route: Route, temperature: float) -> None:
    """Logits up to 1e4, of which no power of two makes exponents: the largest takes all."""
    s = np.array([[1e4, -1e4, 3.3], [7.3, 2.1, -INF], [-9999.9, -1e4, -INF]], np.float32)
    t = np.array([[-1e4, 9999.7, 0.1], [6.1, 5.7, 0.0], [-1e4, -9999.9, 0.3]], np.float32)
    options = {"temperature": temperature, "reduction": "per_token", "upstream": np.ones(3)}
    result = run(logits_route, s, t, **options)
    np.testing.assert_allclose(result.loss, [1.0, 0.0, 1.0], atol=1e-6)
    for gradient in (
        result.dp,
        result.dq,
    ):  # p and q are 1 but for a rounding, which 1 / T takes on
        assert np.abs(gradient).max() <= 2.0**-23 / temperature


@pytest.mark.parametrize("temperature", [1.5e-5, 3e-5])
def test_logits_near_the_cold_scale(logits_route: Route, temperature: float) -> None:
    """Differences of some temperatures, in both ways that exponents are made."""
    rng = np.random.default_rng(5)
    s, t = (temperature * rng.standard_normal((2, 4, 2500)).astype(np.float32) * 3).astype(
        "float32"
    )
    s[1, 2400] = 20 * temperature
    logits_oracle.check(logits_route, s, t, temperature=temperature)


@pytest.mark.parametrize("tokens", [0, 1])
def test_logits_few_tokens(logits_route: Route, tokens: int) -> None:
    s, t = logits(tokens, 600)
    result = run(logits_route, s, t)
    assert result.loss.shape == () and result.dp.shape == result.dq.shape == (tokens, 600)
    assert np.isfinite(result.loss)


def test_logits_strided(logits_torch_route: Route) -> None:
    s, t = logits(3, 600)
    right = run(logits_torch_route, s, t)
    transposed = run(logits_torch_route, s.T, t.T, layout=lambda x: x.T)
    np.testing.assert_allclose(transposed.loss, right.loss, rtol=1e-6)
    np.testing.assert_allclose(transposed.dp.T, right.dp, rtol=1e-5, atol=1e-9)


# --- accuracy ------------------------------------------------------------------------------------

ACCEPTANCES = (0.5, 0.9, 0.99, 0.999)


def lm_rows(acceptance: float, tokens: int = 16, vocab: int = 4096) -> tuple[np.ndarray, ...]:
    """Peaked rows as a language model has them, whose mean acceptance rate is near the given."""
    rng = np.random.default_rng(5)
    teacher = 2.0 * rng.standard_normal((tokens, vocab))
    teacher[np.arange(tokens), rng.integers(0, vocab, tokens)] += rng.uniform(8, 16, tokens)
    noise = rng.standard_normal((tokens, vocab))
    low, high = 0.0, 16.0
    for _ in range(30):
        middle = (low + high) / 2
        near = 1 - logits_reference(teacher + middle * noise, teacher) > acceptance
        low, high = (middle, high) if near else (low, middle)
    return np.float32(teacher + low * noise), np.float32(teacher)


def _plain_chain(s: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, ...]:
    """What one writes without this package: float32 softmaxes, the formula, autograd."""
    torch = pytest.importorskip("torch")
    s, t = (torch.tensor(x, requires_grad=True) for x in (s, t))
    per_token = 0.5 * (s.softmax(-1) - t.softmax(-1)).abs().sum(-1)
    gradients = torch.autograd.grad(per_token.sum(), [s, t])
    return tuple(x.detach().numpy() for x in (per_token, *gradients))


def _row_errors(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest error of a row, relative to the row: its value, or the norm of its gradient."""
    axis = -1 if expected.ndim == 2 else None
    error, size = actual.astype(np.float64) - expected, expected
    if axis is None:
        return float((np.abs(error) / np.abs(size)).max())
    return float((np.linalg.norm(error, axis=-1) / np.linalg.norm(size, axis=-1)).max())


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_logits_accuracy_is_that_of_float32_softmaxes(
    logits_route: Route, acceptance: float
) -> None:
    """No worse than 2 units in the last place more, of probabilities: 4 u, over the distance."""
    s, t = lm_rows(acceptance, tokens=3 if logits_route.interpreted else 16)
    rows = logits_reference(s, t, reduction="per_token")
    assert abs(1 - rows.mean() - acceptance) < 0.2 * (1 - acceptance)
    ones = np.ones(len(s))
    expected = rows, *logits_reference_grad(s, t, reduction="per_token", upstream=ones)
    result = run(logits_route, s, t, reduction="per_token", upstream=ones)
    actual = result.loss, result.dp, result.dq
    names = ("value", "dstudent", "dteacher")
    for name, ours, plain, right in zip(names, actual, _plain_chain(s, t), expected, strict=True):
        slack = 4 * 2.0**-24 * (1 / rows.min() if name == "value" else 1.0)
        error, allowed = _row_errors(ours, right), _row_errors(plain, right) + slack
        assert error <= allowed, f"{name}: {error:.2e}, plain float32 {allowed - slack:.2e}"


def test_the_oracle_is_tvd_of_softmaxes() -> None:
    """By hand, and by finite differences: the gradient of every kind of value."""
    s, t = np.log([[0.5, 0.25, 0.25]]), np.log([[0.25, 0.25, 0.5]])
    np.testing.assert_allclose(logits_reference(s, t), 0.25)
    np.testing.assert_allclose(
        logits_reference(2 * s, 2 * t, temperature=2.0), tvd_reference(np.exp(s), np.exp(t))
    )
    s, t = (x.astype(np.float64) for x in logits(3, 5, masked=0.0))
    weights, labels = np.array([0.5, 2.0, 1.0]), np.array([1, 2, -100])
    options = {"labels": labels, "weights": weights, "temperature": 0.7}
    gradients = logits_reference_grad(s, t, **options)
    step = 1e-6
    for which, gradient in enumerate(gradients):
        for at in np.ndindex(*s.shape):
            up, down = [s.copy(), t.copy()], [s.copy(), t.copy()]
            up[which][at] += step
            down[which][at] -= step
            slope = (logits_reference(*up, **options) - logits_reference(*down, **options)) / 2
            np.testing.assert_allclose(gradient[at], slope / step, atol=1e-8)


def test_a_wrong_value_and_a_wrong_gradient_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    route = routes.get("torch-eager")
    if not route.can_run:
        pytest.skip("PyTorch is not installed")
    s, t = logits(3, 600)
    right = run(route, s, t)
    wrong_loss = routes.Result(right.loss * np.float32(1 + 1e-4), right.dp, right.dq)
    wrong_dp = routes.Result(right.loss, right.dp * np.float32(1 + 1e-3), right.dq)
    for wrong in (wrong_loss, wrong_dp):
        monkeypatch.setattr(routes.TorchRoute, "run", lambda *_, wrong=wrong, **__: wrong)
        with pytest.raises(AssertionError, match="budget"):
            logits_oracle.check(route, s, t)
