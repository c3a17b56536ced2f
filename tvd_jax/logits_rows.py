"""The kernels of the losses from logits under JAX's autodiff: Pallas, or Triton by jax-triton."""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tvd_core import config
from tvd_core.contract import NORMALIZED_REDUCTIONS, base_2_scale, logit_scale
from tvd_jax import sharded
from tvd_jax.logits_xla import Rows
from tvd_jax.sharded import NOT_SPREAD, Axes

LN2 = math.log(2)


def rows(
    student: jax.Array,
    teacher: jax.Array,
    row_weights: jax.Array | None,
    temperature: float,
    *,
    want_kl: bool = False,
    targets: jax.Array | None = None,
    axes: Axes = NOT_SPREAD,
    implementation: str,
) -> Rows:
    """See :func:`tvd_jax.logits_xla.rows`.

    Keeps the student's logits, codes and three numbers a row; the teacher's logits only for their
    own gradient or that of the KL divergence.
    """
    is_first = None
    if axes.vocab:
        is_first = sharded.shard_number(axes.vocab) == 0
        if targets is not None:
            targets = sharded.local_positions(targets, student.shape[-1], axes.vocab)
    static = _Static(float(temperature), want_kl, implementation, axes.vocab)

    def whole(part: Any) -> Any:
        """The sum over the shards, for JAX to transpose."""
        return None if part is None else sharded.psum(part, axes.vocab)

    parts = _rows(student, teacher, row_weights, targets, is_first, static)
    tvd, student_lse, teacher_lse, kl, target_logit = (whole(part) for part in parts)
    return Rows(tvd, student_lse, teacher_lse, kl, target_logit)


def reduce_tokens(
    per_token: jax.Array,
    row_weights: jax.Array | None,
    normalizer: jax.Array | float | None,
    reduction: str,
    vocab: int,
    axes: Axes = NOT_SPREAD,
    *,
    implementation: str,
) -> jax.Array:
    """See :func:`tvd_jax.xla.reduce_tokens`; adds in the contract's order."""
    if row_weights is not None:
        per_token = per_token * row_weights
    if reduction == "per_token":
        return per_token
    if axes.tokens or sharded.partitioned():
        of_device = functools.partial(total, implementation=implementation)
        return sharded.reduce_tokens(
            per_token, row_weights, normalizer, reduction, vocab, axes, of_device, divide
        )
    if normalizer is not None:
        normalizer = jnp.asarray(normalizer, jnp.float32)
    weights = None if row_weights is None else row_weights.reshape(-1)
    return _reduce(per_token.reshape(-1), weights, normalizer, reduction, vocab, implementation)


