"""Less of what Triton's and Pallas's interpreters cost beside running the kernels.

Neither changes what a kernel computes, or that all of it is interpreted.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


@functools.cache
def patch_triton_once_a_launch() -> None:
    """Lets a call of one ``triton.jit`` function by another keep the launch's language as it is.

    The interpreter replaces each function of ``triton.language`` again in every such call, which
    took 40 % of the time of a launch.
    """
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    unchanged = getattr(interpreter, "_LangPatchScope", lambda: None)()  # from Triton 3.7 on?

    @functools.cache
    def languages(fn: Callable[..., Any]) -> list[Any]:
        values = fn.__globals__.values()
        return [x for x in (language, language.core) if any(x is value for value in values)]

    def patch_once(fn: Callable[..., Any]) -> Any:
        functions = [x.load for x in languages(fn)] + [language.tensor.__add__]
        return patch(fn) if any(map(language.core.is_builtin, functions)) else unchanged

    interpreter._patch_lang = patch_once


@contextlib.contextmanager
def quick_compilations() -> Iterator[None]:
    """Without LLVM's optimizations, which take longer than what an interpreted kernel computes."""
    import jax

    option = "jax_disable_most_optimizations"
    before = jax.config.read(option)
    jax.config.update(option, True)
    try:
        yield
    finally:
        jax.config.update(option, before)


@functools.cache
def compile_pallas_kernels_once() -> None:
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
