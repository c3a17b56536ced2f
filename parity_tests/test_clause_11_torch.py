"""Contract clause 11, PyTorch: autograd in all its uses, torch.compile, the module."""

from typing import Any

import numpy as np
import pytest

from parity_tests import inputs, oracle
from parity_tests.routes import Route

torch = pytest.importorskip("torch")

# Deprecations inside PyTorch and its compiler are not this project's.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TOKENS, VOCAB = 3, 600


def leaves(route: Route, dtype: str = "float32") -> tuple[Any, Any]:
    p, q = inputs.rows(TOKENS, VOCAB, dtype)
    return route.array(p).requires_grad_(), route.array(q).requires_grad_()


def test_clause_11_torch_no_grad_keeps_nothing(torch_route: Route) -> None:
    p, q = leaves(torch_route)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            loss = torch_route.call(p, q)
        assert not loss.requires_grad and loss.grad_fn is None


def test_clause_11_torch_inference_mode_teacher(torch_route: Route) -> None:
    """The teacher's probabilities come out of inference mode; the student trains on."""
    p, q = inputs.rows(TOKENS, VOCAB)
    with torch.inference_mode():
        teacher = torch_route.array(q) * 1.0
    student = torch_route.array(p).requires_grad_()
    try:
        loss = torch_route.call(student, teacher)
    except RuntimeError as error:  # eager keeps q for the backward, which PyTorch forbids
        assert torch_route.implementation == "eager" and "nference tensor" in str(error)
        return
    with torch_route.running():
        loss.backward()
    right = torch_route.run(p, q, wrt="p")
    oracle.assert_same_bits("dp", torch_route.numpy(student.grad), right.dp)


def test_clause_11_torch_retain_graph_twice(torch_route: Route) -> None:
    p, q = leaves(torch_route)
    loss = torch_route.call(p, q)
    with torch_route.running():
        first = torch.autograd.grad(loss, [p, q], retain_graph=True)
        kept = [x.clone() for x in first]
        for x in first:
            x.zero_()  # what the user does with a gradient must not reach what is saved
        second = torch.autograd.grad(loss, [p, q])
        for one, two in zip(kept, second, strict=True):
            assert torch.equal(one, two)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, [p, q])


def test_clause_11_torch_in_a_graph(torch_route: Route) -> None:
    """Behind a softmax and beside another loss, as in training."""
    rng = np.random.default_rng(0)
    logits_p, logits_q = (rng.standard_normal((TOKENS, VOCAB)).astype(np.float32) for _ in "pq")
    gradients = []
    for function in (
        torch_route.call,
        lambda p, q: 0.5 * (p - q).abs().sum() / TOKENS,
    ):
        s, t = (torch_route.array(x).requires_grad_() for x in (logits_p, logits_q))
        p, q = s.softmax(-1), t.softmax(-1)
        with torch_route.running():
            (3 * function(p, q) + (p * q).sum()).backward()
        gradients.append((s.grad, t.grad))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)


def test_clause_11_torch_double_backward(torch_route: Route) -> None:
    """d/dp of loss**2 is 2 * loss * dp; its own derivative along v is 2 * (dp . v) * dp."""
    p, q = leaves(torch_route)
    labels = torch_route.array(np.array([1, -100, 2], np.int32))
    weights = torch_route.array(np.array([0.5, 1.0, 2.0], np.float32))
    v, w = (torch_route.array(x) for x in inputs.rows(TOKENS, VOCAB, seed=5))
    with torch_route.running():
        dp, dq = torch.autograd.grad(torch_route.call(p, q, labels, weights=weights), [p, q])
        loss = torch_route.call(p, q, labels, weights=weights)
        first = torch.autograd.grad(loss**2, [p, q], create_graph=True)
        second = torch.autograd.grad((first[0] * v).sum() + (first[1] * w).sum(), [p, q])
    along = (dp * v).sum() + (dq * w).sum()
    torch.testing.assert_close(second, (2 * along * dp, 2 * along * dq), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(first, (2 * loss * dp, 2 * loss * dq), rtol=1e-5, atol=0)


@pytest.mark.parametrize("reduction", ["per_token", "none"])
@pytest.mark.parametrize("wrt", ["p", "q"])
def test_clause_11_torch_double_backward_of_unreduced(
    torch_route: Route, reduction: str, wrt: str
) -> None:
    p, q = inputs.rows(TOKENS, VOCAB)
    arrays = {"p": torch_route.array(p), "q": torch_route.array(q)}
    x = arrays[wrt].requires_grad_()
    v = torch_route.array(inputs.rows(TOKENS, VOCAB, seed=5)[0])
    results = []
    for function in (
        lambda: torch_route.call(arrays["p"], arrays["q"], reduction=reduction),
        lambda: _definition(arrays["p"], arrays["q"], reduction),
    ):
        with torch_route.running():
            (first,) = torch.autograd.grad((function() ** 2).sum(), [x], create_graph=True)
            results.append(torch.autograd.grad((first * v).sum(), [x]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-8)


def _definition(p: Any, q: Any, reduction: str) -> Any:
    elementwise = 0.5 * (p - q).abs()
    return elementwise if reduction == "none" else elementwise.sum(-1)


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "per_token", "none"])
def test_clause_11_torch_gradcheck_in_float64(reduction: str) -> None:
    from tvd_torch import tvd_loss

    generator = torch.Generator().manual_seed(0)
    # Far enough from ties for the finite differences.
    q = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    p = q + torch.where(torch.rand(3, 5, generator=generator) < 0.5, -0.1, 0.1)
    labels, weights = torch.tensor([0, -100, 1]), torch.tensor([0.5, 1.0, 2.0])

    def loss(p: Any, q: Any) -> Any:
        return tvd_loss(p, q, labels, weights=weights, reduction=reduction)

    points = (p.requires_grad_(), q.requires_grad_())
    assert torch.autograd.gradcheck(loss, points)
    assert torch.autograd.gradgradcheck(lambda p, q: loss(p, q) ** 2, points)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "per_token", "none"])
