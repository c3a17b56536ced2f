"""Contract clause 12: the named implementation is used, or the call says why not and what to do."""

import concurrent.futures
import importlib.util
import sys
import threading
from typing import Any

import numpy as np
import pytest

from parity_tests import child, inputs, oracle, routes
from parity_tests.routes import Route

P, Q = inputs.rows(2, 70)


# --- which kernel ran -----------------------------------------------------------------------------


@pytest.fixture
def triton_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the Triton kernels that are launched from PyTorch while the test runs."""
    pytest.importorskip("triton")
    from tvd_core import triton_kernels

    names: list[str] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(triton_kernels, name)

        def __getitem__(self, grid: Any) -> Any:
            names.append(self.name)
            return self.kernel[grid]

    for name in ("tvd_forward_kernel", "tvd_reduce_kernel", "tvd_backward_kernel"):
        monkeypatch.setattr(triton_kernels, name, Recorder(name))
    return names


def test_clause_12_torch_runs_the_named_implementation(
    torch_route: Route, triton_launches: list[str]
) -> None:
    torch_route.run(P, Q)
    kernels = ["tvd_forward_kernel", "tvd_reduce_kernel", "tvd_backward_kernel"]
    assert triton_launches == (kernels if torch_route.is_kernel else [])


def test_clause_12_torch_default_by_device(triton_launches: list[str]) -> None:
    torch = pytest.importorskip("torch")
    from tvd_torch import tvd_loss

    p, q = torch.tensor(P), torch.tensor(Q)
    tvd_loss(p, q)
    assert triton_launches == []  # a CPU tensor: eager, whether an interpreter is there or not
    if routes.get("torch-triton").compiled_on_gpu:
        tvd_loss(p.cuda(), q.cuda())
        assert triton_launches == ["tvd_forward_kernel", "tvd_reduce_kernel"]
        tvd_loss(p.double().cuda(), q.double().cuda())
        assert len(triton_launches) == 2  # float64: eager


def test_clause_12_torch_kernels_seen_by_the_profiler(torch_route: Route) -> None:
    if not torch_route.compiled_on_gpu:
        pytest.skip("needs a CUDA GPU")
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch_route.run(P, Q)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        torch_route.run(P, Q)
        torch.cuda.synchronize()
    ours = {event.name for event in profiled.events() if event.name.startswith("tvd_")}
    expected = {"tvd_forward_kernel", "tvd_reduce_kernel", "tvd_backward_kernel"}
    assert ours == (expected if torch_route.is_kernel else set())


def _primitives(jaxpr: Any) -> set[str]:
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    names |= _primitives(inner)
    return names


PALLAS_PRIMITIVES = {"core_map", "pallas_call", "mpmd_map", "run_state"}
# Custom calls in the compiled program.
CALL_TARGETS = {"pallas": "mosaic_gpu", "triton": "triton_kernel_call"}


def test_clause_12_jax_runs_the_named_implementation(jax_route: Route) -> None:
    import jax

    p, q = jax_route.array(P), jax_route.array(Q)
    step = jax.value_and_grad(jax_route.call, (0, 1))
    with jax_route.running():
        found = _primitives(jax.make_jaxpr(step)(p, q).jaxpr)
    assert bool(found & PALLAS_PRIMITIVES) == (jax_route.implementation == "pallas"), found
    if not jax_route.compiled_on_gpu:
        return
    program = jax.jit(step).lower(p, q).compile().as_text()
    for implementation, target in CALL_TARGETS.items():
        assert (target in program) == (jax_route.implementation == implementation)


def test_clause_12_jax_default_by_device() -> None:
    jax = pytest.importorskip("jax")
    import tvd_jax

    pallas = routes.get("jax-pallas")
    p, q = jax.numpy.asarray(P), jax.numpy.asarray(Q)
    found = _primitives(jax.make_jaxpr(tvd_jax.tvd_loss)(p, q).jaxpr)
    assert bool(found & PALLAS_PRIMITIVES) == pallas.compiled_on_gpu


def test_clause_12_available_implementations_agree_with_calls() -> None:
    """``None`` means that it runs; a reason means that the call fails with it."""
    for framework in ("torch", "jax"):
        for default in routes.runnable(framework)[-1:]:
            package = pytest.importorskip(f"tvd_{framework}")
            for name, reason in package.available_implementations().items():
                p, q = default.array(P), default.array(Q)
                if reason is None:
                    package.tvd_loss(p, q, implementation=name)
                    continue
                with pytest.raises(ValueError) as raised:
                    package.tvd_loss(p, q, implementation=name)
                assert reason in str(raised.value)


# --- errors with a remedy -------------------------------------------------------------------------

TORCH_CALL = """
import torch, tvd_torch
p = torch.full((2, 8), 0.125)
print(tvd_torch.available_implementations()["triton"])
assert float(tvd_torch.tvd_loss(p, p)) == 0
try:
    tvd_torch.tvd_loss(p, p, implementation="triton")
except ValueError as error:
    print(error)
