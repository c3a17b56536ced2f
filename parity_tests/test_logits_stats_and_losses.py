"""Statistics of the tokens, and the losses that are made of them, from the same pass."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from parity_tests import inputs, logits_oracle, routes
from parity_tests.budget import U32, additions
from parity_tests.logits_budget import budget_of, check_gradient, check_values, logits
from parity_tests.routes import Route
from tvd_core.contract import TOKEN_REDUCTIONS
from tvd_core.reference import logits_rows_grad_reference, logits_rows_reference

TOKENS, VOCAB = 4, 600
LABELS = np.array([1, 7, -100, 599], np.int32)
WEIGHTS = np.array([0.5, 0.0, 1.0, 2.0], np.float32)
NAMES = ("per_token", "acceptance", "student_lse", "teacher_lse")
INF = np.inf


# --- statistics ----------------------------------------------------------------------------------


def stats_of(route: Route, s: Any, t: Any, labels: Any = None, **options: Any) -> Any:
    options = {"function": "tvd_from_logits", "return_stats": True, **options}
    return route.call(s, t, labels, **route.arrays(options))


@pytest.mark.parametrize(
    ("temperature", "leading"), inputs.latin([1.0, 2.5], [(), (4,), (2, 1, 2)])
)
def test_logits_stats(logits_route: Route, temperature: float, leading: tuple[int, ...]) -> None:
    s, t = logits(4, VOCAB)
    s, t = (x.reshape(*leading, VOCAB) if leading else x[0] for x in (s, t))
    arrays = logits_route.array(s), logits_route.array(t)
    with logits_route.running():
        loss, stats = stats_of(logits_route, *arrays, temperature=temperature)
        plain = logits_route.call(*arrays, function="tvd_from_logits", temperature=temperature)
        values = {name: logits_route.numpy(getattr(stats, name)) for name in NAMES}
        np.testing.assert_array_equal(logits_route.numpy(loss), logits_route.numpy(plain))
    assert stats._fields == NAMES
    budget = budget_of(s, t, temperature)
    rows, errors = budget.rows, budget.errors
    check_values("per_token", values["per_token"], rows.tvd, errors.tvd)
    check_values("acceptance", values["acceptance"], 1 - rows.tvd, errors.tvd + U32)
    check_values("student_lse", values["student_lse"], rows.student_lse, errors.student_lse)
    check_values("teacher_lse", values["teacher_lse"], rows.teacher_lse, errors.teacher_lse)


def test_logits_stats_are_0_for_ignored_tokens_and_without_weights(logits_route: Route) -> None:
    s, t = logits(TOKENS, VOCAB)
    s[1], t[2] = np.nan, -INF
    arrays = [logits_route.array(x) for x in (s, t, LABELS)]
    with logits_route.running():
        loss, stats = stats_of(logits_route, *arrays, weights=WEIGHTS, reduction="per_token")
        loss, *values = (logits_route.numpy(x) for x in (loss, *stats))
    for x in values:
        assert not x[[1, 2]].any() and x[[0, 3]].all() and np.isfinite(x).all()
    np.testing.assert_array_equal(loss, values[0] * WEIGHTS)


def gradients_of_stats(
    route: Route, s: np.ndarray, t: np.ndarray, upstreams: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Of the sum of the statistics, each times its upstream gradient."""
    constants = {name: route.array(x) for name, x in upstreams.items()}

    def total(s: Any, t: Any) -> Any:
        _, stats = stats_of(route, s, t, route.array(LABELS), weights=WEIGHTS, temperature=1.5)
        return sum((getattr(stats, name) * x).sum() for name, x in constants.items())

    arrays = route.array(s), route.array(t)
    with route.running():
        if route.framework == "jax":
            import jax

            return tuple(np.asarray(x) for x in jax.grad(total, (0, 1))(*arrays))
        import torch

        leaves = [x.requires_grad_() for x in arrays]
        return tuple(route.numpy(x) for x in torch.autograd.grad(total(*leaves), leaves))


