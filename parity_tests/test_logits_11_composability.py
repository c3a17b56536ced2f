"""Clauses 5 and 11 for logits: gradients that are asked for, autograd, compilers, transforms."""

from typing import Any

import numpy as np
import pytest

from parity_tests import inputs, logits_oracle
from parity_tests.logits_budget import logits
from parity_tests.routes import Route

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TOKENS, VOCAB = 3, 70
LABELS = np.array([1, -100, 2], np.int32)
FUNCTIONS = ("tvd_from_logits", "acceptance_loss", "hybrid_loss", "cross_entropy_tvd_loss")


@pytest.mark.parametrize("wrt", ["p", "q", "pq"])
def test_logits_each_gradient_only_if_asked_for(logits_route: Route, wrt: str) -> None:
    logits_oracle.check(logits_route, *logits(TOKENS, VOCAB), wrt=wrt)


@pytest.mark.parametrize("upstream", [0.0, -2.0, 1 / 3, 1e4])
def test_logits_upstream_gradient(logits_route: Route, upstream: float) -> None:
    logits_oracle.check(logits_route, *logits(TOKENS, VOCAB), upstream=np.float32(upstream))


# --- PyTorch -------------------------------------------------------------------------------------


def leaves(route: Route) -> tuple[Any, Any, Any]:
    # A teacher's token that the student masks makes the divergence infinite.
    s, t = (route.array(x).requires_grad_() for x in logits(TOKENS, VOCAB, masked=0.0))
    return s, t, route.array(LABELS)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_logits_no_grad_keeps_nothing(logits_torch_route: Route, function: str) -> None:
    import torch

    s, t, labels = leaves(logits_torch_route)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            loss = logits_torch_route.call(s, t, labels, function=function)
        assert not loss.requires_grad and loss.grad_fn is None


