"""Inputs and error budgets of the losses from logits: derived from roundings, never tuned.

Let u = 2**-24, z = (x - max x) / T, and p = exp(z) / sum exp(z). The logits are the same numbers
for the oracle and for every route.

Probability. z takes three roundings (difference, scale, product), each u |z| of it, which its
exponential turns into a relative error; the exponential is off by 2 units in the last place at most
(CUDA's ex2.approx; the others are better), 4 u. The sum has the errors of its terms, weighted with
p, and those of its additions; the division one more. Relative error of p, called d_p below:

    d_p = u * (3 |z| + 3 sum_v p |z| + 4 + 4 + additions + 1)

A number below the smallest normal one may be taken for 0: 2**-126 absolute, for each.

Distance. Each |p - q| is off by at most p d_p + q d_q, which is absolute: near p = q no formula on
float32 softmaxes does better. The sum of them adds relative errors of its own.

Log-sum-exp. log turns the sum's relative error into an absolute one; max / T and log are rounded.

Gradient of the distance, p * (sign - sum_v p * sign) / (2 T): d_p relative; the sum over the signs
has the errors of its terms and additions; and where |p - q| is within its error the sign may be
any, in its own element (2 p) and in the sum of the row (2 p, added up over such elements).
"""

import dataclasses
from typing import Any

import numpy as np

from parity_tests import inputs
from parity_tests.budget import SECOND_ORDER, U32, _check, _spacing, additions
from parity_tests.routes import Route
from tvd_core.reference import LogitsRows, log_softmax_reference, logits_rows_reference

TINY = 2.0**-126
EXP, LOG = 4, 4  # units of u