@pytest.mark.parametrize("names", [*[(n,) for n in NAMES], NAMES], ids="-".join)
def test_logits_stats_are_differentiable(logits_route: Route, names: tuple[str, ...]) -> None:
    s, t = logits(TOKENS, VOCAB)
    s[2] = np.nan
    rng = np.random.default_rng(1)
    upstreams = {n: rng.standard_normal(TOKENS).astype(np.float32) for n in names}
    ds, dt = gradients_of_stats(logits_route, s, t, upstreams)
    kept = np.array([1.0, 0.0, 0.0, 1.0])
    seen = {n: kept * upstreams.get(n, 0.0) for n in NAMES}
    parts = {n: seen[n] for n in NAMES[2:]}
    parts["tvd"] = seen["per_token"] - seen["acceptance"]
    s = np.where(kept[:, None] == 0, 0.0, s)
    right = logits_rows_grad_reference(s, t, temperature=1.5, **parts)
    # Where the two upstream gradients of the distance nearly cancel, their rounding stays.
    parts["tvd"] = np.abs(seen["per_token"]) + np.abs(seen["acceptance"])
    errors = budget_of(s, t, 1.5).gradients(np.full(TOKENS, U32), **parts)
    checked = zip(("dstudent", "dteacher"), (ds, dt), right, errors, strict=True)
    for name, actual, expected, error in checked:
        check_gradient(name, actual, expected, error, route=logits_route)


def test_logits_stats_beside_reduction_none() -> None:
    for name in ("torch-eager", "jax-xla"):
        route = routes.get(name)
        if route.can_run:
            arrays = [route.array(x) for x in logits(3, 70)]
            loss, stats = stats_of(route, *arrays, reduction="none")
            elements, per_token = route.numpy(loss), route.numpy(stats.per_token)
            np.testing.assert_allclose(elements.sum(-1), per_token, rtol=1e-5)


# --- acceptance_loss -----------------------------------------------------------------------------


def of_acceptance(budget: Any) -> Any:
    acceptance = 1 - budget.rows.tvd
    own = budget.errors.tvd / acceptance  # of the derivative 1 / acceptance
    return -np.log(acceptance), own + 8 * U32, {"tvd": 1 / acceptance}


@pytest.mark.parametrize(("reduction", "temperature"), inputs.latin(TOKEN_REDUCTIONS, [1.0, 2.0]))
def test_logits_acceptance_loss(logits_route: Route, reduction: str, temperature: float) -> None:
    options = {"weights": WEIGHTS, "reduction": reduction, "temperature": temperature}
    check_tokens(logits_route, "acceptance_loss", of_acceptance, **options)


def check_tokens(route: Route, function: str, values: Any, **options: Any) -> None:
    s, t = logits(TOKENS, VOCAB, masked=0.0)
    if options["reduction"] == "per_token":
        options["upstream"] = np.ones(TOKENS)
    logits_oracle.check_tokens(route, function, s, t, LABELS, values, **options)


def test_logits_acceptance_loss_without_overlap(logits_route: Route) -> None:
    """24 log 2 at most, and nothing that is not finite: no overlap, one that rounds to 0, a small.

    The last row's overlap is 2**-20, which has no more than a few digits left.
    """
    s = np.zeros((3, 40), np.float32)
    s[0, ::2], s[1:, 0] = -INF, 60.0
    t = np.zeros((3, 40), np.float32)
    t[0, 1::2], t[1, 1] = -INF, 60.0
    s[2, 1], t[2, 1] = 60.0 - 20 * np.log(2.0), 60.0
    result = logits_route.run(
        s, t, function="acceptance_loss", reduction="per_token", upstream=np.ones(3)
    )
    np.testing.assert_allclose(result.loss[:2], 24 * np.log(2.0), rtol=0.05)
    assert result.loss[2] < 20.1 * np.log(2.0)
    assert np.isfinite(result.dp).all() and np.isfinite(result.dq).all()
    assert np.abs(result.dp[2]).max() > 0.5  # d log(overlap) is 1 at full strength


def test_logits_acceptance_loss_flows_where_the_acceptance_is_cut_off(
    logits_route: Route,
) -> None:
    """An overlap of 2**-26 is 0 beside 1; the gradient is the distance's times 2**24, a quarter."""
    s, t = np.zeros((1, 2), np.float32), np.zeros((1, 2), np.float32)
    s[0, 0], t[0, 1] = 27 * np.log(2.0), 27 * np.log(2.0)
    result = logits_route.run(s, t, function="acceptance_loss")
    np.testing.assert_allclose(result.loss, 24 * np.log(2.0), rtol=1e-5)
    expected = 2.0**24 * 2.0**-27  # p (1 - p) of the distance's gradient
    np.testing.assert_allclose(result.dp[0, 1], -expected, rtol=1e-4)
    np.testing.assert_allclose(result.dp[0, 0], expected, rtol=1e-4)


