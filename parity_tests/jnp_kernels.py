"""What the kernels compute, in jax.numpy: for partitioning rules, on devices that run no kernel.

The signatures are those of ``pallas_kernels`` and ``logits_pallas``. The codes, into which no
caller looks, are shorter and longer than a row here, as those of the kernels can be.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from tvd_jax import compat, logits_pallas, pallas_kernels

LN2 = math.log(2)


def _selected(weights: Any, x: Any) -> Any:
    kept = None if weights is None else (weights != 0).reshape(-1, *(1,) * (x.ndim - 1))
    return x if kept is None else jnp.where(kept, x, 0)


def _weighted(weights: Any, x: Any) -> Any:
    return x if weights is None else _selected(weights, x) * weights


def _pack(signs: Any) -> Any:
    """Two signs a byte: half as long as a row, which has to be even."""
    signs = signs.astype(jnp.int8) + 1
    half = signs.shape[1] // 2
    return signs[:, :half] + 4 * signs[:, half:]


def _unpack(codes: Any) -> Any:
    return (jnp.concatenate([codes & 3, codes >> 2], 1) - 1).astype(jnp.float32)


def forward(p: Any, q: Any, weights: Any, *, keep_codes: bool, elementwise: bool, summed: bool):
    assert not summed and not elementwise
    d = p.astype(jnp.float32) - q.astype(jnp.float32)
    per_token = _weighted(weights, 0.5 * jnp.abs(d).sum(-1))
    return per_token, _pack(jnp.sign(d)) if keep_codes else None, None


def backward(codes: Any, upstream: Any, divisor: Any, weights: Any, *, vocab: int, dtypes: Any):
    assert divisor is None
    signs = _unpack(codes)
    assert signs.shape[1] == vocab
    scale = _weighted(weights, 0.5 * upstream)
    dp = _selected(weights, signs * scale[:, None])
    return [None if t is None else (s * dp).astype(t) for t, s in zip(dtypes, (1, -1), strict=True)]


def reduce(
    per_token: Any, weights: Any, normalizer: Any, *, reduction: str, tokens: int, vocab: int
):
    assert reduction == "sum"
    return per_token.sum(), jnp.float32(1)


def _base_2(weights: Any, logits: Any, temperature: float) -> Any:
    """Exponents of 2 of the softmax."""
    return _selected(weights, logits.astype(jnp.float32)) / (temperature * LN2)


def logits_forward(
    student: Any, teacher: Any, weights: Any, *, temperature: float, want_kl: bool, keep_codes: bool
):
    options = {"temperature": temperature, "want_kl": want_kl}
    two = logits_statistics(student, teacher, weights, temperature=temperature)
    given = jnp.stack([two[0][0], 1 / two[0][1], two[1][0], 1 / two[1][1]])
    tvd, below, kl, codes = logits_differences(
        student, teacher, weights, given, keep_codes=True, **options
    )
    lse = [_selected(weights, (x[0] + jnp.log2(x[1])) * LN2) for x in two]
    if want_kl:
        kl = _selected(weights, kl + (jnp.log2(given[3]) - jnp.log2(given[1])) * LN2)
    rows = [jnp.stack([*given[:2], below]), jnp.stack([*given[2:], below + 2 * tvd])]
    return tvd, *rows, *lse, kl, codes if keep_codes else None


def logits_statistics(student: Any, teacher: Any, weights: Any, *, temperature: float):
    exponents = [_base_2(weights, x, temperature) for x in (student, teacher)]
    references = [jnp.maximum(x.max(-1), -3e38) for x in exponents]
    both = zip(exponents, references, strict=True)
    return tuple(jnp.stack([r, jnp.exp2(x - r[:, None]).sum(-1)]) for x, r in both)


def logits_differences(
    student: Any,
    teacher: Any,
    weights: Any,
    given: Any,
    *,
    temperature: float,
    want_kl: bool,
    keep_codes: bool,
):
    s, t = (_base_2(weights, x, temperature) for x in (student, teacher))
    s, t = s - given[0][:, None], t - given[2][:, None]
    p, q = jnp.exp2(s) * given[1][:, None], jnp.exp2(t) * given[3][:, None]
    signs = jnp.sign(p - q)
    tvd = _selected(weights, 0.5 * jnp.abs(p - q).sum(-1))
    kl = _selected(weights, jnp.where(q == 0, 0, q * (t - s)).sum(-1) * LN2) if want_kl else None
    if not keep_codes:
        return tvd, None, kl, None
    codes = jnp.pad(signs.astype(jnp.int8), ((0, 0), (0, s.shape[1] // 2)))
    return tvd, _selected(weights, (p * (1 - signs)).sum(-1)) + 0 * tvd, kl, codes


def logits_backward(
    logits: Any,
    other: Any,
    rows: Any,
    other_rows: Any,
    kl: Any,
    tvd_upstream: Any,
    lse_upstream: Any,
    kl_upstream: Any,
    target_upstream: Any,
    targets: Any,
    codes: Any,
    weights: Any,
    *,
    temperature: float,
    is_student: bool,
):
    def softmax(x: Any, of: Any) -> Any:
        return jnp.exp2(_base_2(weights, x, temperature) - of[0][:, None]) * of[1][:, None]

    p = softmax(logits, rows)
    half = (0.5 if is_student else -0.5) * tvd_upstream
    dx = half[:, None] * p * (codes[:, : logits.shape[1]] - 1 + rows[2][:, None])
    if lse_upstream is not None:
        dx = dx + lse_upstream[:, None] * p
    if kl_upstream is not None:
        q = softmax(other, other_rows)
        ratio = jnp.where(p == 0, 0, jnp.log(p / q))
        dx = dx + kl_upstream[:, None] * (p - q if is_student else p * (ratio - kl[:, None]))
    if target_upstream is not None:
        dx = dx + target_upstream[:, None] * jax.nn.one_hot(targets, logits.shape[1])
    return _selected(weights, dx / temperature).astype(logits.dtype)


@contextlib.contextmanager
def in_place_of_pallas() -> Iterator[None]:
    """Calls of implementation ``"pallas"`` run these."""
    ours = {"forward": forward, "backward": backward, "reduce": reduce}
    of_logits = {
        "logits_forward": logits_forward,
        "logits_statistics": logits_statistics,
        "logits_differences": logits_differences,
        "logits_backward": logits_backward,
    }
    with (
        compat.assume_cuda(),
        mock.patch.multiple(pallas_kernels, **ours),
        mock.patch.multiple(logits_pallas, **of_logits),
    ):
        yield
