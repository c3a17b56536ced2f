"""Launches the Triton kernels on JAX arrays, through jax-triton.

The same three functions as ``pallas_kernels``, with the same arguments and results.
"""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tvd_core import config
from tvd_core.contract import LANES, NORMALIZED_REDUCTIONS, code_tiles
from tvd_jax import compat


def missing_package() -> str | None:
    """Name of a package that this implementation needs and that is not installed."""
    for module, package in (("triton", "triton"), ("jax_triton", "jax-triton")):
        if importlib.util.find_spec(module) is None:
            return package
    return None


def _jax_triton() -> Any:
    # Importing jax-triton changes TRITON_CACHE_DIR (0.3.1 empties it, 0.4 deletes it), which breaks
    # Triton under PyTorch in the same process.
    before = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton

    if before is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = before
    compat.repair_jax_triton(jax_triton)
    return jax_triton


def vmappable(shape: tuple[int, ...], dtypes: Sequence[Any]) -> bool:
    """See :func:`tvd_jax.pallas_kernels.vmappable`."""
    return False  # jax-triton has no batching rule


def _call(kernel: Any, *args: Any, outputs: Sequence[Any], grid: int, **options: Any) -> Any:
    # As for Pallas: XLA may hand over the unaligned pointer of a slice that it fused into the call,
    # and jax-triton compiles for 16-byte alignment.
    arrays = [x for x in args if isinstance(x, jax.Array)]
    arrays = iter(jax.lax.optimization_barrier(tuple(arrays)))
    args = tuple(next(arrays) if isinstance(x, jax.Array) else x for x in args)
    results = _jax_triton().triton_call(
        *args, kernel=kernel, grid=(grid,), **compat.triton_out(list(outputs)), **options
    )
    return compat.vary_like(results, *(x for x in args if isinstance(x, jax.Array)))


def forward(
    p: jax.Array,
    q: jax.Array,
    row_weights: jax.Array | None,
    *,
    keep_codes: bool,
    elementwise: bool,
    summed: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """See :func:`tvd_jax.pallas_kernels.forward`; ``summed`` makes no difference here."""
    from tvd_core.triton_kernels import tvd_forward_kernel

    tokens, vocab = p.shape
    nothing = jax.ShapeDtypeStruct((1,), jnp.uint8)
    codes = jax.ShapeDtypeStruct((tokens, code_tiles(vocab) * LANES), jnp.uint8)
    values = jax.ShapeDtypeStruct((tokens, vocab), jnp.float32)
    per_token, codes_out, values_out = _call(
        tvd_forward_kernel,
        p,
        q,
        p,
        p if row_weights is None else row_weights,
        0,
        vocab,
        outputs=[
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
            codes if keep_codes else nothing,
            values if elementwise else jax.ShapeDtypeStruct((1,), jnp.float32),
        ],
        grid=tokens,
        num_warps=config.TRITON_FORWARD_WARPS,
        HAS_LABELS=False,
        HAS_WEIGHTS=row_weights is not None,
        KEEP_CODES=keep_codes,
        ELEMENTWISE=elementwise,
        ALIGNED=vocab % 16 == 0,
        STAGES=config.triton_forward_stages(
            tokens, vocab, keep_codes, p.dtype.itemsize, q.dtype.itemsize
        ),
        STREAM=config.forward_stream(tokens, vocab, keep_codes),
    )
    return per_token, codes_out if keep_codes else None, values_out if elementwise else None


def reduce(
    per_token: jax.Array,
    row_weights: jax.Array | None,
    normalizer: jax.Array | float | None,
    *,
    reduction: str,
    tokens: int,
    vocab: int,
) -> tuple[jax.Array, jax.Array]:
    """See :func:`tvd_jax.pallas_kernels.reduce`."""
    from tvd_core.triton_kernels import tvd_reduce_kernel

    normalized = reduction in NORMALIZED_REDUCTIONS
    counted = normalized and normalizer is None and row_weights is not None
    scalar = jax.ShapeDtypeStruct((1,), jnp.float32)
    loss, divisor = _call(
        tvd_reduce_kernel,
        per_token,
        per_token,
        row_weights if counted else per_token,
        per_token if normalizer is None else jnp.asarray(normalizer, jnp.float32).reshape(1),
        0,
        tokens,
        float(tokens) if normalized else 1.0,
        float(vocab) if reduction == "mean" else 1.0,
        outputs=[scalar, scalar],
        grid=1,
        num_warps=config.TRITON_REDUCE_WARPS,
        HAS_LABELS=False,
        HAS_WEIGHTS=counted,
        HAS_NORMALIZER=normalizer is not None,
        COUNT=counted,
    )
    return loss.reshape(()), divisor.reshape(())


def backward(
    codes: jax.Array,
    upstream: jax.Array,
    divisor: jax.Array | None,
    row_weights: jax.Array | None,
    *,
    vocab: int,
    dtypes: Sequence[Any],
) -> list[jax.Array | None]:
    """See :func:`tvd_jax.pallas_kernels.backward`."""
    from tvd_core.triton_kernels import tvd_backward_kernel

    tokens = codes.shape[0]
    outputs = [
        jax.ShapeDtypeStruct((1,) if dtype is None else (tokens, vocab), dtype or jnp.float32)
        for dtype in dtypes
    ]
    gradients = _call(
        tvd_backward_kernel,
        codes,
        upstream.reshape(1) if upstream.ndim == 0 else upstream,
        upstream if divisor is None else divisor.reshape(1),
        codes,
        codes if row_weights is None else row_weights,
        0,
        vocab,
        outputs=outputs,
        grid=config.triton_backward_grid(tokens, vocab),
        num_warps=config.TRITON_BACKWARD_WARPS,
        UPSTREAM=upstream.ndim,
        HAS_DIVISOR=divisor is not None,
        HAS_LABELS=False,
        HAS_WEIGHTS=row_weights is not None,
        WANT_P=dtypes[0] is not None,
        WANT_Q=dtypes[1] is not None,
        ALIGNED=vocab % 16 == 0,
        PREFETCH=config.BACKWARD_PREFETCH,
    )
    return [None if dtype is None else g for dtype, g in zip(dtypes, gradients, strict=True)]
