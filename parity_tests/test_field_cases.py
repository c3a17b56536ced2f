"""Small inputs that broke some library or divide the frameworks, with the right value pinned.

The number in a test's name is the case's. Each comes from a public thread or from public code.
"""

from typing import Any

import numpy as np
import pytest

from parity_tests import budget, inputs, oracle
from parity_tests.routes import Route
from parity_tests.x64 import enable_x64

F32 = np.float32


def f32(*values: Any) -> np.ndarray:
    """A row of numbers, or an array of rows."""
    return np.array(values[0] if len(values) == 1 else values, F32)


def test_field_case_01_equal_rows_have_no_gradient(route: Route) -> None:
    p = f32([0.5, 0.3, 0.2])
    result = route.run(p, p.copy())
    assert result.loss == 0
    np.testing.assert_array_equal(result.dp, f32([0, 0, 0]))
    np.testing.assert_array_equal(result.dq, f32([0, 0, 0]))


def test_field_case_02_partial_tie(route: Route) -> None:
    result = route.run(f32([1, 0, 0]), f32([0.9, 0.1, 0]))
    np.testing.assert_allclose(result.loss, 0.1, rtol=1e-6)
    np.testing.assert_array_equal(result.dp, f32([0.5, -0.5, 0]))


@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_field_case_03_disjoint_is_1_not_2(route: Route, dtype: str) -> None:
    p, q = inputs.cast([[1, 0]], dtype), inputs.cast([[0, 1]], dtype)
    assert route.loss(p, q) == 1.0


def test_field_case_04_nan_in_p(route: Route) -> None:
    result = route.run(f32([np.nan, 0.5]), f32([0.5, 0.5]))
    assert np.isnan(result.loss)
    np.testing.assert_array_equal(result.dp, f32([np.nan, 0]))


def test_field_case_05_equal_infinities(route: Route) -> None:
    result = route.run(f32([np.inf, 0]), f32([np.inf, 0]))
    assert np.isnan(result.loss)
    np.testing.assert_array_equal(result.dp, f32([np.nan, 0]))


def test_field_case_06_ignored_row_of_nan(route: Route) -> None:
    p, q = f32([1, 0], [np.nan, np.nan]), f32([0.75, 0.25], [0.5, 0.5])
    result = route.run(p, q, np.array([3, -100], np.int32))
    assert result.loss == 0.25
    np.testing.assert_array_equal(result.dp, f32([0.5, -0.5], [0, 0]))
    np.testing.assert_array_equal(result.dq, f32([-0.5, 0.5], [0, 0]))


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
def test_field_case_07_all_ignored(route: Route, reduction: str) -> None:
    p, q = inputs.rows(2, 8)
    labels = np.full(2, -100, np.int32)
    result = route.run(p, q, labels, reduction=reduction)
    assert result.loss == 0 and not result.dp.any() and not result.dq.any()
    if route.framework == "torch":
        leaf = route.array(p).requires_grad_()
        loss = route.call(leaf, route.array(q), route.array(labels), reduction=reduction)
        assert loss.requires_grad


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "none", "per_token"])
def test_field_case_08_zero_tokens(route: Route, reduction: str) -> None:
    p, q = inputs.rows(0, 8)
    shape = {"none": (0, 8), "per_token": (0,)}.get(reduction, ())
    result = route.run(p, q, reduction=reduction, upstream=np.ones(shape))
    assert result.loss.shape == shape and not result.loss.any()
    assert result.dp.shape == (0, 8)


@pytest.mark.parametrize("shape", [(2, 16), (2, 4), (1, 8)], ids=str)
def test_field_case_09_shapes_differ(route: Route, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError) as raised:
        route.loss(np.zeros((2, 8), F32), np.zeros(shape, F32))
    assert str((2, 8)) in str(raised.value) and str(shape) in str(raised.value)


def test_field_case_10_batchmean_divides_by_all_tokens(route: Route) -> None:
    p, q = np.zeros((2, 3, 8), F32), np.zeros((2, 3, 8), F32)
    p[..., 0] = q[..., 1] = 1.0
    result = route.run(p, q)
    assert result.loss == 1.0
    assert result.dp[0, 0, 0] == F32(0.5) / F32(6)


def test_field_case_11_bfloat16_is_summed_in_float32(route: Route) -> None:
    oracle.check(route, *inputs.rows(2, 32000, "bfloat16"), upstream=0.5)


