"""Random softmax rows that every framework makes bit for bit alike, on its own device.

``weight[t, v] = TABLE[hash32(t * vocab + v) >> 16]`` with a table of 65536 quantiles of
exp(standard normal) as integers, and ``p[t, v] = float32(weight) * (1 / sum of the row's
weights)``: a softmax of normal logits, quantised. Integer hashing, an integer row sum and one
float32 product have one right answer each, so PyTorch, XLA and NumPy agree without passing
gigabytes between processes; a checksum in every row of the results says that they did.

Logits are made the same way: ``teacher[t, v]`` is a normal quantile times TEACHER_SPREAD, and
``student = teacher + `` one times STUDENT_NOISE. All are multiples of LOGIT_STEP, so their sum is
exact, and rounding to the shape's dtype is the only rounding.
"""

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

TABLE_BITS = 16
# Row sums must stay below 2^32: 151936 * E[exp(normal)] * SCALE = 151936 * 1.65 * 8192 = 2.05e9.
# Weights stay below 2^24, so that float32 holds them exactly.
SCALE = 8192.0
MAX_VOCAB = 250_000
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)  # "lowbias32" integer hash
SEED = 20240
# Of language models' size: the likeliest token has 0.2 to 0.35, and an acceptance rate
# (1 - TVD) of 0.69.
TEACHER_SPREAD, STUDENT_NOISE = 4.0, 0.9
LOGIT_STEP = 2.0**-16

_MASK = 0xFFFFFFFF


def seed_of(seed: int, which: str) -> int:
    """32-bit offset of the hash for ``which`` ("p" or "q")."""
    return int(hash32(np.array([2 * seed + "pq".index(which) + 1], np.uint32))[0])


def hash32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The integer hash, in NumPy: the definition that the frameworks' versions repeat."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(MULTIPLIERS[0])
        x = (x ^ (x >> np.uint32(15))) * np.uint32(MULTIPLIERS[1])
        return x ^ (x >> np.uint32(16))


def _normal_quantiles() -> NDArray[np.float64]:
    # Every 64th quantile exactly, the ones between by interpolation: 1024 calls, not 65536.
    size, normal = 1 << TABLE_BITS, NormalDist()
    middles = (np.arange(size) + 0.5) / size
    knots = np.concatenate([middles[:64], middles[64:-64:64], middles[-64:]])
    return np.interp(middles, knots, [normal.inv_cdf(float(u)) for u in knots])


def weight_table() -> NDArray[np.int32]:
    """Quantiles of exp(standard normal), scaled to integers."""
    # Rounding to 16 bits of mantissa hides the last-bit differences between maths libraries.
    return np.rint(np.round(np.exp(_normal_quantiles()), 6) * SCALE).astype(np.int32)


def logit_table(spread: float) -> NDArray[np.float32]:
    """Quantiles of a normal distribution of that standard deviation, to LOGIT_STEP."""
    steps = np.rint(_normal_quantiles() * (spread / LOGIT_STEP))
    return (steps * LOGIT_STEP).astype(np.float32)


def reciprocal(row_sums: NDArray[np.uint32]) -> NDArray[np.float32]:
    """float32 reciprocals of the rows' sums, always computed by NumPy."""
    return (1.0 / row_sums.astype(np.float64)).astype(np.float32)


def numpy_weights(tokens: int, vocab: int, offset: int) -> NDArray[np.int32]:
    index = np.arange(tokens * vocab, dtype=np.uint64).reshape(tokens, vocab)
    hashed = hash32((index + offset).astype(np.uint32))
    return weight_table()[hashed >> np.uint32(32 - TABLE_BITS)]


def numpy_inputs(tokens: int, vocab: int, seed: int = SEED) -> tuple[NDArray, NDArray]:
    """``p, q`` float32 ``[tokens, vocab]``: the definition, for small shapes and tests."""
    if vocab > MAX_VOCAB:
        raise ValueError(f"vocab must be at most {MAX_VOCAB}, got {vocab}")
    made = []
    for which in "pq":
        weights = numpy_weights(tokens, vocab, seed_of(seed, which))
        scale = reciprocal(weights.sum(-1, dtype=np.uint64).astype(np.uint32))
        made.append(weights.astype(np.float32) * scale[:, None])
    return made[0], made[1]


def numpy_logits(tokens: int, vocab: int, seed: int = SEED) -> tuple[NDArray, NDArray]:
    """Student's and teacher's logits, float32 ``[tokens, vocab]``: the definition."""
    index = np.arange(tokens * vocab, dtype=np.uint64).reshape(tokens, vocab)
    noise, teacher = (
        logit_table(spread)[hash32((index + seed_of(seed, which)).astype(np.uint32)) >> 16]
        for which, spread in (("p", STUDENT_NOISE), ("q", TEACHER_SPREAD))
    )
    return teacher + noise, teacher


def numpy_checksum(x: NDArray) -> int:
    """Sum over elements of ``bits * (2 * flat index + 1)`` modulo 2^32."""
    bits = np.ascontiguousarray(x).view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])
    index = np.arange(bits.size, dtype=np.uint64)
    products = bits.reshape(-1).astype(np.uint64) * (2 * index + 1)
    return int((products & _MASK).sum() & _MASK)


def sample_rows(tokens: int) -> NDArray[np.int64]:
    """Rows whose gradient is compared with the oracle: the ends and a few between."""
    return np.unique(np.linspace(0, tokens - 1, num=min(tokens, 16)).round().astype(np.int64))