def total(values: jax.Array, implementation: str) -> jax.Array:
    """The sum of ``values`` in the contract's order; a part on each device if they are spread."""
    return _total(values, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _total(values: Any, implementation: str) -> Any:
    return sharded.call_total(
        lambda values: _run_reduce(values, None, None, "sum", 1, implementation)[0], values
    )


_total.defvjp(
    lambda values, implementation: (_total(values, implementation), jnp.zeros_like(values)),
    lambda implementation, zeros, upstream: (zeros + upstream,),
)


@jax.custom_vjp
def divide(value: jax.Array, divisor: jax.Array) -> jax.Array:
    """``value / divisor``, rounded to nearest; the divisor is a constant."""
    from tvd_jax import pallas_kernels

    return pallas_kernels.divide(value, divisor)


divide.defvjp(
    lambda value, divisor: (divide(value, divisor), divisor),
    lambda divisor, upstream: (divide(upstream, divisor), jnp.zeros_like(divisor)),
)


@dataclasses.dataclass(frozen=True)
class _Static:
    temperature: float
    want_kl: bool
    implementation: str
    vocab_axes: tuple[str, ...]
    """Over which rows are spread; the values of ``Rows`` are then this shard's parts of them."""


def _kernels(implementation: str) -> Any:
    module = {"pallas": "logits_pallas", "triton": "triton_launch"}[implementation]
    return importlib.import_module(f"tvd_jax.{module}")


def _run(
    student: Any,
    teacher: Any,
    row_weights: Any,
    targets: Any,
    is_first: Any,
    static: _Static,
    keep_codes: bool,
) -> tuple[Any, Any]:
    """The values of ``Rows``, and (rows of both, codes)."""
    run = functools.partial(_run_shards, is_first) if static.vocab_axes else _run_whole
    tvd, s_lse, t_lse, kl, kept = run(student, teacher, row_weights, static, keep_codes)
    target_logit = None
    if targets is not None:
        at_target = jnp.take_along_axis(student, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        target_logit = at_target.astype(jnp.float32) * jnp.float32(logit_scale(static.temperature))
        target_logit = jnp.where(targets < 0, 0, target_logit)
        if row_weights is not None:
            target_logit = jnp.where(row_weights == 0, 0, target_logit)
    return (tvd, s_lse, t_lse, kl, target_logit), kept


def _call_kernel(kernel: Callable[..., Any], leading: int, arguments: Any, outs: Any) -> list[Any]:
    """A kernel's results, ``None`` for those it does not give.

    ``outs`` are where their leading axes start, ``None`` for those that are not there.
    """

    def present(*arrays: Any) -> tuple[Any, ...]:
        return tuple(x for x in kernel(*arrays) if x is not None)

    starts = tuple(x for x in outs if x is not None)
    results = iter(sharded.call_by_rows(present, leading, arguments, starts))
    return [None if x is None else next(results) for x in outs]


def _run_whole(
    student: Any, teacher: Any, row_weights: Any, static: _Static, keep_codes: bool
) -> tuple[Any, ...]:
    """TVD, log-sum-exp of both, KL divergence, and (rows of both, codes)."""
    forward = functools.partial(
        _kernels(static.implementation).logits_forward,
        temperature=static.temperature,
        want_kl=static.want_kl,
        keep_codes=keep_codes,
    )
    rows = [(student, 0), (teacher, 0), (row_weights, 0)]
    kl_start, codes_start = (0 if wanted else None for wanted in (static.want_kl, keep_codes))
    outs = (0, 1, 1, 0, 0, kl_start, codes_start)
    tvd, s_rows, t_rows, s_lse, t_lse, kl, codes = _call_kernel(
        forward, student.ndim - 1, rows, outs
    )
    return tvd, s_lse, t_lse, kl, (s_rows, t_rows, codes)


def _run_shards(
    is_first: Any, student: Any, teacher: Any, row_weights: Any, static: _Static, keep_codes: bool
) -> tuple[Any, ...]:
    """As ``_run_whole`` of rows that are spread: parts, whose sums over the shards are the values.

    The logarithms, which are no sums over the elements, are the first shard's.
    """
    axes, leading = static.vocab_axes, student.ndim - 1
    kernels, temperature = _kernels(static.implementation), static.temperature
    rows = [(student, 0), (teacher, 0), (row_weights, 0)]
    of_shard = functools.partial(kernels.logits_statistics, temperature=temperature)
    own = jnp.stack(_call_kernel(of_shard, leading, rows, (1, 1)))
    # How a maximum over devices takes a NaN is not defined. The sums show it.
    reference = jnp.where(jnp.isnan(own[:, 0]), config.LOGITS_LOWEST, own[:, 0])
    highest = sharded.pmax(reference, axes)
    unit = config.logits_reference_unit(base_2_scale(temperature))
    total = sharded.psum(own[:, 1] * jnp.exp2((reference - highest) * unit), axes)
    factor = 1 / total
    given = jnp.stack([highest[0], factor[0], highest[1], factor[1]])
    differences = functools.partial(
        kernels.logits_differences,
        temperature=temperature,
        want_kl=static.want_kl,
        keep_codes=keep_codes,
    )
    codes_start, kl_start = (0 if wanted else None for wanted in (keep_codes, static.want_kl))
    tvd, below, kl, codes = _call_kernel(
        differences, leading, [*rows, (given, 1)], (0, codes_start, kl_start, codes_start)
    )
    log_total = jnp.log2(total)
    logarithms = [*(highest * unit + log_total), log_total[0] - log_total[1]]
    if row_weights is not None:
        logarithms = [jnp.where(row_weights != 0, x, 0) for x in logarithms]
    s_lse, t_lse, log_ratio = (jnp.where(is_first, x * LN2, 0) for x in logarithms)
    kl = None if kl is None else kl + log_ratio
    kept = None
    if keep_codes:
        tvd_sum, below = sharded.psum(jnp.stack([tvd, below]), axes)
        below = jnp.where(tvd_sum == 0, 1, below)  # all are ties: gradients of 0
        halves = ((given[:2], below), (given[2:], below + 2 * tvd_sum))
        s_rows, t_rows = (jnp.concatenate([x, y[None]]) for x, y in halves)
        kept = (s_rows, t_rows, codes)
    return tvd, s_lse, t_lse, kl, kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _rows(
    student: Any, teacher: Any, row_weights: Any, targets: Any, is_first: Any, static: _Static
) -> Any:
    return _run(student, teacher, row_weights, targets, is_first, static, False)[0]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which gradients the backward returns."""

    student: bool
    teacher: bool


def _rows_fwd(
    student: Any, teacher: Any, row_weights: Any, targets: Any, is_first: Any, static: _Static
) -> Any:
    wanted = _Wanted(student.perturbed, teacher.perturbed)
    s, t, kept_weights, positions, first = (
        None if x is None else x.value for x in (student, teacher, row_weights, targets, is_first)
    )
    values, (s_rows, t_rows, codes) = _run(s, t, kept_weights, positions, first, static, True)
    kl = values[3]
    if static.want_kl and wanted.teacher:
        kl = sharded.psum(kl, static.vocab_axes)
    keep_student = wanted.student or static.want_kl  # whose gradient takes the other's logits too
    keep_teacher = wanted.teacher or static.want_kl
    kept = (
        s if keep_student else None,
        t if keep_teacher else None,
        s_rows if keep_student else None,
        t_rows if keep_teacher else None,
        kl if wanted.teacher else None,
        codes,
        kept_weights,
        positions,
        wanted,
    )
    return values, kept


def _rows_bwd(static: _Static, kept: Any, upstreams: Any) -> Any:
    student, teacher, s_rows, t_rows, kl, codes, row_weights, targets, wanted = kept
    upstreams = [None if isinstance(x, SymbolicZero) else x for x in upstreams]
    tvd, s_lse, t_lse, kl_up, target = upstreams
    if tvd is None:
        tvd = jnp.zeros(codes.shape[:-1], jnp.float32)
    kernels = _kernels(static.implementation)

    def gradient(is_student: bool, *arrays: Any) -> Any:
        backward = functools.partial(
            kernels.logits_backward, temperature=static.temperature, is_student=is_student
        )
        x, other, rows, other_rows, *per_token = arrays
        arguments = [(x, 0), (other, 0), (rows, 1), (other_rows, 1)]
        arguments += [(x, 0) for x in (*per_token, codes, row_weights)]
        (found,) = sharded.call_by_rows(
            lambda *arrays: (backward(*arrays),), codes.ndim - 1, arguments, (0,)
        )
        return found

    ds = dt = None
    if wanted.student:
        own_targets = None if target is None else targets
        other = (None, None) if kl_up is None else (teacher, t_rows)
        arrays = (student, other[0], s_rows, other[1], None, tvd, s_lse, kl_up, target, own_targets)
        ds = gradient(True, *arrays)
    if wanted.teacher:
        other = (None, None) if kl_up is None else (student, s_rows)
        arrays = (teacher, other[0], t_rows, other[1], kl, tvd, t_lse, kl_up, None, None)
        dt = gradient(False, *arrays)
    return ds, dt, None, None, None


_rows.defvjp(_rows_fwd, _rows_bwd, symbolic_zeros=True)


# --- reduction -----------------------------------------------------------------------------------


def _in_turn(function: Callable[..., Any], *arrays: Any) -> Any:
    """Calls a kernel, under ``vmap`` once for each element of the batch; takes ``None`` too."""
    present = [x for x in arrays if x is not None]

    @jax.custom_batching.sequential_vmap
    def call(*present: Any) -> Any:
        rest = iter(present)
        return function(*(None if x is None else next(rest) for x in arrays))

    return call(*present)


def _run_reduce(
    per_token: Any, row_weights: Any, normalizer: Any, reduction: str, vocab: int, name: str
) -> tuple[Any, Any]:
    module = {"pallas": "pallas_kernels", "triton": "triton_launch"}[name]
    kernels = importlib.import_module(f"tvd_jax.{module}")
    tokens = per_token.shape[0]

    def reduce(per_token: Any, row_weights: Any, normalizer: Any) -> Any:
        padded = kernels.fill_up(per_token)
        return kernels.reduce(
            padded, row_weights, normalizer, reduction=reduction, tokens=tokens, vocab=vocab
        )

    if reduction not in NORMALIZED_REDUCTIONS:
        row_weights = None
    return _in_turn(reduce, per_token, row_weights, normalizer)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _reduce(
    per_token: Any, row_weights: Any, normalizer: Any, reduction: str, vocab: int, name: str
) -> Any:
    return _run_reduce(per_token, row_weights, normalizer, reduction, vocab, name)[0]


def _reduce_fwd(
    per_token: Any, row_weights: Any, normalizer: Any, reduction: str, vocab: int, name: str
) -> Any:
    loss, divisor = _run_reduce(per_token, row_weights, normalizer, reduction, vocab, name)
    return loss, (divisor, jnp.zeros_like(per_token))


def _reduce_bwd(reduction: str, vocab: int, name: str, kept: Any, upstream: Any) -> Any:
    divisor, zeros = kept
    from tvd_jax.pallas_kernels import divide

    return zeros + divide(upstream, divisor), None, None


_reduce.defvjp(_reduce_fwd, _reduce_bwd)
