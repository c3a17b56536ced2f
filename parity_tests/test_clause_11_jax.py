"""Contract clause 11, JAX: jit, grad, value_and_grad, vmap, checkpoint, x64 mode, traced labels."""

from typing import Any

import numpy as np
import pytest

from parity_tests import budget, inputs, oracle
from parity_tests.routes import Route
from parity_tests.x64 import enable_x64
from tvd_core.reference import tvd_reference, tvd_reference_grad

jax = pytest.importorskip("jax")
jnp = jax.numpy

TOKENS, VOCAB = 3, 600


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    weights = np.array([0.5, 1.0, 2.0], np.float32)
    return *inputs.rows(TOKENS, VOCAB), np.array([1, -100, 2], np.int32), weights


def moved(route: Route, *arrays: np.ndarray) -> list[Any]:
    return [route.array(x) for x in arrays]


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jit"])
def test_clause_11_jax_value_and_grad_with_traced_labels(jax_route: Route, jit: bool) -> None:
    """Labels, weights and normalizer are arguments of the jitted function, not constants."""
    p, q, labels, weights = data()
    normalizer = np.array(4.0, np.float32)

    def loss_of(p: Any, q: Any, labels: Any, weights: Any, normalizer: Any) -> Any:
        return jax_route.call(p, q, labels, weights=weights, normalizer=normalizer)

    step = jax.value_and_grad(loss_of, argnums=(0, 1))
    step = jax.jit(step) if jit else step
    arguments = moved(jax_route, p, q, labels, weights, normalizer)
    with jax_route.running():
        loss, (dp, dq) = step(*arguments)
        loss, dp, dq = (jax_route.numpy(x) for x in (loss, dp, dq))
    options = {"weights": weights, "normalizer": 4.0}
    budget.check_loss(loss, tvd_reference(p, q, labels, **options), TOKENS, VOCAB)
    right = tvd_reference_grad(p, q, labels, **options)
    budget.check_gradients(dp, dq, right, TOKENS, route=jax_route)


def test_clause_11_jax_jit_of_grad_has_the_bits_of_plain_calls(jax_kernel_route: Route) -> None:
    """The kernels only: XLA may fuse its own implementation differently under jit."""
    p, q, labels, weights = data()
    plain = jax_kernel_route.run(p, q, labels, weights=weights)

    @jax.jit
    def jitted(p: Any, q: Any, labels: Any, weights: Any) -> Any:
        return jax.grad(lambda p, q: jax_kernel_route.call(p, q, labels, weights=weights), (0, 1))(
            p, q
        )

    with jax_kernel_route.running():
        dp, dq = (
            jax_kernel_route.numpy(x)
            for x in jitted(*moved(jax_kernel_route, p, q, labels, weights))
        )
    oracle.assert_same_bits("dp", dp, plain.dp)
    oracle.assert_same_bits("dq", dq, plain.dq)


def test_clause_11_jax_no_cotangent_for_labels(jax_route: Route) -> None:
    p, q, labels, _ = data()
    with jax_route.running():
        _, vjp = jax.vjp(jax_route.call, *moved(jax_route, p, q, labels))
        cotangents = vjp(jnp.float32(1))
    assert cotangents[2].dtype == jax.dtypes.float0


def test_clause_11_jax_in_a_graph(jax_route: Route) -> None:
    """Behind a softmax and beside another loss, as in training."""
    rng = np.random.default_rng(0)
    logits = [rng.standard_normal((TOKENS, VOCAB)).astype(np.float32) for _ in "pq"]

    def gradients(distance: Any) -> Any:
        def total(s: Any, t: Any) -> Any:
            p, q = jax.nn.softmax(s), jax.nn.softmax(t)
            return 3 * distance(p, q) + (p * q).sum()

        with jax_route.running():
            return jax.tree.map(np.asarray, jax.grad(total, (0, 1))(*moved(jax_route, *logits)))

    actual = gradients(jax_route.call)
    expected = gradients(lambda p, q: 0.5 * jnp.abs(p - q).sum() / TOKENS)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)], ids=str)
def test_clause_11_jax_vmap(jax_route: Route, in_axes: tuple[int | None, int | None]) -> None:
    batch = 2
    p, q = (x.reshape(batch, TOKENS, VOCAB) for x in inputs.rows(batch * TOKENS, VOCAB))
    p, q = (x if axis == 0 else x[0] for x, axis in zip((p, q), in_axes, strict=True))
    loss_and_gradients = jax.value_and_grad(jax_route.call, argnums=(0, 1))
    with jax_route.running():
        loss, gradients = jax.vmap(loss_and_gradients, in_axes)(*moved(jax_route, p, q))
        loss, dp, dq = (jax_route.numpy(x) for x in (loss, *gradients))
    for i in range(batch):
        one, two = (x[i] if axis == 0 else x for x, axis in zip((p, q), in_axes, strict=True))
        budget.check_loss(loss[i], tvd_reference(one, two), TOKENS, VOCAB)
        right = tvd_reference_grad(one, two)
        budget.check_gradients(dp[i], dq[i], right, TOKENS, route=jax_route)


