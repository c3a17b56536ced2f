"""The XLA implementation: the readable definition, differentiated by JAX itself."""

import jax
import jax.numpy as jnp
from jax import lax

from tvd_jax import sharded


def accumulation_dtype(p: jax.Array, q: jax.Array) -> jnp.dtype:
    """float32, or float64 if either input is."""
    return jnp.promote_types(jnp.promote_types(p.dtype, q.dtype), jnp.float32)


def absolute_difference(p: jax.Array, q: jax.Array, kept: jax.Array | None) -> jax.Array:
    """|p - q|, 0 in rows that are not kept.

    The rows are selected before the difference, so that the gradient is selected too and a NaN in
    an ignored row stays out of it. ``d * sign(d)`` because ``jnp.abs`` has the gradient 1 at 0.
    """
    dtype = accumulation_dtype(p, q)
    p, q = p.astype(dtype), q.astype(dtype)
    if kept is not None:
        p, q = (jnp.where(kept[..., None], x, 0) for x in (p, q))
    d = p - q
    return d * lax.stop_gradient(jnp.sign(d))


def loss(
    p: jax.Array,
    q: jax.Array,
    row_weights: jax.Array | None,
    normalizer: jax.Array | float | None,
    reduction: str,
    axes: sharded.Axes = sharded.NOT_SPREAD,
) -> jax.Array:
    """``tvd_loss`` of ``p, q [..., vocab]``; row_weights is 0 for an ignored token."""
    kept = None if row_weights is None else row_weights != 0
    elementwise = 0.5 * absolute_difference(p, q, kept)
    if reduction == "none":
        return elementwise if row_weights is None else elementwise * row_weights[..., None]
    per_token = sharded.psum(elementwise.sum(-1), axes.vocab)
    vocab = axes.vocab_size(p.shape[-1])
    return reduce_tokens(per_token, row_weights, normalizer, reduction, vocab, axes)


def reduce_tokens(
    per_token: jax.Array,
    row_weights: jax.Array | None,
    normalizer: jax.Array | float | None,
    reduction: str,
    vocab: int,
    axes: sharded.Axes = sharded.NOT_SPREAD,
) -> jax.Array:
    """``per_token`` times the weights, and what the reduction makes of it; any but ``none``."""
    if row_weights is not None:
        per_token = per_token * row_weights
    return sharded.reduce_tokens(
        per_token, row_weights, normalizer, reduction, vocab, axes, jnp.sum
    )
