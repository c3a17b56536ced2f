"""What is right: a float64 oracle, and a NumPy model of the kernels' bits. For tests and benches.

The product code never imports this module.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tvd_core.contract import LANES, TILE, code_tiles

FloatArray = NDArray[np.floating]


def _kept_weights(
    leading_shape: tuple[int, ...],
    labels: ArrayLike | None,
    ignore_index: int,
    weights: ArrayLike | None,
) -> NDArray[np.float64]:
    """Weight of each token, exactly 0 for an ignored one."""
    kept = np.ones(leading_shape) if weights is None else np.asarray(weights, np.float64)
    if labels is not None:
        kept = np.where(np.asarray(labels).astype(object) == ignore_index, 0.0, kept)
    return kept


def _divisor(
    kept: NDArray[np.float64], vocab: int, reduction: str, normalizer: float | None
) -> float:
    if reduction not in ("batchmean", "mean"):
        return 1.0
    divisor = float(kept.sum()) if normalizer is None else float(normalizer)
    return divisor * vocab if reduction == "mean" else divisor


def tvd_reference(
    p: ArrayLike,
    q: ArrayLike,
    labels: ArrayLike | None = None,
    *,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: ArrayLike | None = None,
    normalizer: float | None = None,
) -> Any:
    """Total variation distance loss in float64; the arguments of ``tvd_loss``, as NumPy arrays.

    ``0.5 * sum_v |p_v - q_v|`` per token, ignored tokens selected away, then the reduction.
    """
    p64, q64 = np.asarray(p, np.float64), np.asarray(q, np.float64)
    kept = _kept_weights(p64.shape[:-1], labels, ignore_index, weights)
    with np.errstate(invalid="ignore"):
        elementwise = 0.5 * np.abs(p64 - q64)
        if reduction == "none":
            return np.where(kept[..., None] == 0, 0.0, elementwise * kept[..., None])
        per_token = np.where(kept == 0, 0.0, elementwise.sum(-1) * kept)
    if reduction == "per_token":
        return per_token
    total, divisor = per_token.sum(), _divisor(kept, p64.shape[-1], reduction, normalizer)
    # 0 / 0 counts as 0: with no token kept the loss is 0.
    return np.float64(0.0) if total == divisor == 0 else total / divisor


def tvd_reference_grad(
    p: ArrayLike,
    q: ArrayLike,
    labels: ArrayLike | None = None,
    *,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: ArrayLike | None = None,
    normalizer: float | None = None,
    upstream: ArrayLike = 1.0,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Gradients ``(dp, dq)`` of ``upstream * loss``, float64; sign(0) = 0, sign(NaN) = NaN."""
    p64, q64 = np.asarray(p, np.float64), np.asarray(q, np.float64)
    kept = _kept_weights(p64.shape[:-1], labels, ignore_index, weights)
    scale = np.asarray(upstream, np.float64)
    if reduction == "per_token":
        scale = scale[..., None] if scale.ndim else scale
    with np.errstate(invalid="ignore", divide="ignore"):
        if reduction not in ("none", "per_token"):
            scale = scale / _divisor(kept, p64.shape[-1], reduction, normalizer)
        gradient = 0.5 * np.sign(p64 - q64) * scale * kept[..., None]
    gradient = np.where(kept[..., None] == 0, 0.0, gradient)
    return gradient, -gradient


class LogitsRows(NamedTuple):
    """What the rows of logits come to, float64, each of the leading shape."""

    tvd: NDArray[np.float64]
    student_lse: NDArray[np.float64]
    teacher_lse: NDArray[np.float64]
    kl: NDArray[np.float64]