def test_clause_11_jax_vmap_with_labels_and_weights(jax_route: Route) -> None:
    batch = 2
    p, q = (x.reshape(batch, TOKENS, VOCAB) for x in inputs.rows(batch * TOKENS, VOCAB))
    labels = inputs.labels_for(batch * TOKENS).reshape(batch, TOKENS)
    weights = inputs.weights_for(batch * TOKENS).reshape(batch, TOKENS)

    def loss_of(p: Any, q: Any, labels: Any, weights: Any) -> Any:
        return jax_route.call(p, q, labels, weights=weights)

    with jax_route.running():
        step = jax.vmap(jax.value_and_grad(loss_of, argnums=(0, 1)))
        loss, gradients = step(*moved(jax_route, p, q, labels, weights))
        loss, dp, dq = (jax_route.numpy(x) for x in (loss, *gradients))
    for i in range(batch):
        options = {"labels": labels[i], "weights": weights[i]}
        budget.check_loss(loss[i], tvd_reference(p[i], q[i], **options), TOKENS, VOCAB)
        right = tvd_reference_grad(p[i], q[i], **options)
        budget.check_gradients(dp[i], dq[i], right, TOKENS, route=jax_route)


def test_clause_11_jax_checkpoint(jax_route: Route) -> None:
    if jax_route.interpreted:
        pytest.skip("the interpreter's effects cannot be rematerialised; compiled kernels can")
    p, q, labels, weights = data()

    def loss_of(p: Any, q: Any) -> Any:
        options = {"labels": jax_route.array(labels), "weights": jax_route.array(weights)}
        return jax_route.call(2 * p, q, **options)

    arguments = moved(jax_route, p, q)
    plain = jax.value_and_grad(loss_of, (0, 1))(*arguments)
    saved = jax.jit(jax.value_and_grad(jax.checkpoint(loss_of), (0, 1)))(*arguments)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(saved), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jit"])
def test_clause_11_jax_x64_mode(jax_route: Route, jit: bool) -> None:
    """Float32 inputs stay float32, int64 labels work, Python numbers do not turn into float64."""
    p, q, labels, weights = data()
    labels = labels.astype(np.int64)

    def loss_of(p: Any, q: Any, labels: Any) -> Any:
        return jax_route.call(
            p, q, labels, weights=jax_route.array(weights), normalizer=4, reduction="mean"
        )

    with enable_x64(), jax_route.running():
        step = jax.value_and_grad(loss_of, (0, 1))
        loss, (dp, dq) = (jax.jit(step) if jit else step)(*moved(jax_route, p, q, labels))
        loss, dp, dq = (jax_route.numpy(x) for x in (loss, dp, dq))
    options = {"weights": weights, "normalizer": 4, "reduction": "mean"}
    budget.check_loss(loss, tvd_reference(p, q, labels, **options), TOKENS, VOCAB)
    right = tvd_reference_grad(p, q, labels, **options)
    budget.check_gradients(dp, dq, right, TOKENS, route=jax_route)
    assert dp.dtype == dq.dtype == np.float32


def test_clause_11_jax_scan(jax_route: Route) -> None:
    if jax_route.interpreted:
        pytest.skip("several interpreted kernels in one loop take a minute")
    p, q = (x.reshape(2, TOKENS, VOCAB) for x in inputs.rows(2 * TOKENS, VOCAB))

    @jax.jit
    def total(p: Any, q: Any) -> Any:
        return jax.lax.scan(
            lambda carry, x: (carry + jax_route.call(*x), None), jnp.float32(0), (p, q)
        )[0]

    loss = jax_route.numpy(total(*moved(jax_route, p, q)))
    expected = sum(tvd_reference(one, two) for one, two in zip(p, q, strict=True))
    budget.check_loss(loss, expected, 2 * TOKENS, VOCAB)


def test_clause_11_jax_second_order(jax_route: Route) -> None:
    """The derivative of the gradient of loss**2 along v is 2 * (dp . v) * dp, of loss itself 0."""
    # A shape and no labels, so that two interpreted derivatives take seconds.
    p, q, v = (jax_route.array(x) for x in (*inputs.rows(2, 5), inputs.rows(2, 5, seed=5)[0]))

    def loss(p: Any) -> Any:
        return jax_route.call(p, q)

    with jax_route.running():
        dp = np.asarray(jax.grad(loss)(p), np.float64)
        second = jax.grad(lambda p: jnp.vdot(jax.grad(lambda p: loss(p) ** 2)(p), v))(p)
        linear = jax.grad(lambda p: jnp.vdot(jax.grad(loss)(p), v))(p)
    expected = 2 * (dp * np.asarray(v, np.float64)).sum() * dp
    np.testing.assert_allclose(np.asarray(second), expected, rtol=1e-4, atol=1e-9)
    np.testing.assert_array_equal(np.asarray(linear), 0)
