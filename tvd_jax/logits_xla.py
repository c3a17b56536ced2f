"""The XLA implementation of the losses from logits: the readable definition."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tvd_core.contract import logit_scale
from tvd_jax import sharded
from tvd_jax.xla import accumulation_dtype, reduce_tokens

__all__ = ["Rows", "elementwise", "reduce_tokens", "rows"]


class Rows(NamedTuple):
    """What one pass over the logits gives for each token, ``[tokens]``; 0 for an ignored one."""

    tvd: jax.Array
    """``0.5 * sum_v |p - q|`` of ``p = softmax(student / T)``, ``q = softmax(teacher / T)``."""
    student_lse: jax.Array
    """``log(sum_v exp(student / T))``."""
    teacher_lse: jax.Array
    """``log(sum_v exp(teacher / T))``."""
    kl: jax.Array | None
    """``sum_v q * (log q - log p)``, if it was asked for."""
    target_logit: jax.Array | None
    """``student / T`` at the target, if targets were given."""


def rows(
    student: jax.Array,
    teacher: jax.Array,
    row_weights: jax.Array | None,
    temperature: float,
    *,
    want_kl: bool = False,
    targets: jax.Array | None = None,
    axes: sharded.Axes = sharded.NOT_SPREAD,
) -> Rows:
    """TVD, log-sum-exp, KL divergence and the target's logit of each row, differentiable in both.

    Args:
        student: ``[tokens, vocab]`` logits.
        teacher: ``[tokens, vocab]`` logits.
        row_weights: ``[tokens]``, 0 for an ignored token; only that is looked at.
        temperature: divides the logits.
        want_kl: whether the KL divergence is wanted.
        targets: ``[tokens]`` positions in the row, integers, each in the vocab.
        axes: over which the rows are spread; targets are positions in the whole row.
    """
    kept = None if row_weights is None else row_weights != 0
    s, t = _kept_rows(student, teacher, kept)
    if axes.vocab and targets is not None:
        targets = sharded.local_positions(targets, student.shape[-1], axes.vocab)
    values = _rows(s, t, targets, temperature, want_kl, axes.vocab)
    if kept is None:
        return values
    return jax.tree.map(lambda x: jnp.where(kept, x, 0), values)


def elementwise(
    student: jax.Array,
    teacher: jax.Array,
    row_weights: jax.Array | None,
    temperature: float,
    axes: sharded.Axes = sharded.NOT_SPREAD,
) -> jax.Array:
    """``0.5 * |p - q|`` of each element times its row's weight."""
    kept = None if row_weights is None else row_weights != 0
    p, q = (_softmax(x, temperature, axes.vocab) for x in _kept_rows(student, teacher, kept))
    d = _difference(p, q)
    values = 0.5 * d * lax.stop_gradient(jnp.sign(d))
    return values if row_weights is None else values * row_weights[..., None]


def _kept_rows(
    student: jax.Array, teacher: jax.Array, kept: jax.Array | None
) -> tuple[jax.Array, ...]:
    """In the dtype of the sums; rows that are not kept are 0, whatever they hold."""
    dtype = accumulation_dtype(student, teacher)
    logits = student.astype(dtype), teacher.astype(dtype)
    return logits if kept is None else tuple(jnp.where(kept[..., None], x, 0) for x in logits)


