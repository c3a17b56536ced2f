"""Contract clause 9: any vocab, any number of tokens, any strides, more than 2**31 elements."""

import itertools
from typing import Any

import numpy as np
import pytest

from parity_tests import budget, inputs, oracle
from parity_tests.routes import Route
from tvd_core.reference import tvd_reference, tvd_reference_grad


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [*itertools.product((1, 3, 1271), ("float32", "bfloat16")), (50257, "bfloat16")],
)
def test_clause_09_any_vocab(route: Route, vocab: int, dtype: str) -> None:
    oracle.check(route, *inputs.rows(2, vocab, dtype), upstream=0.5)


def test_clause_09_one_token(route: Route) -> None:
    oracle.check(route, *inputs.rows(1, 300))


def _strided(x: Any) -> Any:
    return x[:, ::2]


def _transposed(x: Any) -> Any:
    return x.T


def _offset(x: Any) -> Any:
    return x[1:, 3:]


LAYOUTS = {"transposed": _transposed, "strided": _strided, "offset": _offset}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clause_09_non_contiguous(route: Route, layout: str, dtype: str) -> None:
    p, q = inputs.rows(4, 600, dtype) if layout != "transposed" else inputs.rows(600, 4, dtype)
    oracle.check(route, p, q, layout=LAYOUTS[layout], upstream=4.0, reduction="sum")


def test_clause_09_expanded(route: Route) -> None:
    """One teacher row for every token: its gradient adds up over the tokens."""
    p, q = inputs.rows(3, 600)
    one = q[:1]

    def expand(x: Any) -> Any:
        if x.shape[0] != 1:
            return x
        return x.expand(3, 600) if route.framework == "torch" else x.repeat(3, axis=0)

    result = route.run(p, one, layout=expand, reduction="sum")
    full = np.broadcast_to(one, p.shape)
    budget.check_loss(result.loss, tvd_reference(p, full, reduction="sum"), 3, 600)
    dp, dq = tvd_reference_grad(p, full, reduction="sum")
    budget.check_gradient("dp", result.dp, dp, 3, route=route)
    np.testing.assert_array_equal(result.dq, dq.sum(0, keepdims=True))


def _with_negative_bit(x: Any) -> Any:
    """The values of ``x``, as a view of memory that holds them with the other sign."""
    import torch

    if x.is_floating_point():
        x = torch.complex(torch.zeros_like(x), -x).conj().imag
    else:
        x = torch._neg_view(-x)
    assert x.is_neg()
    return x


@pytest.mark.parametrize("name", ["p", "q", "labels", "weights", "normalizer", "upstream"])
def test_clause_09_negative_bit(torch_route: Route, name: str) -> None:
    """PyTorch may leave a negation to whoever reads the memory: ``z.conj().imag`` does."""
    import torch

    p, q = inputs.rows(4, 600)
    values = {
        "p": p,
        "q": q,
        "labels": np.array([1, 5, 2, 5], np.int64),
        "weights": inputs.weights_for(4),
        "normalizer": np.array(3.0, np.float32),
        "upstream": np.array(-1.75, np.float32),
    }

    def run(changed: str | None) -> list[np.ndarray]:
        x = {k: torch_route.array(v) for k, v in values.items()}
        if changed is not None:
            x[changed] = _with_negative_bit(x[changed])
        wanted = [x["p"].requires_grad_(), x["q"].requires_grad_()]
        upstream = x.pop("upstream")
        with torch_route.running():
            loss = torch_route.call(**x, ignore_index=5)
            gradients = torch.autograd.grad(loss, wanted, upstream)
        return [torch_route.numpy(y.resolve_neg()) for y in (loss, *gradients)]

    for what, actual, right in zip(("loss", "dp", "dq"), run(name), run(None), strict=True):
        oracle.assert_same_bits(what, actual, right)


