"""Contract clause 11, PyTorch: the transforms of torch.func, and forward-mode differentiation."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parity_tests import inputs, routes
from parity_tests.logits_budget import logits
from parity_tests.routes import Route

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

BATCH, TOKENS, VOCAB = 2, 2, 20
# A hybrid is made of all that the pass over the logits gives but the target's logit. Triton's
# interpreter takes a second for each of its calls.
FUNCTIONS = ("tvd_loss", "hybrid_loss")
LABELS = np.array([[1, -100], [5, -100]])
WEIGHTS = np.array([[0.5, 1.0], [3.0, 1.0]], np.float32)


def arrays(route: Route, function: str) -> list[Any]:
    """p, q, labels and weights of a batch; what the ignored tokens hold must not be seen."""
    if function == "tvd_loss":
        p, q = inputs.rows(BATCH * TOKENS, VOCAB)
    else:
        p, q = logits(BATCH * TOKENS, VOCAB, masked=0.0)
    p, q = (x.reshape(BATCH, TOKENS, VOCAB) for x in (p, q))
    p[0, 1, 4] = q[1, 1, 0] = np.nan
    return [route.array(x) for x in (p, q, LABELS, WEIGHTS)]


def loss_of(route: Route, function: str, **options: Any) -> Callable[..., Any]:
    return lambda p, q, labels, weights: route.call(
        p, q, labels, weights=weights, function=function, **options
    )


def by_autograd(route: Route, loss: Callable[..., Any], p: Any, q: Any, *rest: Any) -> Any:
    leaves = [x.clone().requires_grad_() for x in (p, q)]
    with route.running():
        value = loss(*leaves, *rest)
        return value.detach(), torch.autograd.grad(value.sum(), leaves)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("function", [*FUNCTIONS, "cross_entropy_tvd_loss"])
def test_clause_11_torch_func_grad_and_vjp(torch_route: Route, function: str) -> None:
    p, q, labels, weights = (x[0] for x in arrays(torch_route, function))
    loss = loss_of(torch_route, function)
    value, right = by_autograd(torch_route, loss, p, q, labels, weights)
    with torch_route.running():
        close(torch.func.grad(loss, (0, 1))(p, q, labels, weights), right)
        found, pullback = torch.func.vjp(lambda p, q: loss(p, q, labels, weights), p, q)
        close(found, value)
        close(pullback(torch.ones_like(found)), right)
    assert all(x.any() and not x[1].any() for x in right)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (0, None, None, 0), (None, 1, 0, None)], ids=str)
def test_clause_11_torch_func_vmap_of_grad(
    torch_route: Route, function: str, in_dims: tuple[int | None, ...]
) -> None:
    batch = arrays(torch_route, function)
    batch = [
        x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(batch, in_dims, strict=True)
    ]
    loss = loss_of(torch_route, function, reduction="mean")
    step = torch.func.grad_and_value(loss, (0, 1))
    with torch_route.running():
        gradients, values = torch.func.vmap(step, in_dims)(*batch)
    for i in range(BATCH):
        one = [
            x if dim is None else x.select(dim, i) for x, dim in zip(batch, in_dims, strict=True)
        ]
        value, right = by_autograd(torch_route, loss, *one)
        close(values[i], value)
        close(tuple(x[i] for x in gradients), right)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_clause_11_torch_func_jacrev(torch_route: Route, function: str) -> None:
    """Only the token's own row has a say in its loss. The rows start at three alignments."""
    p, q = inputs.rows(3, VOCAB) if function == "tvd_loss" else logits(3, VOCAB, masked=0.0)
    p, q = torch_route.array(p), torch_route.array(q)
    loss = loss_of(torch_route, function, reduction="per_token")
    _, (right, _) = by_autograd(torch_route, loss, p, q, None, None)
    with torch_route.running():
        jacobian = torch.func.jacrev(loss)(p, q, None, None)
    assert jacobian.shape == (3, 3, VOCAB)
    for i in range(3):
        for j in range(3):
            close(jacobian[i, j], right[i] if i == j else torch.zeros_like(right[i]))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_clause_11_torch_forward_mode_is_the_gradient_along(
    torch_route: Route, function: str
) -> None:
    """Not 0, which PyTorch would take for the derivative of an operator without a rule."""
    import torch.autograd.forward_ad as forward_ad

    p, q, labels, weights = (x[0] for x in arrays(torch_route, function))
    along = [torch_route.array(x) for x in inputs.rows(TOKENS, VOCAB, seed=3)]
    loss = loss_of(torch_route, function, reduction="per_token")
    _, gradients = by_autograd(torch_route, loss, p, q, labels, weights)
    right = sum((g * v).sum(-1) for g, v in zip(gradients, along, strict=True))
    with torch_route.running():
        _, by_jvp = torch.func.jvp(lambda p, q: loss(p, q, labels, weights), (p, q), tuple(along))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(p, along[0])
            by_dual = forward_ad.unpack_dual(loss(dual, q, labels, weights)).tangent
    assert by_jvp.abs().max() > 1e-3
    close(by_jvp, right)
    close(by_dual, (gradients[0] * along[0]).sum(-1))