def test_field_case_12_float16_mean_with_a_large_upstream(route: Route) -> None:
    """A scale of 0.5 / (2048 * 32000) is 0 in float16. The normalizer stands for 2048 tokens."""
    p, q = inputs.rows(1, 32000, "float16")
    result = route.run(p, q, reduction="mean", normalizer=2048, upstream=F32(65536))
    right = 0.5 * 65536 / (2048 * 32000)
    assert abs(right - 5.0e-4) < 1e-8
    magnitudes = np.unique(np.abs(result.dp.astype(np.float64)))
    np.testing.assert_allclose(magnitudes, [0, right], rtol=2.0**-11)
    if not route.interpreted:
        oracle.check(route, *inputs.rows(2048, 100, "float16"), upstream=F32(65536))


def test_field_case_13_student_nearly_equal_to_teacher(route: Route) -> None:
    vocab = 151936
    rng = np.random.default_rng(13)
    p = rng.dirichlet(np.full(vocab, 0.5))[None].astype(F32)
    q = (p * (1 + 1e-4 * rng.standard_normal((1, vocab)))).astype(F32)
    right = 0.5 * np.abs(p.astype(np.float64) - q.astype(np.float64)).sum()
    assert 3e-5 < right < 5e-5
    np.testing.assert_allclose(route.loss(p, q), right, rtol=1e-5)


@pytest.mark.parametrize("vocab", [1, 3, 1271, 50257, 151936])
def test_field_case_14_vocab_with_a_tail(route: Route, vocab: int) -> None:
    """All of the mass in the last element, so that a lost or repeated tail shows."""
    p, q = np.zeros((2, vocab), F32), np.zeros((2, vocab), F32)
    p[:, -1] = [0.75, 0.25]
    q[:, -1] = [0.25, 1.0]
    result = route.run(p, q, reduction="sum")
    assert result.loss == (0.5 + 0.75) / 2
    right = np.zeros((2, vocab), F32)
    right[:, -1] = [0.5, -0.5]
    np.testing.assert_array_equal(result.dp, right)
    np.testing.assert_array_equal(result.dq, -right)


@pytest.mark.parametrize("layout", ["transposed", "every second"])
def test_field_case_15_strided(route: Route, layout: str) -> None:
    view = {"transposed": lambda x: x.T, "every second": lambda x: x[:, ::2]}[layout]
    p, q = inputs.rows(8, 8)
    result = route.run(p, q, layout=view)
    contiguous = route.run(np.ascontiguousarray(view(p)), np.ascontiguousarray(view(q)))
    oracle.assert_same_bits("loss", result.loss, contiguous.loss)
    np.testing.assert_array_equal(view(result.dp), contiguous.dp)
    np.testing.assert_array_equal(view(result.dq), contiguous.dq)


def test_field_case_16_gradient_of_either_side(route: Route) -> None:
    p, q = inputs.rows(2, 70)
    both = route.run(p, q)
    np.testing.assert_array_equal(both.dq, -both.dp)
    only_p, only_q = route.run(p, q, wrt="p"), route.run(p, q, wrt="q")
    np.testing.assert_array_equal(only_p.dp, both.dp)
    np.testing.assert_array_equal(only_q.dq, both.dq)
    assert only_p.dq is None and only_q.dp is None
    # Neither: that nothing of input size is written is test_clause_08_*_without_gradient_*.
    neither = route.run(p, q, wrt="")
    oracle.assert_same_bits("loss", neither.loss, both.loss)


@pytest.mark.parametrize("dtype", [np.bool_, np.float32])
def test_field_case_17_labels_must_be_integers(route: Route, dtype: type) -> None:
    with pytest.raises(TypeError, match="labels must be"):
        route.loss(*inputs.rows(2, 8), np.ones(2, dtype))


def test_field_case_18_unknown_reduction(route: Route) -> None:
    with pytest.raises(ValueError) as raised:
        route.loss(*inputs.rows(2, 8), reduction="avg")
    for name in ("batchmean", "sum", "mean", "none", "per_token"):
        assert name in str(raised.value)


def test_field_case_19_scaled_and_summed_losses(route: Route) -> None:
    """Scales by 2 and 1/7 and a sum of two losses give exactly scaled gradients."""
    p, q = f32([1, 0], [0, 1]), f32([0.5, 0.5], [0.5, 0.5])

    def gradients(total: Any) -> np.ndarray:
        tp, tq = route.array(p), route.array(q)
        if route.framework == "torch":
            tp.requires_grad_()
            with route.running():
                total(lambda: route.call(tp, tq)).backward()
            return route.numpy(tp.grad)
        import jax

        with route.running():
            return route.numpy(jax.grad(lambda x: total(lambda: route.call(x, tq)))(tp))

    unit = f32([0.25, -0.25], [-0.25, 0.25])
    np.testing.assert_array_equal(gradients(lambda loss: loss() * 2), 2 * unit)
    seventh = gradients(lambda loss: loss() / 7)
    np.testing.assert_allclose(seventh, unit / 7, rtol=2 * 2.0**-24)
    np.testing.assert_array_equal(gradients(lambda loss: loss() + loss()), 2 * unit)