@pytest.mark.parametrize("bits", [14, 18, 20, 22])
def test_logits_gradient_of_a_student_that_is_sure_and_wrong(
    logits_route: Route, bits: int
) -> None:
    """An overlap of about 2**-bits: what is left of the highest element's gradient, times that."""
    s, t = np.zeros((1, 50), np.float32), np.zeros((1, 50), np.float32)
    s[0, 0] = t[0, 1] = (bits + 5) * np.log(2.0)
    t[0, 2:] = -1.0  # no ties, which a rounding could make anything
    result = logits_route.run(s, t, function="tvd_from_logits")
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum() for x in (s, t))
    signs = np.sign(p - q)
    expected = 0.5 * p * (signs - (p * signs).sum())
    np.testing.assert_allclose(result.dp[0, :1], expected[0, :1], rtol=1e-5)
    assert abs(result.dp.sum()) < 1e-5 * expected[0, 0]


# --- hybrid_loss ---------------------------------------------------------------------------------


def of_hybrid(eta: float) -> Any:
    def values(budget: Any) -> Any:
        rows, errors = budget.rows, budget.errors
        share = np.exp(-eta * (1 - rows.tvd))
        per_token = share * rows.kl + (1 - share) * rows.tvd
        partials = {"kl": share, "tvd": 1 - share}
        # The share counts as constant; its error is eta times the distance's, and an exponential's.
        own = (eta * (errors.tvd + U32) + 4 * U32) / np.minimum(
            1.0, np.where(share < 1, 1 - share, 1)
        )
        return per_token, own + 8 * U32, partials

    return values


@pytest.mark.parametrize(("reduction", "eta"), inputs.latin(TOKEN_REDUCTIONS, [0.0, 1.0, 3.0]))
def test_logits_hybrid_loss(logits_route: Route, reduction: str, eta: float) -> None:
    options = {"weights": WEIGHTS, "reduction": reduction, "temperature": 1.5, "eta": eta}
    check_tokens(logits_route, "hybrid_loss", of_hybrid(eta), **options)


def test_logits_hybrid_loss_of_masked_elements(logits_route: Route) -> None:
    """A teacher's probability of 0 counts 0, also where the student's is 0; the reverse is inf."""
    s, t = logits(3, VOCAB, masked=0.0)
    s[0, 3] = t[0, 3] = t[1, 5] = s[2, 7] = -INF
    result = logits_route.run(
        s, t, function="hybrid_loss", eta=0.0, reduction="per_token", upstream=np.ones(3)
    )
    kl = logits_rows_reference(s, t).kl
    np.testing.assert_allclose(result.loss[:2], kl[:2], rtol=1e-4)
    assert result.loss[2] == kl[2] == INF
    assert np.isfinite(result.dp).all() and np.isfinite(result.dq[:2]).all()
    assert result.dp[0, 3] == result.dq[0, 3] == result.dq[1, 5] == 0


