"""Contract clause 8: no host synchronisation, 2 bits kept per element, no recompilation."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity_tests import child, inputs, oracle, routes
from parity_tests.routes import Route
from tvd_core.contract import LANES, code_tiles

TOKENS, VOCAB = 4, 5000
CODES_BYTES = TOKENS * code_tiles(VOCAB) * LANES
# Per-token values, labels, weights and scalars: far below the smallest array of input size.
SMALL = 64 * TOKENS + 64
needs_cuda = pytest.mark.skipif(
    not any(r.compiled_on_gpu for r in routes.ROUTES), reason="needs a CUDA GPU"
)


def arguments(route: Route, dtype: str = "float32") -> tuple[Any, Any, Any, dict[str, Any]]:
    p, q = (route.array(x) for x in inputs.rows(TOKENS, VOCAB, dtype))
    labels = route.array(inputs.labels_for(TOKENS))
    options = {
        "weights": route.array(inputs.weights_for(TOKENS)),
        "normalizer": route.array(np.array(3.0, np.float32)),
    }
    return p, q, labels, options


class _Nothing:
    """A kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


# --- what is kept ---------------------------------------------------------------------------------


def test_clause_08_torch_keeps_2_bits_per_element(torch_kernel_route: Route) -> None:
    import torch

    p, q, labels, options = arguments(torch_kernel_route)
    saved: list[Any] = []

    def pack(x: Any) -> Any:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = torch_kernel_route.call(p.requires_grad_(), q.requires_grad_(), labels, **options)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    assert CODES_BYTES <= sum(storages.values()) <= CODES_BYTES + SMALL
    assert all(x.data_ptr() not in storages for x in (p, q))
    assert loss.requires_grad


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "detached inputs"])
def test_clause_08_torch_without_gradient_writes_nothing_of_input_size(
    torch_kernel_route: Route, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every allocation goes through the dispatcher, which a mode can watch on any device."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from tvd_core import triton_kernels

    # The launcher allocates; kernels are left out, because the interpreter has arrays of its own.
    for name in ("tvd_forward_kernel", "tvd_reduce_kernel"):
        monkeypatch.setattr(triton_kernels, name, _Nothing())
    allocated: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            known = {x.untyped_storage().data_ptr() for x in (p, q, labels)}
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                    allocated.append(x.nbytes)
            return out

    p, q, labels, options = arguments(torch_kernel_route)
    context = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "detached inputs": torch.enable_grad,
    }[mode]
    if mode != "detached inputs":
        p.requires_grad_()
        q.requires_grad_()
    with context(), Watch():
        loss = torch_kernel_route.call(p, q, labels, **options)
    assert not loss.requires_grad
    assert 0 < sum(allocated) <= SMALL


def test_clause_08_torch_kernel_memory_on_the_gpu(torch_kernel_route: Route) -> None:
    if not torch_kernel_route.compiled_on_gpu:
        pytest.skip("needs the kernels on a CUDA GPU")
    import torch

    tokens, vocab = 1024, 32768
    p, q = (torch.rand(tokens, vocab, device="cuda") for _ in range(2))
    torch_kernel_route.call(p, q)  # compiles
    torch.cuda.synchronize()

    def peak_of(run: Any) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = run()
        del kept
        return torch.cuda.max_memory_allocated() - before

    small = 64 * tokens
    assert peak_of(lambda: torch_kernel_route.call(p, q)) <= small
    codes = tokens * code_tiles(vocab) * LANES
    p.requires_grad_()
    assert peak_of(lambda: torch_kernel_route.call(p, q)) <= codes + small


def test_clause_08_jax_keeps_2_bits_per_element(jax_kernel_route: Route) -> None:
    import jax

    p, q, labels, options = arguments(jax_kernel_route)
    with jax_kernel_route.running():
        _, vjp = jax.vjp(lambda p, q: jax_kernel_route.call(p, q, labels, **options), p, q)
    kept = {id(x): x.nbytes for x in jax.tree.leaves(vjp) if hasattr(x, "nbytes")}
    assert CODES_BYTES <= sum(kept.values()) <= CODES_BYTES + SMALL


def _result_bytes(jaxpr: Any) -> list[int]:
    """Bytes of every intermediate of a jaxpr, those inside a kernel left out."""
    sizes = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("reshape", "optimization_barrier"):
            continue  # another name for the same memory
        sizes += [v.aval.size * v.aval.dtype.itemsize for v in equation.outvars]
        if equation.primitive.name in ("core_map", "pallas_call", "run_state"):
            continue
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                sizes += _result_bytes(inner)
    return sizes


def test_clause_08_jax_without_gradient_writes_nothing_of_input_size(
    jax_kernel_route: Route,
) -> None:
    import jax

    p, q, labels, options = arguments(jax_kernel_route)
    with jax_kernel_route.running():
        jaxpr = jax.make_jaxpr(lambda p, q: jax_kernel_route.call(p, q, labels, **options))(p, q)
    sizes = _result_bytes(jaxpr.jaxpr)
    # The per-token values are padded to one step of the reduction, 16 KiB.
    assert sizes and max(sizes) <= max(SMALL, 16384) < p.nbytes


