"""Clause 11, JAX: large batches, linearize, export, donation, and shard_map on one GPU."""

import functools
from typing import Any

import numpy as np
import pytest

from parity_tests import inputs, routes
from parity_tests.budget import check_loss
from parity_tests.logits_budget import budget_of, check_values, logits
from parity_tests.routes import Route

jax = pytest.importorskip("jax")
jnp = jax.numpy
P = jax.sharding.PartitionSpec

TOKENS, VOCAB = 4, 64
LOSSES = ("tvd_loss", "tvd_from_logits")


def pair(function: str, tokens: int = TOKENS, vocab: int = VOCAB) -> tuple[Any, Any]:
    make = inputs.rows if function == "tvd_loss" else logits
    one, two = make(tokens, vocab)
    return jnp.asarray(one), jnp.asarray(two)


@pytest.mark.parametrize("function", LOSSES)
def test_clause_11_jax_batch_above_65535(function: str) -> None:
    """More than a grid's second axis could count."""
    batch, vocab = 65537, 3
    p, q = (x.reshape(batch, 1, vocab) for x in pair(function, batch, vocab))
    call = routes.get("jax-xla").call

    def of(p: Any, q: Any) -> Any:
        return call(p, q, function=function)

    loss, gradient = jax.jit(jax.vmap(jax.value_and_grad(of)))(p, q)
    p64, q64 = (np.asarray(x[:, 0], np.float64) for x in (p, q))
    if function == "tvd_loss":
        check_loss(np.asarray(loss), 0.5 * np.abs(p64 - q64).sum(-1), 1, vocab)
    else:
        budget = budget_of(p64, q64, 1.0)
        check_values("loss", np.asarray(loss), budget.rows.tvd, budget.errors.tvd)
    last = jax.grad(of)(p[-1], q[-1])
    np.testing.assert_allclose(gradient[-1], last, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("function", LOSSES)
def test_clause_11_jax_linearize_in_xla(function: str) -> None:
    p, q = pair(function)
    call = routes.get("jax-xla").call

    def of(p: Any) -> Any:
        return call(p, q, function=function)

    loss, linear = jax.linearize(of, p)
    np.testing.assert_allclose(loss, of(p), rtol=1e-6)
    np.testing.assert_allclose(linear(q), jnp.vdot(jax.grad(of)(p), q), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("function", LOSSES)
def test_clause_11_jax_linearize_of_kernels_is_an_error(function: str) -> None:
    """Never a silent 0: the kernels have reverse-mode derivatives only."""
    import tvd_jax
    from tvd_jax import compat

    struct = jax.ShapeDtypeStruct((TOKENS, 4096), "float32")
    loss = functools.partial(getattr(tvd_jax, function), implementation="pallas")

    def along(p: Any, q: Any) -> Any:
        return jax.linearize(lambda p: loss(p, q), p)[1](p)

    with compat.assume_cuda(), pytest.raises(TypeError, match="forward-mode"):
        jax.jit(along).trace(struct, struct).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("function", LOSSES)
def test_clause_11_jax_export_and_donation(function: str) -> None:
    """A jitted step is exported, read back and called; a jitted step takes over its input."""
    pytest.importorskip("flatbuffers")
    p, q = pair(function)
    call = routes.get("jax-xla").call
    step = jax.jit(jax.value_and_grad(lambda p, q: call(p, q, function=function)))
    loss, gradient = step(p, q)
    read = jax.export.deserialize(jax.export.export(step)(p, q).serialize())
    for one, two in zip(read.call(p, q), (loss, gradient), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-8)
    donating = jax.jit(
        lambda p, q: p - jax.grad(lambda p: call(p, q, function=function))(p), donate_argnums=0
    )
    expected = np.asarray(p - gradient)
    np.testing.assert_allclose(donating(p, q), expected, rtol=1e-5, atol=1e-7)
    assert p.is_deleted()


@pytest.mark.parametrize("function", LOSSES)
def test_clause_11_jax_kernels_under_shard_map(jax_kernel_route: Route, function: str) -> None:
    """On one device, with types checked and not; gradients of types gone wrong are multiples."""
    if not jax_kernel_route.compiled_on_gpu:
        pytest.skip("several blocks of barriers may hang in the interpreter under shard_map")
    arrays = pair(function, 16, 4096)
    labels = jnp.asarray(inputs.labels_for(16))
    mesh = jax.make_mesh((1, 1), ("t", "v"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    axes = {"token_axis_name": "t", "axis_name": "v"}

    def of(p: Any, q: Any, labels: Any, **options: Any) -> Any:
        return jax_kernel_route.call(p, q, labels, function=function, **options)

    right = jax.jit(jax.value_and_grad(of, (0, 1)))(*arrays, labels)
    for check_vma in (True, False):
        over = jax.shard_map(
            lambda p, q, labels: of(p, q, labels, **axes),
            mesh=mesh,
            in_specs=(P("t", "v"), P("t", "v"), P("t")),
            out_specs=P(),
            check_vma=check_vma,
        )
        found = jax.jit(jax.value_and_grad(over, (0, 1)))(*arrays, labels)
        for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-8)