def _sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum of each whole row, ``[tokens, 1]``."""
    return sharded.psum(x.sum(-1, keepdims=True), axes)


class _Softmax(NamedTuple):
    p: jax.Array
    log_p: jax.Array
    lse: jax.Array
    exponential: jax.Array
    total: jax.Array


def _softmax(x: jax.Array, temperature: float, axes: tuple[str, ...]) -> _Softmax:
    """``softmax(x / T)``, its logarithm, the log-sum-exp of each row, and what ``p`` is made of.

    The maximum goes first: the scale then multiplies numbers from -inf to 0, so that nothing
    overflows, and an -inf stays one. A row without a finite maximum is NaN.
    """
    scale = logit_scale(temperature)
    top = sharded.pmax(lax.stop_gradient(x).max(-1, keepdims=True), axes)
    z = (x - top) * scale
    e = jnp.exp(z)
    total = _sum(e, axes)
    log_total = jnp.log(total)
    return _Softmax(e / total, z - log_total, (top * scale + log_total)[..., 0], e, total)


def _difference(one: _Softmax, other: _Softmax) -> jax.Array:
    """``p - q``, and 0 where both are the same quotient.

    XLA may contract the difference of two products with reciprocals into one with the rounding of
    one of them: equal logits then had a distance of 1e-8, and signs in the gradient.
    """
    same = (one.exponential == other.exponential) & (one.total == other.total)
    return jnp.where(same, 0, one.p - other.p)


def _divergence(student: _Softmax, teacher: _Softmax) -> tuple[jax.Array, jax.Array]:
    """``q * (log q - log p)``, 0 where ``q`` is, and the factor in brackets."""
    ratio = jnp.where(teacher.p == 0, 0, teacher.log_p - student.log_p)
    return teacher.p * ratio, ratio


def _centred(x: jax.Array, signs: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """``x * (signs - sum_v x * signs)`` of a row of probabilities.

    ``1 - (above - below)`` would lose what a peaked row leaves of it. ``above + level + below = 1``
    makes it ``level + 2 * below``, which cancels nothing.
    """
    above = _sum(jnp.where(signs > 0, x, 0), axes)
    below = _sum(jnp.where(signs < 0, x, 0), axes)
    level = _sum(jnp.where(signs == 0, x, 0), axes)
    factor = jnp.where(signs == 0, below - above, signs)  # NaN stays
    factor = jnp.where(signs > 0, level + 2 * below, factor)
    return x * jnp.where(signs < 0, -level - 2 * above, factor)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def _rows(
    s: jax.Array,
    t: jax.Array,
    targets: jax.Array | None,
    temperature: float,
    want_kl: bool,
    axes: tuple[str, ...],
) -> Rows:
    p, q = _softmax(s, temperature, axes), _softmax(t, temperature, axes)
    kl = _sum(_divergence(p, q)[0], axes)[..., 0] if want_kl else None
    target = None if targets is None else _at(s, targets, axes) * logit_scale(temperature)
    return Rows(0.5 * _sum(jnp.abs(_difference(p, q)), axes)[..., 0], p.lse, q.lse, kl, target)


def _at(x: jax.Array, targets: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """``x`` at one position of each row, -1 where another device holds it."""
    found = jnp.take_along_axis(x, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return sharded.psum(jnp.where(targets < 0, 0, found), axes) if axes else found


@_rows.defjvp
def _rows_jvp(
    temperature: float, want_kl: bool, axes: tuple[str, ...], primals: Any, tangents: Any
) -> tuple[Rows, Rows]:
    """The rule is linear in the tangents, for JAX to transpose, and can be derived itself."""
    s, t, targets = primals
    # By the chain rule through x / T. Not after the sums: their transposes then scale in float32.
    ds, dt = (x * (1.0 / temperature) for x in tangents[:2])
    student, teacher = (_softmax(x, temperature, axes) for x in (s, t))
    p, q, difference = student.p, teacher.p, _difference(student, teacher)
    signs = lax.stop_gradient(jnp.sign(difference))

    def along_rows(x: jax.Array) -> jax.Array:
        return _sum(x, axes)[..., 0]

    kl = None
    if want_kl:
        terms, ratio = _divergence(student, teacher)
        kl = along_rows(difference * ds)
        kl += along_rows((q * ratio - q * _sum(terms, axes)) * dt)
    along = Rows(
        0.5 * along_rows(_centred(p, signs, axes) * ds + _centred(q, -signs, axes) * dt),
        along_rows(p * ds),
        along_rows(q * dt),
        kl,
        None if targets is None else _at(ds, targets, axes),
    )
    return _rows(s, t, targets, temperature, want_kl, axes), along