"""


def test_clause_12_triton_on_a_cpu_without_the_interpreter() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    out = child.run(TORCH_CALL, without=("TRITON_INTERPRET",), CUDA_VISIBLE_DEVICES="")
    reason, error = out.splitlines()
    assert error == f"implementation 'triton' cannot run: {reason}"
    assert reason.startswith("no CUDA GPU is available: use implementation 'eager'")
    assert "TRITON_INTERPRET=1" in reason


def test_clause_12_cpu_tensor_beside_a_gpu() -> None:
    route = routes.get("torch-triton")
    if not route.compiled_on_gpu:
        pytest.skip("needs a CUDA GPU")
    import torch

    import tvd_torch

    with pytest.raises(ValueError) as raised:
        tvd_torch.tvd_loss(torch.tensor(P), torch.tensor(Q), implementation="triton")
    assert str(raised.value) == (
        "implementation 'triton' needs tensors on a CUDA GPU, got p on cpu: "
        "move them there or use implementation 'eager'"
    )


HIDE = """
import importlib.util, sys
find_spec = importlib.util.find_spec
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
def hidden_find_spec(name, package=None):
    return None if name.split(".")[0] in {names} else find_spec(name, package)
importlib.util.find_spec = hidden_find_spec
"""


def hide(*names: str) -> str:
    """Code that makes these packages look as if they were not installed."""
    return HIDE.format(names=repr(names))


def test_clause_12_triton_not_installed() -> None:
    pytest.importorskip("torch")
    out = child.run(hide("triton") + TORCH_CALL, CUDA_VISIBLE_DEVICES="")
    reason, error = out.splitlines()
    assert error == f"implementation 'triton' cannot run: {reason}"
    assert reason.startswith(
        "no CUDA GPU is available: use implementation 'eager', or install Triton (pip install "
        "'.[torch]' in this project's folder) and set TRITON_INTERPRET=1"
    )


JAX_CALL = """
import jax.numpy as jnp, tvd_jax
p = jnp.full((2, 8), 0.125)
print(tvd_jax.available_implementations()["NAME"])
assert float(tvd_jax.tvd_loss(p, p, implementation="xla")) == 0
try:
    tvd_jax.tvd_loss(p, p, implementation="NAME")
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["pallas", "triton"])
def test_clause_12_jax_kernels_on_a_cpu(name: str) -> None:
    pytest.importorskip("jax")
    out = child.run(JAX_CALL.replace("NAME", name), JAX_PLATFORMS="cpu")
    reason, error = out.splitlines()
    extras = {"pallas": "", "triton": ",jax-triton"}[name]
    assert reason == (
        "no CUDA GPU is available: use implementation 'xla', or on a machine with one pip install "
        f"'.[cuda12{extras}]' or '.[cuda13{extras}]' in this project's folder"
    )
    assert error == f"implementation {name!r} cannot run: {reason}"


NOT_INSTALLED = "is not installed: pip install '.[{}]' in this project's folder, or use"


def test_clause_12_jax_triton_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    import tvd_jax
    from tvd_jax import compat, triton_launch

    monkeypatch.setattr(compat, "gpu_compute_capability", lambda: (9, 0))
    monkeypatch.setattr(triton_launch, "missing_package", lambda: "jax-triton")
    reason = tvd_jax.available_implementations()["triton"]
    assert reason == f"jax-triton {NOT_INSTALLED.format('jax-triton')} implementation 'xla'"


def test_clause_12_triton_not_installed_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from tvd_torch import triton_launch

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    reason = triton_launch._unavailable_reason.__wrapped__()
    assert reason == f"triton {NOT_INSTALLED.format('torch')} implementation 'eager'"


@pytest.mark.parametrize("shape", [(64, 2**25 + 1), (2, 32, 2**25 + 1)])
def test_clause_12_pallas_refuses_what_would_overflow(shape: tuple[int, ...]) -> None:
    jax = pytest.importorskip("jax")
    from tvd_jax import compat, tvd_loss

    def trace(*shape: int) -> Any:
        rows = jax.ShapeDtypeStruct(shape, "float32")
        with compat.assume_cuda():
            return jax.eval_shape(lambda p, q: tvd_loss(p, q, implementation="pallas"), rows, rows)

    words = rf"takes no p of 2\*\*31 elements .*, got shape .*{shape[-1]}\): use implementation"
    with pytest.raises(ValueError, match=words):
        trace(*shape)
    assert trace(*shape[:-1], shape[-1] - 1).shape == ()  # aligned
    assert trace(62, 2**25 + 1).shape == ()  # fewer elements


