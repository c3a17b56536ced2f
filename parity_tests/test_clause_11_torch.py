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
    loss = torch_route.call(student, teacher)
    with torch_route.running():
        loss.backward()
    right = torch_route.run(p, q, wrt="p")
    oracle.assert_same_bits("dp", torch_route.numpy(student.grad), right.dp)


CONSTANTS = [(r, name) for r in ("batchmean", "none") for name in ("labels", "weights")]


@pytest.mark.parametrize(("reduction", "name"), [*CONSTANTS, ("batchmean", "normalizer")])
def test_clause_11_torch_constants_from_inference_mode(
    torch_route: Route, reduction: str, name: str
) -> None:
    """PyTorch saves no tensor of inference mode for a backward."""
    p, q = inputs.rows(TOKENS, VOCAB)
    constants = {
        "labels": np.array([1, -100, 2], np.int32),
        "weights": np.array([0.5, 1.0, 2.0], np.float32),
        "normalizer": np.array(4.0, np.float32),
    }
    if name == "weights":
        del constants["labels"]  # eager makes new weights of the two
    if reduction == "none":
        del constants["normalizer"]
    upstream = 2.0 if reduction == "batchmean" else np.full((TOKENS, VOCAB), 2.0)
    right = torch_route.run(p, q, wrt="p", reduction=reduction, upstream=upstream, **constants)
    arrays = torch_route.arrays(constants)
    with torch.inference_mode():
        arrays[name] = arrays[name] * 1
    assert arrays[name].is_inference()
    student = torch_route.array(p).requires_grad_()
    loss = torch_route.call(student, torch_route.array(q), reduction=reduction, **arrays)
    with torch_route.running():
        (2 * loss.sum()).backward()
    oracle.assert_same_bits("dp", torch_route.numpy(student.grad), right.dp)


def test_clause_11_torch_copies_inference_tensors_for_a_backward_only(torch_route: Route) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    copied: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func.overloadpacket.__name__ == "clone":
                copied.append(args[0])
            return func(*args, **(kwargs or {}))

    p, q = leaves(torch_route)
    with torch.inference_mode():
        teacher = q * 1.0
    with Watch(), torch.no_grad(), torch_route.running():
        torch_route.call(p, teacher)
    with Watch(), torch_route.running():
        torch_route.call(p.detach(), teacher)
        torch_route.call(p, q)
        assert copied == []
        torch_route.call(p, teacher)
    assert len(copied) == (0 if torch_route.is_kernel or p.is_cuda else 1)


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


@pytest.mark.parametrize("reduction", ["batchmean", "per_token", "none"])
def test_clause_11_torch_double_backward_beside_an_ignored_nan(
    torch_route: Route, reduction: str
) -> None:
    """What an ignored row holds stays out of the derivative of the gradient, too."""
    p, q = inputs.rows(TOKENS, VOCAB)
    p[1], q[1, 5] = np.nan, np.inf
    labels = torch_route.array(np.array([1, -100, 2], np.int32))
    v = torch_route.array(inputs.rows(TOKENS, VOCAB, seed=5)[0])
    results = []
    for ignored_row in (p[1], np.zeros(VOCAB, np.float32)):
        p[1] = ignored_row
        x = torch_route.array(p).requires_grad_()
        with torch_route.running():
            loss = torch_route.call(x, torch_route.array(q), labels, reduction=reduction)
            (first,) = torch.autograd.grad((loss**2).sum(), [x], create_graph=True)
            results.append(torch.autograd.grad((first * v).sum(), [x])[0])
        q[1] = 0
    assert torch.equal(results[0], results[1]) and results[0].any()


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

    def __call__(
        self, p: Any, q: Any, labels: Any = None, weights: Any = None, normalizer: Any = None
    ) -> Any:
        from tvd_torch import tvd_loss

        return tvd_loss(p, q, labels, weights=weights, normalizer=normalizer, **self.options)


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


@pytest.mark.parametrize("reduction", ["batchmean", "per_token", "none"])
@pytest.mark.parametrize("wrt", ["p", "q", "pq"])
def test_clause_11_torch_double_backward_of_a_compiled_loss(
    torch_route: Route, reduction: str, wrt: str
) -> None:
    p, q = inputs.rows(TOKENS, VOCAB)
    labels, weights = np.array([1, -100, 2], np.int32), np.array([0.5, 1.0, 2.0], np.float32)
    constants = torch_route.array(labels), torch_route.array(weights)
    along = [torch_route.array(x) for x in inputs.rows(TOKENS, VOCAB, seed=5)]
    call = TorchCall(torch_route.implementation, reduction)
    torch._dynamo.reset()
    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="eager")):
        arrays = {"p": torch_route.array(p), "q": torch_route.array(q)}
        wanted = [arrays[name].requires_grad_() for name in wrt]
        with torch_route.running():
            loss = function(arrays["p"], arrays["q"], *constants)
            first = torch.autograd.grad((loss**2).sum(), wanted, create_graph=True)
            scalar = sum((x * v).sum() for x, v in zip(first, along, strict=False))
            results.append(torch.autograd.grad(scalar, wanted))
    assert results[0][0].any()
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-8)