def log_softmax_reference(
    logits: ArrayLike, temperature: float = 1.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """``log softmax(logits / temperature)`` and the log-sum-exp of each row, float64."""
    x = np.asarray(logits, np.float64) / temperature
    with np.errstate(invalid="ignore", divide="ignore"):
        top = x.max(-1, keepdims=True)
        lse = top + np.log(np.exp(x - top).sum(-1, keepdims=True))
        return x - lse, lse[..., 0]


def logits_rows_reference(
    student_logits: ArrayLike, teacher_logits: ArrayLike, *, temperature: float = 1.0
) -> LogitsRows:
    """TVD, log-sum-exp of both, and ``KL(teacher || student)`` of each row."""
    log_p, student_lse = log_softmax_reference(student_logits, temperature)
    log_q, teacher_lse = log_softmax_reference(teacher_logits, temperature)
    q = np.exp(log_q)
    with np.errstate(invalid="ignore"):
        tvd = 0.5 * np.abs(np.exp(log_p) - q).sum(-1)
        kl = np.where(q == 0, 0.0, q * (log_q - log_p)).sum(-1)
    return LogitsRows(tvd, student_lse, teacher_lse, kl)


def logits_rows_grad_reference(
    student_logits: ArrayLike,
    teacher_logits: ArrayLike,
    *,
    temperature: float = 1.0,
    tvd: ArrayLike = 0.0,
    student_lse: ArrayLike = 0.0,
    teacher_lse: ArrayLike = 0.0,
    kl: ArrayLike = 0.0,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Gradients of the logits from the upstream gradients of the rows' values, one a token."""
    log_p, _ = log_softmax_reference(student_logits, temperature)
    log_q, _ = log_softmax_reference(teacher_logits, temperature)
    p, q = np.exp(log_p), np.exp(log_q)
    with np.errstate(invalid="ignore"):
        signs = np.sign(p - q)
        log_ratio = np.where(q == 0, 0.0, log_q - log_p)
        divergence = (q * log_ratio).sum(-1, keepdims=True)
        per_tvd, per_s, per_t, per_kl = (
            np.asarray(x, np.float64)[..., None] for x in (tvd, student_lse, teacher_lse, kl)
        )
        ds = 0.5 * per_tvd * p * (signs - (p * signs).sum(-1, keepdims=True))
        ds = ds + per_s * p + per_kl * (p - q)
        dt = -0.5 * per_tvd * q * (signs - (q * signs).sum(-1, keepdims=True))
        dt = dt + per_t * q
        # Where nothing asks for it, a divergence that is infinite has no say.
        dt = dt + np.where(per_kl == 0, 0.0, per_kl * q * (log_ratio - divergence))
    return ds / temperature, dt / temperature


def logits_reference(
    student_logits: ArrayLike,
    teacher_logits: ArrayLike,
    labels: ArrayLike | None = None,
    *,
    temperature: float = 1.0,
    **options: Any,
) -> Any:
    """``tvd_from_logits`` in float64: ``tvd_reference`` of the two softmaxes."""
    p, q = (
        np.exp(log_softmax_reference(x, temperature)[0]) for x in (student_logits, teacher_logits)
    )
    return tvd_reference(p, q, labels, **options)


def logits_reference_grad(
    student_logits: ArrayLike,
    teacher_logits: ArrayLike,
    labels: ArrayLike | None = None,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    weights: ArrayLike | None = None,
    **options: Any,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Gradients ``(dstudent, dteacher)`` of ``upstream * loss``, float64."""
    kept = _kept_weights(np.shape(student_logits)[:-1], labels, ignore_index, weights)
    p, q = (
        np.exp(log_softmax_reference(x, temperature)[0]) for x in (student_logits, teacher_logits)
    )
    through_p, through_q = tvd_reference_grad(
        p, q, labels, ignore_index=ignore_index, weights=weights, **options
    )

    def chain(x: NDArray[np.float64], upstream: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(invalid="ignore"):
            gradient = x * (upstream - (x * upstream).sum(-1, keepdims=True)) / temperature
        return np.where(kept[..., None] == 0, 0.0, gradient)

    return chain(p, through_p), chain(q, through_q)


def token_scale_reference(
    leading_shape: tuple[int, ...],
    vocab: int,
    labels: ArrayLike | None = None,
    *,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: ArrayLike | None = None,
    normalizer: float | None = None,
) -> NDArray[np.float64]:
    """What the reduction multiplies the value of each token with."""
    kept = _kept_weights(leading_shape, labels, ignore_index, weights)
    return kept / _divisor(kept, vocab, reduction, normalizer)


def _sum_lanes(acc: NDArray[np.float32]) -> NDArray[np.float32]:
    """Adds ``LANES`` lanes in the contract's order: 4 in sequence, then adjacent pairs."""
    x = acc.reshape(*acc.shape[:-1], LANES // 4, 4)
    s = ((x[..., 0] + x[..., 1]) + x[..., 2]) + x[..., 3]
    while s.shape[-1] > 1:
        s = s[..., 0::2] + s[..., 1::2]
    return s[..., 0]


def _accumulate(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Lane ``j`` adds elements ``j, j + LANES, ...`` of the last axis in order, in float32."""
    acc = np.zeros((*values.shape[:-1], LANES), np.float32)
    for start in range(0, values.shape[-1], LANES):
        part = values[..., start : start + LANES]
        acc[..., : part.shape[-1]] += part
    return acc


def per_token_float32(p: ArrayLike, q: ArrayLike) -> NDArray[np.float32]:
    """The kernels' per-token values bit for bit: NumPy model of the summation order of a row."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(np.asarray(p, np.float32) - np.asarray(q, np.float32))
        return _sum_lanes(_accumulate(difference)) * np.float32(0.5)


def reduce_float32(values: ArrayLike) -> Any:
    """The kernels' sum over tokens bit for bit: the order of a row, applied to the tokens."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _sum_lanes(_accumulate(np.asarray(values, np.float32).reshape(-1)))


def sign_codes(p: ArrayLike, q: ArrayLike) -> Any:
    """One code per element: 0 equal, 1 ``p > q``, 2 ``p < q``, 3 NaN (``inf - inf`` included)."""
    with np.errstate(invalid="ignore"):
        d = np.asarray(p, np.float32) - np.asarray(q, np.float32)
    return np.select([d > 0, d < 0, d == 0], [1, 2, 0], 3).astype(np.uint8)


def pack_codes(p: ArrayLike, q: ArrayLike) -> Any:
    """Packed sign codes ``[tokens, tiles * LANES]`` of ``p, q [tokens, vocab]``.

    Byte ``j`` of a tile of ``TILE`` elements holds elements ``j``, ``j + LANES``, ``j + 2 LANES``,
    ``j + 3 LANES`` in bits 0-1, 2-3, 4-5, 6-7; what lies beyond the row is 0.
    """
    codes = sign_codes(p, q)
    tokens, vocab = codes.shape
    tiles = code_tiles(vocab)
    padded = np.pad(codes, ((0, 0), (0, tiles * TILE - vocab))).reshape(tokens, tiles, 4, LANES)
    packed = (
        padded[:, :, 0] | (padded[:, :, 1] << 2) | (padded[:, :, 2] << 4) | (padded[:, :, 3] << 6)
    )
    return packed.reshape(tokens, tiles * LANES)


def unpack_codes(packed: ArrayLike, vocab: int) -> Any:
    """Inverse of ``pack_codes``: ``[tokens, vocab]``, one code per element."""
    tiles = np.asarray(packed, np.uint8).reshape(-1, code_tiles(vocab), 1, LANES)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    return ((tiles >> shifts) & 3).reshape(tiles.shape[0], -1)[:, :vocab]