def test_logits_hybrid_loss_of_eta_0_is_torchs_divergence(logits_route: Route) -> None:
    torch = pytest.importorskip("torch")
    s, t = logits(TOKENS, VOCAB, masked=0.0)
    result = logits_route.run(s, t, function="hybrid_loss", eta=0.0)
    logits_s = torch.tensor(s, requires_grad=True)
    log_p, log_q = logits_s.log_softmax(-1), torch.tensor(t).log_softmax(-1)
    right = torch.nn.functional.kl_div(log_p, log_q, reduction="batchmean", log_target=True)
    right.backward()
    np.testing.assert_allclose(result.loss, right.detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(result.dp, logits_s.grad.numpy(), rtol=1e-4, atol=1e-8)


# --- cross_entropy_tvd_loss ----------------------------------------------------------------------


def of_cross_entropy(labels: np.ndarray, ce_weight: float, tvd_weight: float) -> Any:
    def values(budget: Any) -> Any:
        log_p = budget.student.log_p
        at = np.where(labels == -100, 0, labels)
        entropy = -log_p[np.arange(labels.size), at]
        per_token = ce_weight * entropy + tvd_weight * budget.rows.tvd
        # The label's logit and the log-sum-exp are rounded before they are subtracted.
        size = np.abs(budget.rows.student_lse) + np.abs(entropy - budget.rows.student_lse)
        own = U32 * (8 + 4 * ce_weight * size / np.where(per_token == 0, 1.0, per_token))
        partials = {"student_lse": ce_weight, "tvd": tvd_weight, "target": -ce_weight}
        return per_token, own, {k: np.full(labels.size, float(v)) for k, v in partials.items()}

    return values


@pytest.mark.parametrize(
    ("reduction", "factors"), inputs.latin(TOKEN_REDUCTIONS, [(1.0, 1.0), (0.25, 3), (0, 1)])
)
def test_logits_cross_entropy_and_distance(
    logits_route: Route, reduction: str, factors: tuple[float, float]
) -> None:
    ce_weight, tvd_weight = factors
    options = {"weights": WEIGHTS, "reduction": reduction, "temperature": 1.5}
    options |= {"ce_weight": ce_weight, "tvd_weight": tvd_weight}
    values = of_cross_entropy(LABELS, ce_weight, tvd_weight)
    check_tokens(logits_route, "cross_entropy_tvd_loss", values, **options)


@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_logits_cross_entropy_is_torchs(logits_route: Route, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    s, t = logits(TOKENS, VOCAB, dtype)
    labels = np.array([1, 7, -100, 599], np.int32)
    s[np.arange(TOKENS), labels] = inputs.cast(0.5, dtype)  # an -inf there would make it inf
    result = logits_route.run(s, t, labels, function="cross_entropy_tvd_loss", tvd_weight=0)
    logits_s = torch.tensor(s.astype(np.float32), requires_grad=True)
    right = torch.nn.functional.cross_entropy(logits_s, torch.tensor(labels, dtype=torch.int64))
    right.backward()
    rounding = {"float32": 0.0, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    np.testing.assert_allclose(result.loss, right.detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(
        result.dp.astype(np.float32), logits_s.grad.numpy(), rtol=1e-4 + rounding, atol=1e-6
    )
    assert not result.dq.any()


def test_logits_cross_entropy_of_sure_tokens_is_not_negative(logits_route: Route) -> None:
    """Log-sum-exp minus logit is, by rounding, in every second row here."""
    s, t = logits(64, 40, seed=3)
    s, t = np.float32(s), np.float32(t)
    labels = np.argmax(s, 1).astype(np.int32)
    s[np.arange(64), labels] += 30 + np.linspace(0, 60, 64, dtype=np.float32)
    options = {"function": "cross_entropy_tvd_loss", "reduction": "per_token", "tvd_weight": 0}
    result = logits_route.run(s, t, labels, temperature=0.7, wrt="p", **options)
    loss, gradient = np.asarray(result.loss), np.asarray(result.dp)
    assert (loss >= 0).all() and (loss < 2e-5).all()
    # As where the loss is above 0: of the label, which is p - 1 = -(the others' sum), over T.
    at_label = gradient[np.arange(64), labels]
    assert (np.abs(at_label) < 2e-6).all()
    # A label whose logit is -inf costs all there is; that is not a number below 0.
    s[0, labels[0]] = -np.inf
    assert np.asarray(logits_route.run(s, t, labels, **options).loss)[0] == np.inf


def test_logits_cross_entropy_of_a_label_outside_is_nan(logits_route: Route) -> None:
    s, t = logits(3, VOCAB)
    labels = np.array([VOCAB, -1, 3], np.int32)
    options = {"function": "cross_entropy_tvd_loss", "reduction": "per_token"}
    s[2, 3] = 0.5
    loss = logits_route.run(s, t, labels, upstream=np.ones(3), **options).loss
    np.testing.assert_array_equal(np.isnan(loss), [True, True, False])
    loss = logits_route.run(s, t, labels, upstream=np.ones(3), ignore_index=VOCAB, **options).loss
    assert loss[0] == 0


def test_logits_wide_labels_are_compared_before_jax_narrows_them() -> None:
    tvd_jax = pytest.importorskip("tvd_jax")
    labels = np.array([2**32 + 3, 2**40, 3], np.int64)  # the first is 3 in 32 bits
    loss = tvd_jax.cross_entropy_tvd_loss(
        *logits(3, VOCAB), labels, reduction="per_token", implementation="xla"
    )
    np.testing.assert_array_equal(np.isnan(loss), [True, True, False])


def test_the_budget_of_a_row_grows_with_it() -> None:
    """A guard of the budgets: they stay below 1e-4 where the tests use them."""
    budget = budget_of(*logits(4, 50257), 1.0)
    for name in ("tvd", "student_lse", "kl"):
        error, size = getattr(budget.errors, name), getattr(budget.rows, name)
        finite = np.isfinite(size)
        assert (error[finite] < 1e-4 * np.maximum(size[finite], 1)).all()
    assert additions(50257) * U32 < 1e-5


# --- long rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [8192 + 16, 20001], ids=["aligned", "odd"])
@pytest.mark.parametrize("function", ["hybrid_loss", "cross_entropy_tvd_loss"])
def test_logits_losses_of_several_windows(logits_route: Route, function: str, vocab: int) -> None:
    """The divergence in every window, labels in the first and in the last, maxima anywhere."""
    s, t = logits(TOKENS, vocab, masked=0.0)
    s[0, 5000], t[0, 5001], t[3, vocab - 1] = 20.0, 19.0, 30.0
    labels = np.array([5000, 1, -100, vocab - 1], np.int32)
    factors = {"ce_weight": 0.5, "tvd_weight": 2.0}
    if function == "hybrid_loss":
        values, options = of_hybrid(1.0), {"eta": 1.0}
    else:
        values, options = of_cross_entropy(labels, **factors), factors
    options = {"temperature": 1.5, "reduction": "per_token", "upstream": np.ones(4), **options}
    logits_oracle.check_tokens(logits_route, function, s, t, labels, values, **options)


def test_logits_cross_entropy_of_weight_0_is_left_out(logits_route: Route) -> None:
    """A label's logit of -inf makes it inf, a label outside the vocab NaN."""
    s, t = logits(2, VOCAB, masked=0.0)
    s[0, 3] = -INF
    labels = np.array([3, VOCAB], np.int32)
    options = {"reduction": "per_token", "upstream": np.ones(2)}
    found = logits_route.run(
        s, t, labels, function="cross_entropy_tvd_loss", ce_weight=0, **options
    )
    right = logits_route.run(s, t, function="tvd_from_logits", **options)
    for one, other in zip(dataclasses.astuple(found), dataclasses.astuple(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1e-32, 1e-20, 1e20, 1e32])
@pytest.mark.parametrize("function", ["hybrid_loss", "cross_entropy_tvd_loss", "acceptance_loss"])
def test_logits_losses_at_extreme_temperatures(
    logits_route: Route, function: str, temperature: float
) -> None:
    """Cold: all in the largest logit, which both share, and the label is its. Hot: all alike."""
    s = np.array([[3.0, 1.0, 0.0, -1.0]], np.float32)
    t = np.array([[2.0, 1.0, 0.0, -3.0]], np.float32)
    labels = np.zeros(1, np.int32)
    options = {"function": function, "reduction": "per_token", "upstream": np.ones(1)}
    result = logits_route.run(s, t, labels, temperature=temperature, **options)
    hot = temperature > 1 and function == "cross_entropy_tvd_loss"
    np.testing.assert_allclose(result.loss, np.log(4.0) if hot else 0.0, rtol=1e-6, atol=1e-6)
    assert np.isfinite(result.dp).all() and np.isfinite(result.dq).all()


# --- edges that an attack found ------------------------------------------------------------------


def test_logits_hybrid_loss_without_a_share_is_the_distance(logits_route: Route) -> None:
    """The divergence is inf, its share rounds to 0."""
    s, t = np.array([[0, 0, -INF]], np.float32), np.array([[0, 0, -6]], np.float32)
    loss = logits_route.run(s, t, function="hybrid_loss", eta=200.0, wrt="p").loss
    right = logits_route.run(s, t, function="tvd_from_logits", wrt="").loss
    np.testing.assert_array_equal(loss, right)
    assert logits_route.run(s, t, function="hybrid_loss", eta=10.0, wrt="").loss == INF


def test_logits_acceptance_is_never_below_0(logits_route: Route) -> None:
    """Disjoint rows: some distances round to more than 1, and no share of eta 1e9 to more."""
    s, t = logits(64, 1000, masked=0.0)
    s[:, ::2], t[:, 1::2] = -INF, -INF
    arrays = [logits_route.array(x) for x in (s, t)]
    with logits_route.running():
        _, stats = stats_of(logits_route, *arrays)
        values = {name: logits_route.numpy(getattr(stats, name)) for name in NAMES}
    np.testing.assert_allclose(values["per_token"], 1.0, atol=2e-7)
    assert (values["acceptance"] >= 0).all() and (values["acceptance"] <= 2e-7).all()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int64"])
def test_logits_labels_narrower_than_the_vocab(logits_route: Route, dtype: str) -> None:
    """In 8 bits a vocab of 300 would be 44."""
    s, t = logits(2, 300, masked=0.0)
    options = {"function": "cross_entropy_tvd_loss", "reduction": "per_token"}
    options["upstream"] = np.ones(2)
    found, right = (
        logits_route.run(s, t, np.array([0, 100], kind), **options) for kind in (dtype, "int32")
    )
    # Not the same bits in XLA, which compiles a program for each dtype.
    np.testing.assert_allclose(found.loss, right.loss, rtol=1e-6)
    np.testing.assert_allclose(found.dp, right.dp, rtol=1e-5, atol=1e-9)