@pytest.mark.parametrize("reduction", ["none", "per_token"])
def test_clause_09_strided_upstream_labels_and_weights(torch_route: Route, reduction: str) -> None:
    """An expanded upstream gradient is what ``loss.sum().backward()`` hands over."""
    import torch

    p, q = inputs.rows(4, 600)
    labels = np.repeat(inputs.labels_for(4), 2)
    weights = np.repeat(inputs.weights_for(4), 2)
    tp, tq = (torch_route.array(x).requires_grad_() for x in (p, q))
    loss = torch_route.call(
        tp,
        tq,
        torch_route.array(labels)[::2],
        weights=torch_route.array(weights)[::2],
        reduction=reduction,
    )
    with torch_route.running():
        dp, dq = torch.autograd.grad(loss.sum(), [tp, tq])
    right = tvd_reference_grad(p, q, labels[::2], weights=weights[::2], reduction=reduction)
    budget.check_gradients(
        torch_route.numpy(dp), torch_route.numpy(dq), right, 4, route=torch_route
    )


# --- more than 2**31 elements ---------------------------------------------------------------------


def _last_row_disjoint(route: Route, tokens: int, vocab: int, dtype: str) -> tuple[Any, Any]:
    """Zeros, but the last row: p holds all of its mass in the even places, q in the odd ones."""
    half = 2.0**-16  # exact in every dtype, and so are its multiples; 1 at vocab 2**17
    if route.framework == "torch":
        import torch

        p, q = (
            torch.zeros(tokens, vocab, dtype=getattr(torch, dtype), device="cuda") for _ in range(2)
        )
        p[-1, ::2] = q[-1, 1::2] = half
        return p, q
    import jax
    import jax.numpy as jnp

    @jax.jit
    def make(parity: Any) -> Any:
        row = jnp.arange(tokens)[:, None] == tokens - 1
        return (row & (jnp.arange(vocab) % 2 == parity)[None]).astype(dtype) * half

    return make(0), make(1)


def _per_token_and_gradient(route: Route, p: Any, q: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """Per-token values, the last row of dp, and how many values of the other rows are not 0."""
    if route.framework == "torch":
        import torch

        p.requires_grad_()
        loss = route.call(p, q, reduction="per_token")
        (dp,) = torch.autograd.grad(loss.sum(), [p])
        elsewhere = int(torch.count_nonzero(dp[:-1]))
    else:
        import jax
        import jax.numpy as jnp

        loss, vjp = jax.vjp(lambda p: route.call(p, q, reduction="per_token"), p)
        (dp,) = vjp(jnp.ones_like(loss))
        elsewhere = int(jax.jit(lambda x: jnp.count_nonzero(x[:-1]))(dp))
    return route.numpy(loss), route.numpy(dp[-1]).astype(np.float32), elsewhere


@pytest.mark.parametrize(
    ("tokens", "vocab", "dtype"),
    [(16384, 131072, "float32"), (16385, 131072, "bfloat16"), (42800, 50257, "bfloat16")],
    ids=["2**31", "more", "unaligned"],
)
def test_clause_09_last_row_beyond_int32_offsets(
    kernel_route: Route, tokens: int, vocab: int, dtype: str
) -> None:
    if not kernel_route.compiled_on_gpu:
        pytest.skip("needs the memory of a GPU")
    inputs_on_gpu = _last_row_disjoint(kernel_route, tokens, vocab, dtype)
    loss, last, elsewhere = _per_token_and_gradient(kernel_route, *inputs_on_gpu)
    del inputs_on_gpu
    if kernel_route.framework == "torch":
        import torch

        torch.cuda.empty_cache()  # JAX shares the GPU
    assert loss[-1] == vocab * 2.0**-17 and not loss[:-1].any()
    np.testing.assert_array_equal(last[:2], np.float32([0.5, -0.5]))
    np.testing.assert_array_equal(last, np.resize(np.float32([0.5, -0.5]), vocab))
    assert elsewhere == 0
