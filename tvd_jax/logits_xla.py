"""The XLA implementation of the losses from logits: the readable definition."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tvd_core.contract import logit_scale
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
) -> Rows:
    """TVD, log-sum-exp, KL divergence and the target's logit of each row, differentiable in both.

    Args:
        student: ``[tokens, vocab]`` logits.
        teacher: ``[tokens, vocab]`` logits.
        row_weights: ``[tokens]``, 0 for an ignored token; only that is looked at.
        temperature: divides the logits.
        want_kl: whether the KL divergence is wanted.
        targets: ``[tokens]`` positions in the row, integers, each in the vocab.
    """
    kept = None if row_weights is None else row_weights != 0
    s, t = _kept_rows(student, teacher, kept)
    values = _rows(s, t, targets, temperature, want_kl)
    if kept is None:
        return values
    return jax.tree.map(lambda x: jnp.where(kept, x, 0), values)


def elementwise(
    student: jax.Array, teacher: jax.Array, row_weights: jax.Array | None, temperature: float
) -> jax.Array:
    """``0.5 * |p - q|`` of each element times its row's weight."""
    kept = None if row_weights is None else row_weights != 0
    p, q = (_softmax(x, temperature) for x in _kept_rows(student, teacher, kept))
    d = _difference(p, q)
    values = 0.5 * d * lax.stop_gradient(jnp.sign(d))
    return values if row_weights is None else values * row_weights[:, None]


def _kept_rows(
    student: jax.Array, teacher: jax.Array, kept: jax.Array | None
) -> tuple[jax.Array, ...]:
    """In the dtype of the sums; rows that are not kept are 0, whatever they hold."""
    dtype = accumulation_dtype(student, teacher)
    logits = student.astype(dtype), teacher.astype(dtype)
    return logits if kept is None else tuple(jnp.where(kept[:, None], x, 0) for x in logits)


class _Softmax(NamedTuple):
    p: jax.Array
    log_p: jax.Array
    lse: jax.Array
    exponential: jax.Array
    total: jax.Array


def _softmax(x: jax.Array, temperature: float) -> _Softmax:
    """``softmax(x / T)``, its logarithm, the log-sum-exp of each row, and what ``p`` is made of.

    The maximum goes first: the scale then multiplies numbers from -inf to 0, so that nothing
    overflows, and an -inf stays one. A row without a finite maximum is NaN.
    """
    scale = logit_scale(temperature)
    top = lax.stop_gradient(x).max(-1, keepdims=True)
    z = (x - top) * scale
    e = jnp.exp(z)
    total = e.sum(-1, keepdims=True)
    log_total = jnp.log(total)
    return _Softmax(e / total, z - log_total, (top * scale + log_total)[:, 0], e, total)


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


def _centred(x: jax.Array, signs: jax.Array) -> jax.Array:
    """``x * (signs - sum_v x * signs)`` of a row of probabilities.

    ``1 - (above - below)`` would lose what a peaked row leaves of it. ``above + level + below = 1``
    makes it ``level + 2 * below``, which cancels nothing.
    """
    above = jnp.where(signs > 0, x, 0).sum(-1, keepdims=True)
    below = jnp.where(signs < 0, x, 0).sum(-1, keepdims=True)
    level = jnp.where(signs == 0, x, 0).sum(-1, keepdims=True)
    factor = jnp.where(signs == 0, below - above, signs)  # NaN stays
    factor = jnp.where(signs > 0, level + 2 * below, factor)
    return x * jnp.where(signs < 0, -level - 2 * above, factor)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _rows(
    s: jax.Array, t: jax.Array, targets: jax.Array | None, temperature: float, want_kl: bool
) -> Rows:
    p, q = _softmax(s, temperature), _softmax(t, temperature)
    return Rows(
        0.5 * jnp.abs(_difference(p, q)).sum(-1),
        p.lse,
        q.lse,
        _divergence(p, q)[0].sum(-1) if want_kl else None,
        None if targets is None else _at(s, targets) * logit_scale(temperature),
    )


def _at(x: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, targets[:, None], axis=-1)[:, 0]


@_rows.defjvp
def _rows_jvp(temperature: float, want_kl: bool, primals: Any, tangents: Any) -> tuple[Rows, Rows]:
    """The rule is linear in the tangents, for JAX to transpose, and can be derived itself."""
    s, t, targets = primals
    # By the chain rule through x / T. Not after the sums: their transposes then scale in float32.
    ds, dt = (x * (1.0 / temperature) for x in tangents[:2])
    student, teacher = _softmax(s, temperature), _softmax(t, temperature)
    p, q, difference = student.p, teacher.p, _difference(student, teacher)
    signs = lax.stop_gradient(jnp.sign(difference))
    kl = None
    if want_kl:
        terms, ratio = _divergence(student, teacher)
        kl = (difference * ds).sum(-1)
        kl += ((q * ratio - q * terms.sum(-1, keepdims=True)) * dt).sum(-1)
    along = Rows(
        0.5 * (_centred(p, signs) * ds + _centred(q, -signs) * dt).sum(-1),
        (p * ds).sum(-1),
        (q * dt).sum(-1),
        kl,
        None if targets is None else _at(ds, targets),
    )
    return _rows(s, t, targets, temperature, want_kl), along