def test_clause_11_torch_double_backward_through_aot_is_refused(torch_route: Route) -> None:
    """By PyTorch, and aloud."""
    torch._dynamo.reset()
    p, q = leaves(torch_route)
    call = TorchCall(torch_route.implementation, "batchmean")
    with torch_route.running():
        loss = torch.compile(call, fullgraph=True, backend="aot_eager")(p, q)
        (first,) = torch.autograd.grad(loss**2, [p], create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            torch.autograd.grad(first.sum(), [p])


@pytest.mark.parametrize("wrt", ["p", "q", "pq"])
@pytest.mark.parametrize("reduction", ["batchmean", "per_token", "none"])
def test_clause_11_torch_opcheck(torch_kernel_route: Route, reduction: str, wrt: str) -> None:
    """No label is ignored: opcheck compares all outputs, and codes of ignored rows are not set."""
    from tvd_torch import loss as operators

    arrays = dict(zip("pq", inputs.rows(TOKENS, 40), strict=True))
    tensors = {k: torch_kernel_route.array(v) for k, v in arrays.items()}
    dtypes = [tensors[k].requires_grad_().dtype if k in wrt else None for k in "pq"]
    labels = torch_kernel_route.array(np.array([1, 0, 2], np.int32))
    weights = torch_kernel_route.array(np.array([0.5, 1.0, 2.0], np.float32))
    arguments = (*tensors.values(), labels, weights, None, None, reduction, -100, True)
    with torch_kernel_route.running():
        torch.library.opcheck(operators._forward_op, arguments)
        loss, codes, divisor = (x.detach() for x in operators._forward_op(*arguments))
        upstream = torch.rand_like(loss).requires_grad_()
        kept = (codes, upstream, divisor if reduction == "batchmean" else None, labels, weights)
        torch.library.opcheck(
            operators._backward_op, (*kept, [TOKENS, 40], *dtypes, reduction, -100)
        )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "kind", [float, int, np.float32, np.float64, np.int64, np.array], ids=lambda kind: kind.__name__
)
def test_clause_11_torch_compile_with_a_number_for_the_normalizer(
    torch_route: Route, backend: str, kind: Any
) -> None:
    """Dynamo holds NumPy's numbers as arrays. A new number has its own value, not the first's."""
    call = TorchCall(torch_route.implementation, "batchmean")
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    p, q = (torch_route.array(x) for x in inputs.rows(TOKENS, 40))
    for number in (3, 5, 7):
        with torch_route.running():
            actual = compiled(p, q, normalizer=kind(number))
            torch.testing.assert_close(actual, call(p, q, normalizer=number), rtol=1e-6, atol=0)


def test_clause_11_torch_compile_with_a_bad_normalizer(torch_route: Route) -> None:
    call = TorchCall(torch_route.implementation, "batchmean")
    p, q = (torch_route.array(x) for x in inputs.rows(TOKENS, 40))
    for number in (1e-50, 10**400):
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        with pytest.raises(RuntimeError, match="normalizer must be positive"):
            compiled(p, q, normalizer=number)


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


def test_clause_11_torch_vmap_is_refused_or_right(torch_route: Route) -> None:
    """Without gradients the kernels are called directly: not on what torch.func passes around."""
    import torch

    p, q = (torch_route.array(np.stack([x, x[::-1]])) for x in inputs.rows(2, 300))
    try:
        with torch_route.running():
            mapped = torch.func.vmap(lambda p, q: torch_route.call(p, q))(p, q)
    except (RuntimeError, NotImplementedError) as error:
        assert "vmap" in str(error)
        return
    for i in range(2):
        right = torch_route.call(p[i], q[i])
        np.testing.assert_allclose(torch_route.numpy(mapped[i]), torch_route.numpy(right), 1e-6)


@pytest.mark.parametrize("through", ["jvp", "dual numbers"])
def test_clause_11_torch_compiled_forward_mode_is_refused_or_right(
    torch_route: Route, through: str
) -> None:
    """The operators that a compiled loss calls have no such rule, and PyTorch would drop it."""
    import torch
    import torch.autograd.forward_ad as forward_ad

    p, q = (torch_route.array(x) for x in inputs.rows(TOKENS, VOCAB))
    tangent = torch.ones_like(p)
    loss = TorchCall(torch_route.implementation, "sum")

    def by_jvp(p: Any, q: Any, tangent: Any) -> Any:
        return torch.func.jvp(lambda p: loss(p, q), (p,), (tangent,))[1]

    torch._dynamo.reset()
    try:
        with torch_route.running():
            if through == "jvp":
                derivative = torch.compile(by_jvp, backend="aot_eager")(p, q, tangent)
            else:
                with forward_ad.dual_level():
                    dual = forward_ad.make_dual(p, tangent)
                    result = torch.compile(loss, backend="aot_eager")(dual, q)
                    derivative = forward_ad.unpack_dual(result).tangent
    except Exception:  # PyTorch wraps the reason in errors of many kinds
        assert torch_route.is_kernel
        return
    assert derivative is not None
    torch.testing.assert_close(derivative, 0.5 * torch.sign(p - q).sum())