def test_logits_no_codes_without_a_gradient(
    torch_kernel_route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a byte an element is written only if a gradient is wanted."""
    import torch

    from tvd_torch import triton_launch

    kept = []
    original = triton_launch.logits_forward

    def noting(*arguments: Any, **options: Any) -> None:
        kept.append(arguments[10].numel())
        original(*arguments, **options)

    monkeypatch.setattr(triton_launch, "logits_forward", noting)
    s, t, labels = leaves(torch_kernel_route)
    with torch.no_grad():
        torch_kernel_route.call(s, t, labels, function="tvd_from_logits")
    torch_kernel_route.call(s.detach(), t.detach(), labels, function="tvd_from_logits")
    torch_kernel_route.call(s, t, labels, function="tvd_from_logits")
    assert kept == [0, 0, TOKENS * 2048]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_logits_teacher_of_inference_mode(logits_torch_route: Route, function: str) -> None:
    """The teacher's logits, labels and weights come out of inference mode; the student trains."""
    import torch

    s, t, labels = leaves(logits_torch_route)
    weights = logits_torch_route.array(np.array([0.5, 1.0, 2.0], np.float32))
    gradients = []
    for make in (torch.no_grad, torch.inference_mode):
        with make():
            constants = [x * 1 for x in (t, labels, weights)]
        loss = logits_torch_route.call(s, *constants[:2], weights=constants[2], function=function)
        with logits_torch_route.running():
            gradients += torch.autograd.grad(loss, s)
    assert gradients[0].any() and torch.equal(*gradients)


def test_logits_retain_graph_twice(logits_torch_route: Route) -> None:
    import torch

    s, t, labels = leaves(logits_torch_route)
    loss = logits_torch_route.call(s, t, labels, function="hybrid_loss")
    with logits_torch_route.running():
        first = torch.autograd.grad(loss, [s, t], retain_graph=True)
        second = torch.autograd.grad(loss, [s, t])
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_logits_double_backward_in_eager(function: str) -> None:
    torch = pytest.importorskip("torch")
    import tvd_torch

    s, t = (torch.tensor(x, dtype=torch.float64) for x in logits(2, 5, masked=0.0))
    labels = torch.tensor([1, 3])

    def loss(s: Any, t: Any) -> Any:
        if function == "hybrid_loss":  # whose share of the divergence counts as constant
            return tvd_torch.hybrid_loss(s, t, labels, eta=0.0, implementation="eager")
        return getattr(tvd_torch, function)(s, t, labels, implementation="eager")

    leaves = [x.requires_grad_() for x in (s, t)]
    assert torch.autograd.gradcheck(loss, leaves)
    assert torch.autograd.gradgradcheck(loss, leaves)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_logits_torch_compile(logits_torch_route: Route, function: str) -> None:
    """Traced without a graph break; the compiler's back end has no part in it."""
    import torch

    s, t, labels = leaves(logits_torch_route)
    torch._dynamo.reset()

    def step(s: Any, t: Any, labels: Any) -> Any:
        return logits_torch_route.call(s, t, labels, function=function, temperature=2.0)

    if logits_torch_route.interpreted:
        pytest.skip("the interpreter is not for a compiler")
    compiled = torch.compile(
        _plain_call(logits_torch_route, function), fullgraph=True, backend="eager"
    )
    loss, right = compiled(s, t, labels), step(s, t, labels)
    torch.testing.assert_close(loss, right)
    for one, other in zip(
        torch.autograd.grad(loss, [s, t]), torch.autograd.grad(right, [s, t]), strict=True
    ):
        torch.testing.assert_close(one, other)


def _plain_call(route: Route, function: str) -> Any:
    """Without the route's context managers, which are not what is compiled here."""
    import tvd_torch

    loss, implementation = getattr(tvd_torch, function), route.implementation
    return lambda s, t, labels: loss(s, t, labels, temperature=2.0, implementation=implementation)


def test_logits_module_is_the_function(logits_torch_route: Route) -> None:
    import torch

    import tvd_torch

    s, t, labels = leaves(logits_torch_route)
    implementation = logits_torch_route.implementation
    module = tvd_torch.TVDFromLogitsLoss(2.0, "mean", 1, implementation)
    with logits_torch_route.running():
        loss = module(s, t, labels, normalizer=4.0)
    right = logits_torch_route.call(
        s,
        t,
        labels,
        temperature=2.0,
        reduction="mean",
        ignore_index=1,
        normalizer=4.0,
        function="tvd_from_logits",
    )
    assert torch.equal(loss, right)
    assert repr(module) == (
        "TVDFromLogitsLoss(temperature=2.0, reduction='mean', ignore_index=1, "
        f"implementation={implementation!r})"
    )


def test_logits_uint64_labels(logits_torch_route: Route) -> None:
    """As int64 the largest would be -1."""
    import torch

    s, t, _ = leaves(logits_torch_route)
    labels = torch.tensor([2**64 - 1, 0, 3], dtype=torch.uint64, device=s.device)
    options = {"function": "tvd_from_logits"}
    loss = logits_torch_route.call(s, t, labels, ignore_index=-1, **options)
    assert torch.equal(loss, logits_torch_route.call(s, t, **options))


# --- JAX -----------------------------------------------------------------------------------------


def jax_call(route: Route, function: str) -> Any:
    return lambda s, t, labels: route.call(s, t, labels, function=function, temperature=2.0)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_logits_jit_and_grad_with_traced_labels(logits_jax_route: Route, function: str) -> None:
    import jax

    arrays = [logits_jax_route.array(x) for x in (*logits(TOKENS, VOCAB, masked=0.0), LABELS)]
    step = jax.value_and_grad(jax_call(logits_jax_route, function), (0, 1))
    with logits_jax_route.running():
        plain, jitted = step(*arrays), jax.jit(step)(*arrays)
        only = jax.grad(jax_call(logits_jax_route, function))(*arrays)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(jitted), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(np.asarray(only), np.asarray(plain[1][0]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, 0), (None, 0, None)], ids=str)
