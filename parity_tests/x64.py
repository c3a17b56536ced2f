"""JAX's 64-bit mode for the length of a ``with`` block, under the name that the version has."""

import contextlib


def enable_x64() -> contextlib.AbstractContextManager[None]:
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64()