@pytest.mark.parametrize("vocab", [2**31 - 16383, 2**31 + 16])
def test_clause_12_kernels_refuse_rows_beyond_32_bits(vocab: int) -> None:
    """In the same words; nothing is read, so the rows need no memory."""
    words = f"takes a vocab of at most {2**31 - 16384}, got {vocab}: use implementation"
    if importlib.util.find_spec("torch") and routes.get("torch-triton").can_run:
        import torch

        from tvd_torch import tvd_loss

        rows = torch.zeros(1, device=routes.get("torch-triton").array(P).device).expand(1, vocab)
        with pytest.raises(ValueError, match=f"'triton' {words} 'eager'"):
            tvd_loss(rows, rows, implementation="triton")
    if importlib.util.find_spec("jax"):
        import jax

        from tvd_jax import compat
        from tvd_jax import tvd_loss as jax_loss

        rows = jax.ShapeDtypeStruct((1, vocab), "float32")
        with compat.assume_cuda(), pytest.raises(ValueError, match=f"'pallas' {words} 'xla'"):
            jax.eval_shape(lambda p, q: jax_loss(p, q, implementation="pallas"), rows, rows)


@pytest.mark.parametrize("gpu", ["Turing", "AMD"])
def test_clause_12_torch_on_a_gpu_without_the_kernels(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from tvd_torch import triton_launch

    monkeypatch.setattr(triton_launch, "_interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.version, "hip", "6.4" if gpu == "AMD" else None)
    reason = triton_launch._unavailable_reason.__wrapped__()
    right = "NVIDIA GPUs" if gpu == "AMD" else "Ampere generation (compute capability 8.0) or newer"
    assert right in reason and "use implementation 'eager'" in reason


def test_clause_12_pallas_with_another_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that has renamed what the PTX is written with is told so, not met by a crash."""
    pytest.importorskip("jax")
    import tvd_jax
    from tvd_jax import compat, pallas_ptx

    assert pallas_ptx.importable()
    monkeypatch.setattr(compat, "gpu_compute_capability", lambda: (9, 0))
    assert tvd_jax.available_implementations()["pallas"] is None
    monkeypatch.setitem(sys.modules, "jaxlib.mlir.dialects.llvm", None)
    monkeypatch.delattr("jaxlib.mlir.dialects.llvm", raising=False)
    assert not pallas_ptx.importable()
    reason = tvd_jax.available_implementations()["pallas"]
    assert reason is not None and "PTX" in reason and "use implementation 'triton' or" in reason


def test_clause_12_pallas_before_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    import tvd_jax
    from tvd_jax import compat

    monkeypatch.setattr(compat, "gpu_compute_capability", lambda: (7, 5))
    reason = tvd_jax.available_implementations()["pallas"]
    assert reason is not None and reason.endswith("use implementation 'xla'")  # nor can Triton
    monkeypatch.setattr(compat, "gpu_compute_capability", lambda: (8, 0))
    reason = tvd_jax.available_implementations()["pallas"]
    assert reason is not None and "Hopper" in reason and "8.0" in reason
    route = routes.get("jax-xla")
    with pytest.raises(ValueError) as raised:
        tvd_jax.tvd_loss(route.array(P), route.array(Q), implementation="pallas")
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("capability", "fits"), [((9, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_clause_12_pallas_needs_the_shared_memory_of_its_rings(
    capability: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jax")
    import tvd_jax
    from tvd_jax import compat

    monkeypatch.setattr(compat, "gpu_compute_capability", lambda: capability)
    reason = tvd_jax.available_implementations()["pallas"]
    assert (reason is None) == fits
    assert fits or (reason and "shared memory" in reason and "12.0" in reason)


@pytest.mark.parametrize("name", ["interpret_mode", "assume_cuda"])
def test_clause_12_jax_switches_are_per_thread(name: str) -> None:
    """Two threads whose ``with`` blocks overlap: neither sees nor ends the other's."""
    pytest.importorskip("jax")
    from tvd_jax import compat

    switch = getattr(compat, name)
    is_on = {"interpret_mode": compat.interpreting, "assume_cuda": compat.assuming_cuda}[name]
    entered, left = threading.Event(), threading.Event()
    seen = []

    def other() -> None:
        seen.append(is_on())
        with switch():
            entered.set()
            assert left.wait(60)
            seen.append(is_on())
        seen.append(is_on())

    thread = threading.Thread(target=other)
    with switch():
        thread.start()
        assert entered.wait(60)
        with switch():
            pass
        assert is_on()
    left.set()
    thread.join(60)
    assert seen == [False, True, False] and not is_on()


def test_clause_12_jax_kernel_in_another_thread(jax_kernel_route: Route) -> None:
    here = jax_kernel_route.run(P, Q)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        p, q = inputs.rows(2, 71)  # not yet compiled
        pool.submit(oracle.check, jax_kernel_route, p, q).result(120)
        there = pool.submit(jax_kernel_route.run, P, Q).result(120)
    oracle.assert_same_bits("dp", there.dp, here.dp)


def test_clause_12_no_silent_fallback_in_numbers(kernel_route: Route) -> None:
    """The kernels' summation order shows in the bits: another order gives another value."""
    from tvd_core.reference import per_token_float32

    p, q = inputs.rows(3, 4500)
    per_token = kernel_route.loss(p, q, reduction="per_token")
    np.testing.assert_array_equal(per_token, per_token_float32(p, q))
    naive = np.float32(0.5) * np.add.accumulate(np.abs(p - q), axis=1, dtype=np.float32)[:, -1]
    assert (naive != per_token).any()
