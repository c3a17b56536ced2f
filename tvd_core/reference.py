"""What is right: a float64 oracle, and a NumPy model of the kernels' bits. For tests and benches.

The product code never imports this module.
"""

from typing import Any

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