def test_clause_08_eager_on_a_cpu_does_not_loop_over_tokens() -> None:
    """2**14 tokens of 4 took 9200 operators in blocks of 16 rows."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    from tvd_torch import tvd_loss

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    p, q = (torch.rand(2**14, 4, requires_grad=True) for _ in "pq")
    with Count() as count:
        torch.autograd.grad(tvd_loss(p, q, implementation="eager"), [p, q])
    assert 0 < count.calls < 100


@pytest.mark.parametrize("elements", [1, 600, 1799])
def test_clause_08_eager_blocks_of_any_size(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, or as many as fit, and a last block that is shorter."""
    pytest.importorskip("torch")
    from tvd_torch import eager

    monkeypatch.setattr(eager, "BLOCK_ELEMENTS", elements)
    p, q = inputs.rows(5, 300)
    labels, weights = inputs.labels_for(5), inputs.weights_for(5)
    oracle.check(routes.get("torch-eager"), p, q, labels, weights=weights, upstream=0.5)


# --- no host synchronisation ----------------------------------------------------------------------


def test_clause_08_torch_reads_no_value_on_the_host(torch_route: Route) -> None:
    """``.item()``, ``bool(tensor)`` and boolean indexing all end in one of these operators."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    called: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            called.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    p, q, labels, options = arguments(torch_route)
    with Watch(), torch_route.running():
        loss = torch_route.call(p.requires_grad_(), q.requires_grad_(), labels, **options)
        torch.autograd.grad(loss, [p, q])
    assert called and not {"_local_scalar_dense", "nonzero", "equal"} & set(called)


@needs_cuda
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "per_token", "none"])
def test_clause_08_torch_does_not_synchronise(torch_route: Route, reduction: str) -> None:
    import torch

    p, q, labels, options = arguments(torch_route)
    if reduction not in ("batchmean", "mean"):
        options["normalizer"] = None
    p.requires_grad_()
    q.requires_grad_()
    for _ in range(2):  # the first call compiles
        for normalizer in (options["normalizer"], None):
            options["normalizer"] = normalizer
            loss = torch_route.call(p, q, labels, reduction=reduction, **options)
            torch.autograd.grad(loss, [p, q], torch.ones_like(loss))
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def _reset_sync_debug_mode() -> Any:
    yield
    if routes.get("torch-triton").compiled_on_gpu:
        import torch

        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_clause_08_torch_cuda_graph(torch_route: Route) -> None:
    import torch

    p, q, labels, options = arguments(torch_route)
    p.requires_grad_()
    q.requires_grad_()

    def step() -> tuple[Any, ...]:
        loss = torch_route.call(p, q, labels, **options)
        return loss, *torch.autograd.grad(loss, [p, q])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    new_p, new_q = (torch_route.array(x) for x in inputs.rows(TOKENS, VOCAB, seed=9))
    with torch.no_grad():
        p.copy_(new_p)
        q.copy_(new_q)
    labels.copy_(labels.flip(0))  # other tokens are ignored
    for constant in options.values():
        constant.mul_(2)
    for _ in range(2):
        graph.replay()
    right = step()
    for name, actual, expected in zip(("loss", "dp", "dq"), captured, right, strict=True):
        oracle.assert_same_bits(name, torch_route.numpy(actual), torch_route.numpy(expected))


@needs_cuda
def test_clause_08_jax_moves_nothing_to_the_host(jax_route: Route) -> None:
    import jax

    p, q, labels, options = arguments(jax_route)
    step = jax.jit(jax.value_and_grad(lambda p, q: jax_route.call(p, q, labels, **options), (0, 1)))
    jax.block_until_ready(step(p, q))
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(step(p, q))


_IN_A_COMMAND_BUFFER = """
import jax, jax.numpy as jnp
from tvd_jax import tvd_loss

def step(x, q, labels, implementation):
    def loss(x):
        return tvd_loss(jax.nn.softmax(jnp.tanh(x)), q, labels, implementation=implementation)
    value, gradient = jax.value_and_grad(loss)(x)
    return value, x - gradient

x, q = (jax.random.normal(jax.random.key(i), (64, 4096)) for i in range(2))
q, labels = jax.nn.softmax(q), jnp.where(jnp.arange(64) % 7 == 0, -100, 1)
step = jax.jit(step, static_argnames="implementation")
for i in range(4):  # recorded, then replayed on other memory
    arguments = x + i, q, jnp.roll(labels, i)
    for got, right in zip(step(*arguments, "pallas"), step(*arguments, "xla")):
        assert jnp.allclose(got, right, rtol=1e-5, atol=1e-7)
