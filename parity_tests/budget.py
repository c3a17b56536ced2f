"""Error budgets: how far from the float64 oracle a result may be, derived and never tuned.

Let u = 2**-24, the unit roundoff of float32. The inputs are the same numbers for the oracle and for
every route, so they add no error.

Value of a row: each |p - q| is one float32 subtraction, u relative. All terms are positive, so each
addition on the way to the sum adds at most u relative: vocab / 512 in a lane, 10 across the lanes.
The 0.5 is exact, the weight one more rounding. The same count for the sum over tokens, again for
the sum of the weights; then the factor vocab and the division. Eager PyTorch and XLA sum in orders
of their own; they get no larger budget.

A result below the smallest normal number is rounded to a multiple of 2**-149, whatever its size.
Sums and differences are such multiples already; the products of a token, by 0.5 and by its weight,
are off by at most 2**-150 each, and so is the division. (A sum of those is divided by at least half
as many: weights are 0, or 0.5 and more, where the inputs are so small.)

Gradient: +-0.5 * upstream / divisor * weight: the roundings of the divisor, of the division and of
the product in float32, then one rounding to the dtype of the input.
"""

import ml_dtypes
import numpy as np

from parity_tests.routes import Route

U32 = 2.0**-24
# Second-order terms: n * u is below 2e-5 everywhere here, so (1 + u)**n - 1 < 1.0001 * n * u.
SECOND_ORDER = 1.0001
BELOW_NORMAL = 2.0**-150


def additions(count: int) -> int:
    """Roundings on the longest path through the sum of ``count`` terms."""
    return -(-count // 512) + 10


def per_token_tolerance(vocab: int) -> float:
    """Relative; the weight's rounding included."""
    return SECOND_ORDER * U32 * (additions(vocab) + 2)


def loss_tolerance(tokens: int, vocab: int) -> float:
    """Relative; covers every reduction of positive weights."""
    return per_token_tolerance(vocab) + SECOND_ORDER * U32 * (2 * additions(tokens) + 2)


def _check(name: str, actual: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> None:
    actual64, expected64 = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual64.shape == expected64.shape, f"{name}: {actual64.shape}, not {expected64.shape}"
    np.testing.assert_array_equal(
        np.isnan(actual64), np.isnan(expected64), err_msg=f"{name}: where it is NaN"
    )
    with np.errstate(invalid="ignore"):
        error = np.where(actual64 == expected64, 0.0, np.abs(actual64 - expected64))
    allowed = np.where(np.isfinite(expected64), allowed, 0.0)
    bad = ~np.isnan(expected64) & ~(error <= allowed)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{name}{list(at)} is {actual64[at]!r}, the float64 oracle {expected64[at]!r}: "
            f"error {error[at]:.3e}, budget {allowed[at]:.3e}; "
            f"{int(bad.sum())} of {bad.size} values are outside"
        )


def check_loss(actual: np.ndarray, expected: np.ndarray, tokens: int, vocab: int) -> None:
    """Loss of any reduction, per-token and elementwise values included."""
    assert actual.dtype == np.float32, f"loss is {actual.dtype}"
    expected = np.asarray(expected, np.float64)
    relative = loss_tolerance(tokens, vocab) * np.abs(expected)
    _check("loss", actual, expected, relative + BELOW_NORMAL * (2 * tokens + 5))


def _spacing(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Distance between neighbours of ``dtype`` at the magnitude of float64 ``values``."""
    info = ml_dtypes.finfo(dtype)
    magnitude = np.maximum(np.abs(values), float(info.smallest_normal))
    with np.errstate(invalid="ignore"):
        return np.exp2(np.floor(np.log2(magnitude)) - info.nmant)


def check_gradient(
    name: str, actual: np.ndarray, expected: np.ndarray, tokens: int, *, route: Route
) -> None:
    """Gradient in its input's dtype; where the oracle has 0, it has to be 0."""
    scaling = SECOND_ORDER * U32 * (additions(tokens) + 4) * np.abs(expected)
    rounding = 0.5 * _spacing(expected, actual.dtype)
    if (route.name, route.interpreted) == ("torch-triton", True):
        # Triton's interpreter truncates float32 to bfloat16; a GPU rounds to nearest.
        rounding *= 2.0 if actual.dtype == ml_dtypes.bfloat16 else 1.0
    _check(name, actual, expected, np.where(expected == 0, 0.0, scaling + rounding))


def check_gradients(
    dp: np.ndarray | None,
    dq: np.ndarray | None,
    expected: tuple[np.ndarray, np.ndarray],
    tokens: int,
    *,
    route: Route,
) -> None:
    """Both gradients, where they were asked for."""
    for name, actual, right in (("dp", dp, expected[0]), ("dq", dq, expected[1])):
        if actual is not None:
            check_gradient(name, actual, right, tokens, route=route)