def test_logits_vmap(logits_jax_route: Route, in_axes: tuple[int | None, ...]) -> None:
    import jax

    batch = 2
    s, t = (x.reshape(batch, TOKENS, VOCAB) for x in logits(batch * TOKENS, VOCAB))
    labels = inputs.labels_for(batch * TOKENS).reshape(batch, TOKENS) % 64
    arrays = [
        logits_jax_route.array(x if axis == 0 else x[0])
        for x, axis in zip((s, t, labels), in_axes, strict=True)
    ]
    step = jax.value_and_grad(jax_call(logits_jax_route, "tvd_from_logits"), (0, 1))
    with logits_jax_route.running():
        together = jax.vmap(step, in_axes)(*arrays)
        for i in range(batch):
            one = step(
                *(x if axis is None else x[i] for x, axis in zip(arrays, in_axes, strict=True))
            )
            for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(together), strict=True):
                np.testing.assert_allclose(np.asarray(a), np.asarray(b)[i], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("vocab", [64, 70, 1271])
def test_logits_batches_of_upstream_gradients(logits_jax_route: Route, vocab: int) -> None:
    """jacrev and a vmapped vjp: what the forward kept is the same for all, upstreams differ."""
    import jax

    s, t = (logits_jax_route.array(x) for x in logits(TOKENS, vocab, masked=0.0))
    upstreams = logits_jax_route.array(np.linspace(-1, 2, 2 * TOKENS, dtype=np.float32))
    upstreams = upstreams.reshape(2, TOKENS)

    def call(s: Any, t: Any) -> Any:
        options = {"function": "hybrid_loss", "reduction": "per_token"}
        return logits_jax_route.call(s, t, **options)

    with logits_jax_route.running():
        _, vjp = jax.vjp(call, s, t)
        one_by_one = [vjp(u) for u in upstreams]
        together = jax.vmap(vjp)(upstreams)
        jacobian = jax.jacrev(call)(s, t)
        rows = [vjp(u)[0] for u in np.eye(TOKENS, dtype=np.float32)]
    for i, one in enumerate(one_by_one):
        for a, b in zip(one, together, strict=True):
            np.testing.assert_allclose(b[i], a, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(jacobian, np.stack(rows), rtol=1e-5, atol=1e-7)


def test_logits_checkpoint_and_forward_mode_in_xla() -> None:
    jax = pytest.importorskip("jax")
    import tvd_jax

    s, t = (jax.numpy.asarray(x) for x in logits(TOKENS, VOCAB, masked=0.0))

    def loss(s: Any) -> Any:
        return tvd_jax.hybrid_loss(s, t, implementation="xla")

    gradient = jax.grad(loss)(s)
    saved = jax.grad(jax.checkpoint(loss))(s)
    np.testing.assert_allclose(saved, gradient, rtol=1e-5, atol=1e-7)
    _, along = jax.jvp(loss, (s,), (t,))
    np.testing.assert_allclose(along, (gradient * t).sum(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("function", ["tvd_from_logits", "cross_entropy_tvd_loss"])
def test_logits_second_order_in_xla(function: str) -> None:
    """The Hessian along a direction against a difference of gradients, in float64."""
    jax = pytest.importorskip("jax")
    import tvd_jax
    from parity_tests.x64 import enable_x64

    with enable_x64():
        s, t = (jax.numpy.asarray(x.astype(np.float64)) for x in logits(2, 5, masked=0.0))
        labels = jax.numpy.asarray([1, 3])

        def gradient(s: Any) -> Any:
            return jax.grad(getattr(tvd_jax, function))(s, t, labels, implementation="xla")

        _, along = jax.jvp(gradient, (s,), (t,))
        step = 1e-6
        difference = (gradient(s + step * t) - gradient(s - step * t)) / (2 * step)
        np.testing.assert_allclose(along, difference, rtol=1e-5, atol=1e-8)


def test_logits_x64_mode(logits_jax_route: Route) -> None:
    """Float32 logits stay float32, int64 labels work, Python numbers do not turn into float64."""
    from parity_tests.x64 import enable_x64

    s, t = logits(TOKENS, VOCAB)
    with enable_x64():
        for function in FUNCTIONS:
            result = logits_jax_route.run(
                s, t, LABELS.astype(np.int64), function=function, temperature=2.0, normalizer=4
            )
            assert result.loss.dtype == result.dp.dtype == result.dq.dtype == np.float32
