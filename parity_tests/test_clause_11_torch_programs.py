"""Contract clause 11, PyTorch: what programs do with a loss, for probabilities and for logits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parity_tests import inputs
from parity_tests.logits_budget import logits
from parity_tests.routes import Route

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

FUNCTIONS = ("tvd_loss", "tvd_from_logits")
LOGITS_OPERATORS = ("_rows_op", "_backward_op", "_reduce_op", "_statistics_op", "_difference_op")


def pair(route: Route, function: str, tokens: int, vocab: int = 40) -> list[Any]:
    if function == "tvd_loss":
        return [route.array(x) for x in inputs.rows(tokens, vocab)]
    return [route.array(x) for x in logits(tokens, vocab, masked=0.0)]


def plain(route: Route, function: str, **options: Any) -> Callable[..., Any]:
    """Without the route's context managers, which are not to be traced."""
    import tvd_torch

    loss = getattr(tvd_torch, function)
    return lambda *arrays: loss(*arrays, implementation=route.implementation, **options)


def step(loss: Callable[..., Any], arrays: list[Any], *rest: Any) -> list[Any]:
    leaves = [x.clone().requires_grad_() for x in arrays]
    value = loss(*leaves, *rest)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_clause_11_torch_one_graph_for_all_token_counts(torch_route: Route, function: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    loss = plain(torch_route, function)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter, dynamic=True)
    compilations = []
    with torch_route.running():
        for tokens in (4, 2, 5):
            arrays = pair(torch_route, function, tokens)
            labels = torch_route.array(np.arange(tokens) - 100)
            close(step(compiled, arrays, labels), step(loss, arrays, labels))
            compilations.append(counter.frame_count)
    assert compilations[0] == compilations[1] == compilations[2]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_clause_11_torch_export_with_dynamic_tokens(torch_route: Route, function: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, p: Any, q: Any) -> Any:
            return plain(torch_route, function)(p, q)

    tokens = torch.export.Dim("tokens", min=2)
    arrays = tuple(pair(torch_route, function, 3))
    exported = torch.export.export(Model(), arrays, dynamic_shapes=({0: tokens}, {0: tokens}))
    with torch_route.running():
        for count in (3, 5):
            arrays = tuple(pair(torch_route, function, count))
            close(exported.module()(*arrays), plain(torch_route, function)(*arrays))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_clause_11_torch_fake_tensors(torch_route: Route, function: str) -> None:
    """Shapes and dtypes without memory, forward and backward; no kernel is launched."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        p, q = (torch.empty(3, 40, dtype=torch.bfloat16, requires_grad=True) for _ in "pq")
        p, q = (x.to(torch_route.device).detach().requires_grad_() for x in (p, q))
        loss = plain(torch_route, function)(p, q)
        dp, dq = torch.autograd.grad(loss, [p, q])
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert dp.shape == dq.shape == p.shape and dp.dtype == dq.dtype == torch.bfloat16
    assert dp.device.type == torch_route.device


@pytest.mark.parametrize("name", LOGITS_OPERATORS)
def test_clause_11_torch_opcheck_from_logits(torch_kernel_route: Route, name: str) -> None:
    from tvd_torch import logits_rows

    s, t = pair(torch_kernel_route, "tvd_from_logits", 2)
    targets = torch_kernel_route.array(np.array([1, 30]))
    weights = torch_kernel_route.array(np.array([0.5, 2.0], np.float32))
    with torch_kernel_route.running():
        *_, s_rows, t_rows, codes = logits_rows._rows_op(s, t, weights, targets, 2.0, True, True)
        given = torch.stack([s_rows[:2], t_rows[:2]])
        per_row = torch.ones(2, device=s.device)
        upstreams = (None, per_row, per_row, per_row, per_row, targets)
        arguments = {
            "_rows_op": (s.requires_grad_(), t.requires_grad_(), weights, targets, 2.0, True, True),
            "_backward_op": (s, t, s_rows, t_rows, *upstreams, codes, weights, 2.0, True),
            "_reduce_op": (per_row.clone().requires_grad_(), weights, None, 3.0, "mean", 40),
            "_statistics_op": (s, t, weights, 2.0),
            "_difference_op": (s, t, weights, 2.0, given, True, True),
        }[name]
        checked = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
        if name in ("_rows_op", "_reduce_op"):  # the others are not differentiated
            checked = list(arguments)
        torch.library.opcheck(getattr(logits_rows, name), tuple(checked))


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float16")], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_clause_11_torch_autocast_casts_nothing(
    torch_route: Route, function: str, dtypes: tuple[str, str]
) -> None:
    make = inputs.rows if function == "tvd_loss" else logits
    arrays = [torch_route.array(x) for x in make(2, 40, *dtypes)]
    loss = plain(torch_route, function)
    with torch_route.running():
        right = step(loss, arrays)
        with torch.autocast(torch_route.device, torch.bfloat16):
            actual = step(loss, arrays)
    for one, other in zip(actual, right, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("function", [*FUNCTIONS, "cross_entropy_tvd_loss"])
def test_clause_11_torch_deterministic_algorithms(torch_route: Route, function: str) -> None:
    """Nothing here is refused by the mode, and nothing changes."""
    arrays = pair(torch_route, function, 2)
    labels = torch_route.array(np.array([1, 30]))
    loss = plain(torch_route, function)
    with torch_route.running():
        right = step(loss, arrays, labels)
        torch.use_deterministic_algorithms(True)
        try:
            actual = step(loss, arrays, labels)
        finally:
            torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(actual, right, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_clause_11_torch_compiled_forward_mode_is_never_silently_0(
    torch_route: Route, function: str
) -> None:
    p, q = pair(torch_route, function, 2)
    loss = plain(torch_route, function)

    def by_jvp(p: Any, q: Any, tangent: Any) -> Any:
        return torch.func.jvp(lambda p: loss(p, q), (p,), (tangent,))[1]

    torch._dynamo.reset()
    try:
        with torch_route.running():
            tangent = torch.compile(by_jvp, backend="aot_eager")(p, q, p)
    except Exception:  # PyTorch wraps the reason in errors of many kinds
        return
    with torch_route.running():
        close(tangent, (step(loss, [p, q])[1] * p).sum())


# --- on GPUs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_clause_11_torch_device_that_is_not_current(torch_route: Route, function: str) -> None:
    if not torch_route.compiled_on_gpu or torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    arrays = pair(torch_route, function, 4)
    loss = plain(torch_route, function)
    right = step(loss, arrays)
    with torch.cuda.device(0):
        actual = step(loss, [x.to("cuda:1") for x in arrays])
    for one, other in zip(actual, right, strict=True):
        assert one.device == torch.device("cuda:1") and torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_clause_11_torch_cuda_graph_of_a_training_step(torch_route: Route, function: str) -> None:
    """Forward, backward and optimizer in one graph: three replays are three steps."""
    if not torch_route.compiled_on_gpu:
        pytest.skip("needs a CUDA GPU")
    tokens, hidden, vocab = 16, 32, 5000

    def training() -> tuple[Any, Callable[[], Any]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(hidden, vocab, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x = torch.randn(tokens, hidden, device="cuda")
        teacher = 3 * torch.randn(tokens, vocab, device="cuda")
        labels = torch.arange(tokens, device="cuda") - 100
        loss = plain(torch_route, function)

        def train() -> Any:
            optimizer.zero_grad(set_to_none=True)
            student = model(x)
            if function == "tvd_loss":
                value = loss(student.softmax(-1), teacher.softmax(-1), labels)
            else:
                value = loss(student, teacher, labels)
            value.backward()
            optimizer.step()
            return value.detach()

        return model, train

    stepped, train = training()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured, captured_train = training()
        for _ in range(2):
            captured_train()
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(2):
        train()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_loss = captured_train()
    for _ in range(3):
        right = train()
        graph.replay()
        close(captured_loss, right)
    for one, other in zip(captured.parameters(), stepped.parameters(), strict=True):
        close(one, other)