def logits(
    tokens: int,
    vocab: int,
    s_dtype: str = "float32",
    t_dtype: str | None = None,
    *,
    masked: float = 0.1,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a teacher and a student near it; some equal, some -inf, but not the first."""
    rng = np.random.default_rng([seed, tokens, vocab, 11])
    teacher = 3.0 * rng.standard_normal((tokens, vocab))
    student = teacher + rng.standard_normal((tokens, vocab))
    student = np.where(rng.random((tokens, vocab)) < 0.1, teacher, student)
    for x in (student, teacher):
        x[:, 1:][rng.random((tokens, vocab - 1)) < masked] = -np.inf
    return inputs.cast(student, s_dtype), inputs.cast(teacher, t_dtype or s_dtype)


@dataclasses.dataclass(frozen=True)
class _Softmax:
    """A float64 softmax and the errors that float32 may make in it."""

    p: np.ndarray
    log_p: np.ndarray
    error: np.ndarray
    """Absolute, of ``p``."""
    log_error: np.ndarray
    """Absolute, of ``log p`` where ``p`` is not 0."""
    lse_error: np.ndarray


def _softmax(x: np.ndarray, temperature: float) -> _Softmax:
    log_p, lse = log_softmax_reference(x, temperature)
    p = np.exp(log_p)
    with np.errstate(invalid="ignore"):
        top = np.asarray(x, np.float64).max(-1, keepdims=True) / temperature
        z = np.where(p == 0, 0.0, np.abs(np.asarray(x, np.float64) / temperature - top))
        log_total = lse[..., None] - top
    mean_z = (p * z).sum(-1, keepdims=True)
    summed = U32 * (3 * mean_z + EXP + additions(x.shape[-1]))
    log_error = summed + U32 * (3 * z + LOG * np.abs(log_total))
    log_error = log_error + U32 * np.where(p == 0, 0.0, np.abs(log_p))
    lse_error = summed + U32 * (LOG * np.abs(log_total) + 3 * np.abs(top))
    lse_error = lse_error[..., 0] + U32 * np.abs(lse)
    relative = SECOND_ORDER * (summed + U32 * (3 * z + EXP + 1))
    return _Softmax(p, log_p, p * relative + TINY * (p > 0), log_error, lse_error)


@dataclasses.dataclass(frozen=True)
class Budget:
    """The oracle's values of rows, and how far float32 may be from them and their gradients."""

    rows: LogitsRows
    errors: LogitsRows
    student: _Softmax
    teacher: _Softmax
    temperature: float

    def gradients(
        self,
        relative: np.ndarray,
        *,
        tvd: Any = 0.0,
        student_lse: Any = 0.0,
        teacher_lse: Any = 0.0,
        kl: Any = 0.0,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Errors of both gradients; ``relative``: of the upstream gradients, one a token."""
        p, q = self.student, self.teacher
        tvd, s_lse, t_lse, kl, relative = (
            np.broadcast_to(np.abs(np.asarray(x, np.float64)), self.rows.tvd.shape)[..., None]
            for x in (tvd, student_lse, teacher_lse, kl, relative)
        )
        relative = relative + 4 * U32
        unsure = np.abs(p.p - q.p) <= p.error + q.error
        signs = np.sign(p.p - q.p)

        def of_distance(x: _Softmax) -> np.ndarray:
            factor = np.abs(signs - (x.p * signs).sum(-1, keepdims=True))
            row = x.error.sum(-1, keepdims=True) + 2 * (x.p * unsure).sum(-1, keepdims=True)
            row = row + U32 * (additions(x.p.shape[-1]) + 4)
            return 0.5 * (factor * (x.error + relative * x.p) + x.p * (row + 2 * unsure))

        ds = tvd * of_distance(p) + s_lse * (p.error + relative * p.p)
        ds = ds + kl * (p.error + q.error + relative * np.abs(p.p - q.p))
        dt = tvd * of_distance(q) + t_lse * (q.error + relative * q.p)
        if kl.any():
            ratio = np.where(q.p == 0, 0.0, q.log_p - p.log_p)
            away = np.abs(ratio - (q.p * ratio).sum(-1, keepdims=True))
            off = p.log_error + q.log_error + self.errors.kl[..., None]
            dt = dt + kl * (away * (q.error + relative * q.p) + q.p * off)
        # Products on the way are flushed to 0 below TINY, before another factor or before 1 / T.
        flushed = 2 * TINY * (1 + tvd + s_lse + t_lse + kl)
        ds, dt = ds + flushed * (p.p > 0), dt + flushed * (q.p > 0)
        nothing = (tvd + s_lse + t_lse + kl) == 0
        ds, dt = (np.where(nothing, 0.0, x) for x in (ds, dt))
        return ds / self.temperature, dt / self.temperature


def budget_of(student: np.ndarray, teacher: np.ndarray, temperature: float) -> Budget:
    """Budget of rows that hold no NaN."""
    rows = logits_rows_reference(student, teacher, temperature=temperature)
    p, q = _softmax(student, temperature), _softmax(teacher, temperature)
    adding = U32 * (additions(student.shape[-1]) + 2)
    tvd = 0.5 * (p.error + q.error).sum(-1) + adding * rows.tvd
    with np.errstate(invalid="ignore"):
        ratio = np.where(q.p == 0, 0.0, q.log_p - p.log_p)
        kl = (q.p * (p.log_error + q.log_error)).sum(-1)
        kl = kl + (np.abs(ratio) * (q.error + adding * q.p)).sum(-1)
    errors = LogitsRows(tvd, p.lse_error, q.lse_error, kl)
    return Budget(rows, errors, p, q, temperature)


def check_values(name: str, actual: np.ndarray, expected: Any, error: Any) -> None:
    """float32 values inside ``error``, which says nothing of the rounding of the result."""
    assert actual.dtype == np.float32, f"{name} is {actual.dtype}"
    expected = np.asarray(expected, np.float64)
    _check(name, actual, expected, np.asarray(error) + U32 * np.abs(expected) + TINY)


def check_gradient(
    name: str, actual: np.ndarray, expected: np.ndarray, error: np.ndarray, *, route: Route
) -> None:
    """Inside ``error`` and the rounding to the dtype of the input."""
    # Of an ignored token, of a masked element, or of a row whose upstream gradient is 0.
    certain = (expected == 0) & (error == 0)
    rounding = 0.5 * _spacing(expected, actual.dtype)
    if (route.name, route.interpreted) == ("torch-triton", True):
        # Triton's interpreter truncates float32 to bfloat16; a GPU rounds to nearest.
        rounding *= 2.0
    _check(name, actual, expected, np.where(certain, 0.0, error + rounding + TINY))