"""


@needs_cuda
def test_clause_08_xla_records_the_pallas_kernels_in_a_command_buffer(
    jax_kernel_route: Route, tmp_path: Path
) -> None:
    if jax_kernel_route.name != "jax-pallas":
        return  # jax-triton's custom calls end the buffer
    env = os.environ | {"XLA_FLAGS": f"--xla_dump_to={tmp_path}"}
    child = subprocess.run(
        [sys.executable, "-c", _IN_A_COMMAND_BUFFER], env=env, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    sequences = [x.read_text() for x in tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")]
    lines = [line for x in sequences if "kCustomCall" in x for line in x.splitlines()]
    assert lines and "kCommandBuffer" in lines[0]
    custom_calls = [line for line in lines if "kCustomCall" in line]
    assert len(custom_calls) == 3  # forward, reduce, backward
    assert all(line.startswith(" ") for line in custom_calls), "outside of the buffer"


# --- no recompilation -----------------------------------------------------------------------------


@needs_cuda
def test_clause_08_triton_compiles_once_for_all_token_counts_and_ignore_indices(
    torch_kernel_route: Route,
) -> None:
    import torch

    from tvd_core import triton_kernels

    def compiled() -> int:
        kernels = [
            triton_kernels.tvd_forward_kernel,
            triton_kernels.tvd_reduce_kernel,
            triton_kernels.tvd_backward_kernel,
        ]
        return sum(len(cache[0]) for k in kernels for cache in k.device_caches.values())

    def step(tokens: int, ignore_index: int) -> None:
        p, q = (torch_kernel_route.array(x).requires_grad_() for x in inputs.rows(tokens, VOCAB))
        labels = torch_kernel_route.array(inputs.labels_for(tokens))
        loss = torch_kernel_route.call(p, q, labels, ignore_index=ignore_index)
        torch.autograd.grad(loss, [p, q])

    step(4, -100)
    before = compiled()
    for tokens, ignore_index in ((1, -100), (16, 0), (33, 1), (4, 2**40)):
        step(tokens, ignore_index)
    assert before > 0 and compiled() == before


_KEYS = """
import itertools, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from tvd_core import triton_kernels as kernels
from tvd_torch.triton_launch import _key

backend = make_backend(GPUTarget("cuda", 90, 32))
x, half, labels = torch.zeros(8), torch.zeros(8).half(), torch.zeros(8, dtype=torch.int64)
numbers = (-100, 0, 1, 16, 2**31, 2**40, -(2**40))
choices = {
    "p_ptr": (x, half), "q_ptr": (x, half), "labels_ptr": (labels, labels.int()),
    "weights_ptr": (x, half), "ignore_index": numbers, "vocab": numbers, "tokens": numbers,
    "divisor": (1.0, 3e9), "divisor_factor": (1.0, 4096.0),
}
checked = 0
for kernel in (kernels.tvd_forward_kernel, kernels.tvd_reduce_kernel, kernels.tvd_backward_kernel):
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    names = [p.name for p in kernel.params if not p.is_constexpr]
    flags = {p.name: 0 for p in kernel.params if p.is_constexpr}
    compiled = {}
    for arguments in itertools.product(*(choices.get(name, (x,)) for name in names)):
        specialization = str(bind(*arguments, **flags)[1])
        assert compiled.setdefault(_key(arguments), specialization) == specialization, arguments
        checked += 1
    assert 1 < len(compiled) < checked
assert _key((x[1:],)) is None and _key((x[4:],)) is not None
print(checked)
"""


def test_clause_08_the_key_of_a_launch_says_all_that_triton_compiles_for() -> None:
    """Else a kernel that was compiled for other arguments would be launched."""
    for package in ("torch", "triton"):
        pytest.importorskip(package)
    assert int(child.run(_KEYS, without=("TRITON_INTERPRET",))) > 100


@needs_cuda
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_clause_08_triton_at_any_alignment_after_any_other(
    torch_kernel_route: Route, offset: int
) -> None:
    """A kernel that was compiled for 16-byte loads is not used for memory that has none."""
    import torch

    def at(x: np.ndarray, start: int) -> Any:
        """The array, ``start`` elements after a multiple of 16 bytes."""
        memory = torch.empty(x.size + start, device="cuda")
        moved = memory[start:].view(x.shape)
        return moved.copy_(torch_kernel_route.array(x)).requires_grad_()

    rows = inputs.rows(TOKENS, 4096)
    right: list[Any] = []
    for start in (0, offset, 0):
        p, q = (at(x, start) for x in rows)
        assert p.data_ptr() % 16 == 4 * start % 16
        loss = torch_kernel_route.call(p, q)
        got = [loss, *torch.autograd.grad(loss, [p, q])]
        right = right or got
        for actual, expected in zip(got, right, strict=True):
            assert torch.equal(actual, expected)


def test_clause_08_jax_compiles_once_for_all_ignore_indices(jax_route: Route) -> None:
    import jax

    compilations: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if "backend_compile" in event:
            compilations.append(event)

    p, q, labels, _ = arguments(jax_route)
    jax_route.numpy(jax_route.call(p, q, labels, ignore_index=-100))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax_route.numpy(jax_route.call(p, q, labels, ignore_index=-100))
        same = len(compilations)
        jax_route.numpy(jax_route.call(p, q, labels, ignore_index=3))
        assert len(compilations) == 2 * same, "a new ignore_index compiled again"
        jax_route.numpy(jax_route.call(p[:3], q[:3], labels[:3]))
        assert len(compilations) > 2 * same, "the listener counts nothing"
    finally:
        jax.monitoring.clear_event_listeners()