def test_field_case_20_backward_twice(route: Route) -> None:
    p, q = inputs.rows(2, 70)
    if route.framework == "torch":
        leaf = route.array(p).requires_grad_()
        loss = route.call(leaf, route.array(q))
        with route.running():
            loss.backward(retain_graph=True)
            first = route.numpy(leaf.grad).copy()
            leaf.grad.mul_(100)
            leaf.grad = None
            loss.backward()
        second = route.numpy(leaf.grad)
    else:
        import jax

        q = route.array(q)
        with route.running():
            loss, vjp = jax.vjp(lambda x: route.call(x, q), route.array(p))
            first, second = (route.numpy(vjp(jax.numpy.ones_like(loss))[0]) for _ in range(2))
    oracle.assert_same_bits("dp", second, first)
    assert first.any()


def test_field_case_21_create_graph(torch_route: Route) -> None:
    """loss = 0.25, dp = +-0.5: d/dp of sum(grad(loss**2) * v) is 2 * (dp . v) * dp."""
    import torch

    p = torch_route.array(f32([0.75, 0.25])).requires_grad_()
    q, v = torch_route.array(f32([0.5, 0.5])), torch_route.array(f32([1.0, 3.0]))
    with torch_route.running():
        loss = torch_route.call(p, q)
        (first,) = torch.autograd.grad(loss**2, [p], create_graph=True)
        (second,) = torch.autograd.grad((first * v).sum(), [p])
    np.testing.assert_array_equal(torch_route.numpy(first), f32(0.25, -0.25))
    np.testing.assert_array_equal(torch_route.numpy(second), f32(-1.0, 1.0))
    # gradcheck in float64: test_clause_11_torch_gradcheck_in_float64.


def test_field_case_22_last_of_more_than_2_to_the_31_elements(kernel_route: Route) -> None:
    from parity_tests.test_clause_09_range import test_clause_09_last_row_beyond_int32_offsets

    test_clause_09_last_row_beyond_int32_offsets(kernel_route, 16385, 131072, "bfloat16")


@pytest.mark.parametrize("normalizer", [4, np.array(4.0, F32)], ids=["number", "array"])
def test_field_case_23_micro_batches(route: Route, normalizer: Any) -> None:
    p, q = np.zeros((6, 4), F32), np.zeros((6, 4), F32)
    p[:, 0] = 1.0
    q[:, 0], q[:, 1] = [0.5, 0.25, 0.0, 0.5, 0.75, 0.5], [0.5, 0.75, 1.0, 0.5, 0.25, 0.5]
    labels = np.array([1, 2, 3, 9, -100, -100], np.int32)
    whole = route.run(p, q, labels)
    parts = [
        route.run(p[s], q[s], labels[s], normalizer=normalizer) for s in (slice(0, 3), slice(3, 6))
    ]
    assert whole.loss == 0.6875 == parts[0].loss + parts[1].loss
    np.testing.assert_array_equal(np.concatenate([part.dp for part in parts]), whole.dp)


def test_field_case_24_traced_labels_and_x64(jax_route: Route) -> None:
    import jax

    p, q = f32([1, 0], [0, 1]), f32([0.75, 0.25], [0.5, 0.5])
    labels = np.array([5, -100], np.int32)
    with jax_route.running():
        gradient = jax.jit(jax.grad(jax_route.call))
        arguments = [jax_route.array(x) for x in (p, q, labels)]
        plain = jax_route.numpy(gradient(*arguments))
        with enable_x64():
            wide = jax_route.numpy(jax.jit(jax.grad(jax_route.call))(*arguments))
    for dp in (plain, wide):
        assert dp.dtype == np.float32
        np.testing.assert_array_equal(dp, f32([0.5, -0.5], [0, 0]))


def test_field_case_25_same_bits_twice_and_alone(route: Route) -> None:
    p, q = inputs.rows(3, 1271)
    first, second = (route.loss(p, q, reduction="per_token") for _ in range(2))
    oracle.assert_same_bits("per_token", first, second)
    if route.is_kernel:
        alone = route.loss(p[1:2], q[1:2], reduction="per_token")
        oracle.assert_same_bits("per_token", alone, first[1:2])
    assert budget.per_token_tolerance(1271) < 1e-6