def test_clause_11_torch_compile_without_a_graph_break(
    torch_route: Route, backend: str, reduction: str
) -> None:
    p, q = inputs.rows(TOKENS, VOCAB)
    labels, weights = np.array([1, -100, 2], np.int32), np.array([0.5, 1.0, 2.0], np.float32)
    call = TorchCall(torch_route.implementation, reduction)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    results = []
    for function in (call, compiled):
        leaves = [torch_route.array(x).requires_grad_() for x in (p, q)]
        with torch_route.running():
            loss = function(*leaves, torch_route.array(labels), torch_route.array(weights))
            gradients = torch.autograd.grad((loss**2).sum(), leaves)
        results.append((loss, *gradients))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=0)


class TorchCall:
    """A loss with everything bound but the tensors."""

    def __init__(self, implementation: str, reduction: str) -> None:
        self.options = {"implementation": implementation, "reduction": reduction}

    def __call__(self, p: Any, q: Any, labels: Any = None, weights: Any = None) -> Any:
        from tvd_torch import tvd_loss

        return tvd_loss(p, q, labels, weights=weights, **self.options)


def test_clause_11_torch_compile_with_new_token_counts(torch_route: Route) -> None:
    """Dynamic token counts: one graph serves them all, with right values."""
    torch._dynamo.reset()
    call = TorchCall(torch_route.implementation, "batchmean")
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (4, 2, 7):
        p, q = (torch_route.array(x).requires_grad_() for x in inputs.rows(tokens, 40))
        with torch_route.running():
            actual = torch.autograd.grad(compiled(p, q), [p, q])
            expected = torch.autograd.grad(call(p, q), [p, q])
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


def test_clause_11_torch_compiled_inference(torch_route: Route) -> None:
    torch._dynamo.reset()
    p, q = leaves(torch_route)
    call = TorchCall(torch_route.implementation, "batchmean")
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with torch.no_grad(), torch_route.running():
        loss = compiled(p, q)
        torch.testing.assert_close(loss, call(p, q), rtol=1e-6, atol=0)
    assert not loss.requires_grad


def test_clause_11_torch_autocast_changes_nothing(torch_route: Route) -> None:
    p, q = leaves(torch_route, "bfloat16")
    plain = torch_route.call(p, q)
    with torch.autocast(p.device.type, torch.bfloat16):
        loss = torch_route.call(p, q)
    assert loss.dtype == torch.float32 and torch.equal(loss, plain)


def test_clause_11_torch_module_is_the_function(torch_route: Route) -> None:
    from tvd_torch import TVDLoss

    p, q = leaves(torch_route)
    labels = torch_route.array(np.array([7, 1, 2], np.int32))
    weights = torch_route.array(np.array([0.5, 1.0, 2.0], np.float32))
    module = TVDLoss("mean", 7, torch_route.implementation)
    with torch_route.running():
        actual = module(p, q, labels, weights=weights, normalizer=4)
    expected = torch_route.call(
        p, q, labels, reduction="mean", ignore_index=7, weights=weights, normalizer=4
    )
    assert torch.equal(actual, expected) and actual.requires_grad
    assert "reduction='mean'" in repr(module) and not list(module.parameters())
    assert not module.state_dict()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"reduction": "avg"}, "reduction must be one of"),
        ({"ignore_index": 0.5}, "ignore_index must be an int, got 0.5"),
        ({"implementation": "cuda"}, "implementation must be None or one of triton, eager"),
    ],
)
def test_clause_11_torch_module_refuses_bad_options(arguments: Any, words: str) -> None:
    from tvd_torch import TVDLoss

    with pytest.raises((ValueError, TypeError), match=words):
        TVDLoss(**arguments)


def test_clause_11_torch_forward_mode_is_refused_or_right(torch_route: Route) -> None:
    """Never a silent 0."""
    p, q = (torch_route.array(x) for x in inputs.rows(TOKENS, VOCAB))
    tangent = torch.ones_like(p)
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level(), torch_route.running():
        try:
            loss = torch_route.call(forward_ad.make_dual(p, tangent), q, reduction="sum")
        except (NotImplementedError, RuntimeError):
            return
        derivative = forward_ad.unpack_dual(loss).tangent
    assert derivative is not None
    torch.testing.assert_close(derivative, 0.5 * torch.sign(p - q).sum())
