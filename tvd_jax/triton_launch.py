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
from tvd_core.contract import LANES, NORMALIZED_REDUCTIONS, base_2_scale, code_tiles
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


def fill_up(per_token: jax.Array) -> jax.Array:
    """See :func:`tvd_jax.pallas_kernels.fill_up`; these kernels take any number of tokens."""
    return per_token


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


def _aligned(x: jax.Array) -> jax.Array:
    """Rows of a multiple of 16 elements, filled up with -inf, which changes nothing.

    The codes of other rows start where the row does in memory: a batch that JAX makes of codes and
    something else in the backward would read them at the wrong place.
    """
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % 16)), constant_values=-jnp.inf)


def logits_forward(
    student: jax.Array,
    teacher: jax.Array,
    row_weights: jax.Array | None,
    *,
    temperature: float,
    want_kl: bool,
    keep_codes: bool,
) -> tuple[Any, ...]:
    """TVD, rows, log-sum-exp, KL divergence and codes of rows of logits.

    Returns:
        tvd ``[tokens]``; ``[3, tokens]`` for the student and for the teacher, what the backward
        needs; the log-sum-exp of both and the KL divergence or ``None``, ``[tokens]``; codes or
        ``None``. All float32 but the codes.
    """
    return _logits_forward(
        student, teacher, row_weights, None, temperature, want_kl, keep_codes, "COMPUTED"
    )


def logits_statistics(
    student: jax.Array, teacher: jax.Array, row_weights: jax.Array | None, *, temperature: float
) -> tuple[Any, Any]:
    """``[2, tokens]`` for the student and for the teacher: the reference of each row, its sum.

    The sum is of ``2 ** (x * log2(e) / temperature - reference)``.
    """
    _, s_rows, t_rows, *_ = _logits_forward(
        student, teacher, row_weights, None, temperature, False, False, "ALONE"
    )
    return s_rows[:2], t_rows[:2]


def logits_differences(
    student: jax.Array,
    teacher: jax.Array,
    row_weights: jax.Array | None,
    given: jax.Array,
    *,
    temperature: float,
    want_kl: bool,
    keep_codes: bool,
) -> tuple[Any, ...]:
    """Parts of what ``logits_forward`` sums, of rows that are shards, and the codes.

    Args:
        given: ``[4, tokens]``: the student's reference and factor, 1 / sum, then the teacher's, of
            the whole rows.

    Returns:
        Of tvd, of ``sum_v p * (1 - sign(p - q))`` or ``None`` without codes, and of the KL
        divergence or ``None``, without the logarithm of the factors: ``[tokens]``; codes or
        ``None``.
    """
    tvd, s_rows, *_, kl, codes = _logits_forward(
        student, teacher, row_weights, given, temperature, want_kl, keep_codes, "GIVEN"
    )
    return tvd, s_rows[2] if keep_codes else None, kl, codes


def _logits_forward(
    student: jax.Array,
    teacher: jax.Array,
    row_weights: jax.Array | None,
    given: jax.Array | None,
    temperature: float,
    want_kl: bool,
    keep_codes: bool,
    statistics: str,
) -> tuple[Any, ...]:
    from tvd_core import logits_kernels

    student, teacher = _aligned(student), _aligned(teacher)
    tokens, vocab = student.shape
    values = jax.ShapeDtypeStruct((tokens,), jnp.float32)
    three = jax.ShapeDtypeStruct((3, tokens), jnp.float32)
    one = jax.ShapeDtypeStruct((1,), jnp.float32)
    codes = jax.ShapeDtypeStruct((tokens, config.logits_codes_bytes(vocab)), jnp.uint8)
    nothing = jax.ShapeDtypeStruct((1,), jnp.uint8)
    # jax-triton cannot limit the registers, and then two programs an SM are what fits.
    launch = config.logits_forward_launch(student.dtype.itemsize, teacher.dtype.itemsize)
    programs = min(launch.programs, config.LOGITS_PROGRAMS_UNLIMITED) * compat.sm_count()
    *results, kl, codes_out = _call(
        logits_kernels.logits_forward_kernel,
        student,
        teacher,
        student if row_weights is None else row_weights,
        student if given is None else given,
        base_2_scale(temperature),
        tokens,
        vocab,
        outputs=[
            values,
            three,
            three,
            values,
            values,
            values if want_kl else one,
            codes if keep_codes else nothing,
        ],
        grid=min(tokens, programs),
        num_warps=launch.warps,
        enable_fp_fusion=False,
        HAS_WEIGHTS=row_weights is not None,
        KEEP_CODES=keep_codes,
        WANT_KL=want_kl,
        ALIGNED=True,
        COLD=base_2_scale(temperature) > config.LOGITS_COLD_SCALE,
        STATISTICS=getattr(logits_kernels, statistics).value,
        AHEAD=launch.ahead,
    )
    return *results, kl if want_kl else None, codes_out if keep_codes else None


def logits_backward(
    logits: jax.Array,
    other: jax.Array | None,
    rows: jax.Array,
    other_rows: jax.Array | None,
    kl: jax.Array | None,
    tvd_upstream: jax.Array,
    lse_upstream: jax.Array | None,
    kl_upstream: jax.Array | None,
    target_upstream: jax.Array | None,
    targets: jax.Array | None,
    codes: jax.Array,
    row_weights: jax.Array | None,
    *,
    temperature: float,
    is_student: bool,
) -> jax.Array:
    """The gradient of the student's or of the teacher's logits, in their dtype."""
    from tvd_core.logits_kernels import logits_backward_kernel

    own_vocab = logits.shape[1]
    logits = _aligned(logits)
    tokens, vocab = logits.shape
    vectors = (other_rows, tvd_upstream, lse_upstream, kl_upstream, kl, target_upstream)
    (gradient,) = _call(
        logits_backward_kernel,
        logits,
        logits if other is None else _aligned(other),
        codes,
        rows,
        *(rows if x is None else x for x in vectors),
        rows if targets is None else targets,
        rows if row_weights is None else row_weights,
        base_2_scale(temperature),
        temperature,
        tokens,
        vocab,
        outputs=[jax.ShapeDtypeStruct((tokens, vocab), logits.dtype)],
        grid=tokens * config.logits_windows(vocab),
        num_warps=config.LOGITS_BACKWARD_WARPS,
        enable_fp_fusion=False,
        SIGN=1 if is_student else -1,
        HAS_SUM=lse_upstream is not None,
        HAS_KL=kl_upstream is not None,
        HAS_TARGET=target_upstream is not None,
        HAS_WEIGHTS=row_weights is not None,
        ALIGNED=True,
        COLD=base_2_scale(temperature) > config.LOGITS_COLD_SCALE,
    )
    return gradient[:, :own_vocab]
