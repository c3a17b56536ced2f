"""Less of what Triton's and Pallas's interpreters cost beside computing what the kernels say.

Kernels run as before, statement by statement, and with the interpreters' own checks. What is
replaced is private to Triton and JAX: a version that lacks it is left as it is, and slow.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

# --- Triton ---------------------------------------------------------------------------------------


@functools.cache
def quicken_triton() -> None:
    """Replaces three functions of the interpreter, once and for all.

    The losses and gradients of 5 rows of 2049 took 9 s of CPU time in the five reductions, now 4 s.
    """
    from triton.runtime import interpreter

    semantic = getattr(interpreter, "interpreter_semantic", None)
    for where, name, quick in (
        (interpreter, "_patch_lang", patch_once_a_launch),
        (interpreter, "_get_np_dtype", remember_dtypes),
        (semantic, "binary_op_sanitize_overflow_impl", check_overflow_where_it_can_fail),
    ):
        if hasattr(where, name):
            setattr(where, name, quick(getattr(where, name)))


def patch_once_a_launch(patch: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter replaces each function of ``triton.language`` in a launch, and does it again
    whenever one ``triton.jit`` function calls another: that took 40 % of the time.
    """
    from triton import language
    from triton.runtime import interpreter

    unchanged = getattr(interpreter, "_LangPatchScope", lambda: None)()

    @functools.cache
    def languages(fn: Callable[..., Any]) -> list[Any]:
        seen = fn.__globals__.values()
        return [x for x in (language, language.core) if any(x is value for value in seen)]

    def patch_lang(fn: Callable[..., Any]) -> Any:
        functions = [x.load for x in languages(fn)] + [language.tensor.__add__]
        return patch(fn) if any(map(language.core.is_builtin, functions)) else unchanged

    return patch_lang


def remember_dtypes(np_dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Each lookup makes the table anew, 18 entries."""
    from triton import language

    found: dict[str, np.dtype[Any]] = {}

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
        if isinstance(scalar, language.pointer_type):
            return np_dtype_of(dtype)
        if scalar.name not in found:
            found[scalar.name] = np_dtype_of(scalar)
        return found[scalar.name]

    return np_dtype


def check_overflow_where_it_can_fail(check: Callable[..., None]) -> Callable[..., None]:
    """Sums and products of integers are checked for overflow in 9 operations more, and what these
    give is thrown away: it is an assertion of the debug mode, which the interpreter has off.
    """

    def check_overflow(*operation: Any) -> None:
        if check.__self__.builder.options.debug:  # type: ignore[attr-defined]
            check(*operation)

    return check_overflow


# --- Pallas ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def quick_pallas() -> Iterator[None]:
    """Compiles each kernel once, without LLVM's optimizations, and gives it NumPy's arrays.

    The optimizations take longer than what an interpreted kernel computes. It does that in
    callbacks, thousands of them, and three quarters of the time of a run went into wrapping their
    arguments, mostly single numbers, into arrays of JAX.
    """
    import jax
    from jax._src import callback

    compile_kernels_once()
    option = "jax_disable_most_optimizations"
    before = jax.config.read(option)
    jax.config.update(option, True)
    try:
        with mock.patch.object(callback, "io_callback_impl", io_callback_in_numpy, create=True):
            yield
    finally:
        jax.config.update(option, before)


def io_callback_in_numpy(*args: Any, callback: Callable[..., Any], **_: Any) -> Any:
    """JAX's ``io_callback_impl`` without a device. Copied: the callbacks may keep what they get."""
    import jax

    return jax.tree.map(np.asarray, callback(*(np.array(x) for x in args)))


@functools.cache
def compile_kernels_once() -> None:
    """Puts each kernel under a ``jit`` of its own while Pallas's interpreter is on.

    XLA takes a second and more for an interpreted kernel. So tests share it whose kernels see the
    same shapes and flags, whatever the leading dimensions, labels and reduction around them are.
    """
    import jax

    from tvd_jax import compat, pallas_kernels

    flags = {
        "forward": ("keep_codes", "elementwise", "summed"),
        "reduce": ("reduction", "tokens", "vocab"),
        "backward": ("vocab", "dtypes"),
    }

    def with_jit(kernel: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
        jitted = jax.jit(kernel, static_argnames=names)

        @functools.wraps(kernel)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (jitted if compat.interpreting() else kernel)(*args, **kwargs)

        return call

    for name, names in flags.items():
        setattr(pallas_kernels, name, with_jit(getattr(pallas_kernels, name), names))