def test_clause_11_torch_func_elements(torch_route: Route) -> None:
    """Reduction none: its gradient, one of a batch, and along a direction."""
    batch = arrays(torch_route, "tvd_loss")
    loss = loss_of(torch_route, "tvd_loss", reduction="none")
    along = torch_route.array(inputs.rows(TOKENS, VOCAB, seed=3)[0])
    with torch_route.running():
        values = torch.func.vmap(loss)(*batch)
        gradients = torch.func.vmap(torch.func.grad(lambda *x: loss(*x).sum()))(*batch)
    for i in range(BATCH):
        one = [x[i] for x in batch]
        value, (right, _) = by_autograd(torch_route, loss, *one)
        close(values[i], value)
        close(gradients[i], right)
        with torch_route.running():
            _, tangent = torch.func.jvp(lambda p, rest=one[1:]: loss(p, *rest), (one[0],), (along,))
        close(tangent, right * along)


def test_clause_11_torch_func_hessian(torch_route: Route) -> None:
    """Of loss**2 it is 2 dp dp', however it is built."""
    p, q, labels, weights = (x[0] for x in arrays(torch_route, "tvd_loss"))
    p, q = p[:, :5], q[:, :5]  # one backward an element, and the last one is NaN in the ignored row
    loss = loss_of(torch_route, "tvd_loss")
    _, (dp, _) = by_autograd(torch_route, loss, p, q, labels, weights)

    def squared(p: Any) -> Any:
        return loss(p, q, labels, weights) ** 2

    with torch_route.running():
        for outer in (torch.func.jacrev, torch.func.jacfwd):
            hessian = outer(torch.func.grad(squared))(p)
            close(hessian, 2 * torch.einsum("ij,kl->ijkl", dp, dp))


def test_clause_11_torch_func_second_derivative_of_logits(logits_torch_route: Route) -> None:
    s, t = (logits_torch_route.array(x) for x in logits(2, 5, masked=0.0))

    def gradient(s: Any) -> Any:
        loss = loss_of(logits_torch_route, "tvd_from_logits")
        return torch.func.grad(lambda s: loss(s, t, None, None))(s)

    with logits_torch_route.running():
        if logits_torch_route.is_kernel:
            for outer in (torch.func.jacrev, torch.func.jacfwd):
                with pytest.raises((NotImplementedError, RuntimeError)):
                    outer(gradient)(s)
            return
        hessian = torch.func.jacrev(gradient)(s).reshape(10, 10)
    assert hessian.any()
    close(hessian, hessian.T)
    step = 1e-2 * t
    difference = (gradient(s + step) - gradient(s - step)).reshape(10)
    torch.testing.assert_close(2 * hessian @ step.reshape(10), difference, rtol=0.05, atol=1e-4)


def test_clause_11_torch_second_derivative_of_kernels_from_logits_is_refused() -> None:
    """By ``backward`` and on the way to one tensor, in the words of ``torch.func``."""
    route = routes.get("torch-triton")
    words = (
        "implementation 'triton' has no second derivative from logits: use implementation 'eager'"
    )
    s, t = (route.array(x).requires_grad_() for x in logits(2, 5, masked=0.0))
    with route.running():
        loss = loss_of(route, "tvd_from_logits")(s, t, None, None)
        first = torch.autograd.grad(loss, [s, t], create_graph=True)
        penalty = loss + sum((x**2).sum() for x in first)
        for again in (
            lambda: penalty.backward(retain_graph=True),
            lambda: torch.autograd.grad(penalty, s, retain_graph=True),
            lambda: torch.autograd.grad(penalty, t),
        ):
            with pytest.raises(NotImplementedError, match=re.escape(words)):
                again()


def test_clause_11_torch_func_of_a_compiled_loss_is_right_or_refused(torch_route: Route) -> None:
    from parity_tests.test_clause_11_torch import TorchCall

    p, q = (torch_route.array(x) for x in inputs.rows(TOKENS, VOCAB))
    call = TorchCall(torch_route.implementation, "batchmean")
    torch._dynamo.reset()
    compiled = torch.compile(torch.func.grad(call), backend="aot_eager")
    _, (right, _) = by_autograd(torch_route, call, p, q)
    try:
        with torch_route.running():
            gradient = compiled(p, q)
    except Exception as error:  # PyTorch wraps the reason in errors of many kinds
        assert torch_route.is_kernel and "setup_context" in str(error)
        return
    close(gradient, right)
