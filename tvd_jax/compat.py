"""What differs between JAX 0.10.2, 0.11.2 and 0.12, and the switches that tests need."""

import contextlib
import contextvars
import importlib
from collections.abc import Iterator
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

# Public from JAX 0.11 on.
_OLD_INTERPRETER = not hasattr(plgpu, "InterpretGPUParams")
_interpreter: Any = (
    importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.params")
    if _OLD_INTERPRETER
    else plgpu
)
# Per thread, as JAX's own switch for the interpreter is: another thread may compile for a GPU
# meanwhile. Both are read while a kernel is traced, which is in the caller's thread.
_interpreting = contextvars.ContextVar("interpreting", default=False)
_assume_cuda = contextvars.ContextVar("assume_cuda", default=False)


@contextlib.contextmanager
def _set(switch: contextvars.ContextVar[bool]) -> Iterator[None]:
    before = switch.set(True)
    try:
        yield
    finally:
        switch.reset(before)


@contextlib.contextmanager
def interpret_mode(*, detect_races: bool = False) -> Iterator[None]:
    """Runs Pallas kernels traced inside it in Pallas's GPU interpreter, on a CPU.

    What was compiled outside stays compiled: call ``jax.clear_caches()`` where that can matter.
    """
    parameters = _interpreter.InterpretGPUParams(detect_races=detect_races)
    with _set(_interpreting), _interpreter.force_gpu_interpret_mode(parameters):
        yield


def interpreting() -> bool:
    """Whether Pallas kernels traced now run in the interpreter."""
    return _interpreting.get()


def races_found() -> bool:
    """Whether the interpreter's race detector found a race in the last kernel."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return bool(interpret_pallas_call.get_races().races_found)


def reset_interpreter() -> None:
    """Makes the interpreter usable again after a kernel raised in it."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


@contextlib.contextmanager
def assume_cuda() -> Iterator[None]:
    """Lets kernels be traced and lowered for CUDA on a machine without a GPU."""
    with _set(_assume_cuda):
        yield


def assuming_cuda() -> bool:
    """Whether ``assume_cuda`` is in force."""
    return _assume_cuda.get()


def gpu_compute_capability() -> tuple[int, int] | None:
    """Compute capability of the first CUDA GPU that JAX sees, ``None`` without one."""
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return None
    major, minor = str(devices[0].compute_capability).split(".")
    return int(major), int(minor)


def sm_count() -> int:
    """SMs of the GPU, 132 (H100, H200) where none is seen. Sets grids, never a result."""
    try:
        return int(jax.devices("cuda")[0].core_count)
    except (RuntimeError, AttributeError):
        return 132


def layout_cast(x: Any, layout: Any) -> Any:
    """``plgpu.layout_cast``; nothing in the interpreter, which lacks it in JAX 0.10.2."""
    return x if interpreting() else plgpu.layout_cast(x, layout)


def enable_x64() -> contextlib.AbstractContextManager[Any]:
    """Traces 64-bit types inside it."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64 as context

    return context(True)


def _varying_axes(x: Any) -> frozenset[str]:
    aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(getattr(manual, "varying", ()))
    return frozenset(getattr(aval, "vma", ()))


def vary_like(outputs: Any, *inputs: Any) -> Any:
    """Marks kernel outputs as varying over the mesh axes that the inputs vary over.

    ``plgpu.kernel`` is traced with that check off, so inside ``jax.shard_map`` its outputs are
    typed as unvarying, and the transpose multiplies gradients by the size of the mesh, silently.
    """
    axes = frozenset[str]().union(*(_varying_axes(x) for x in inputs if x is not None))

    def mark(x: Any) -> Any:
        missing = tuple(sorted(axes - _varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, outputs)


def triton_out(outputs: list[Any]) -> dict[str, Any]:
    """The keyword that names a ``triton_call``'s outputs: ``out_shape`` before jax-triton 0.4."""
    import inspect

    import jax_triton

    names = inspect.signature(jax_triton.triton_call).parameters
    return {"out_type" if "out_type" in names else "out_shape": outputs}


def repair_jax_triton(jax_triton: Any) -> None:
    """jax-triton 0.4.1 registers a dead-code rule that JAX 0.12 calls with one argument more."""
    from jax._src.interpreters import partial_eval

    primitive = getattr(jax_triton.triton_lib, "triton_kernel_call_p", None)
    if primitive in partial_eval.dce_rules and jax.__version_info__ >= (0, 12):
        partial_eval.dce_rules[primitive] = lambda used, live, eqn: (
            [True] * len(eqn.invars),
            eqn,
        )
