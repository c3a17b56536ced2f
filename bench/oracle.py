"""What a candidate must compute before it is timed, in float64."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import inputs
from bench.shapes import LOGITS, Shape
from tvd_core.reference import tvd_reference_grad

PROJECT = ("torch-triton", "torch-eager", "jax-pallas", "jax-triton", "jax-xla")
# Relative error of the loss above which a candidate is wrong. The project's own accumulate in
# float32 whatever the input. Peers may compute in its dtype (8 or 11 bits of significand), but
# from logits all take float32 softmaxes.
PROJECT_LOSS_TOLERANCE = 1e-5
PEER_LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
PEER_LOGITS_TOLERANCE = 1e-4
# A gradient of p has one value up to its sign, rounded once (twice by some peers).
GRAD_TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-9}
# Below 2^-14 float16 loses bits: half its smallest step is the unavoidable absolute error.
GRAD_ABSOLUTE = {"float32": 0.0, "bfloat16": 0.0, "float16": 2.0**-24}
# Relative error of a probability by float32 logits, exponentials and sums: a logit 30 below the
# row's log-sum-exp is off by 30 * 2^-24 = 2e-6, PyTorch's softmax on a CPU by 2e-5 at 50257.
PROBABILITY_TOLERANCE = 1e-4


class Wrong(RuntimeError):
    """A candidate's loss or gradient is not the oracle's."""


def loss_tolerance(implementation: str, shape: Shape) -> float:
    if implementation in PROJECT:
        return PROJECT_LOSS_TOLERANCE
    return PEER_LOGITS_TOLERANCE if shape.op == LOGITS else PEER_LOSS_TOLERANCE[shape.dtype]


def logits_gradient(
    student: NDArray[np.float64], teacher: NDArray[np.float64], normalizer: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Gradient of the student's logits, and its error in float32 arithmetic.

    ``0.5 * p * (sign(p - q) - sum(p * sign(p - q))) / normalizer``. Where float32 cannot tell p
    from q the sign may be any, there and in the row's sum.
    """
    p, q = (softmax(x) for x in (student, teacher))
    dp, _ = tvd_reference_grad(p, q, normalizer=normalizer)
    gradient = p * (dp - (p * dp).sum(-1, keepdims=True))
    close = np.abs(p - q) <= 2 * PROBABILITY_TOLERANCE * np.maximum(p, q)
    row = PROBABILITY_TOLERANCE + (p * close).sum(-1, keepdims=True)
    return gradient, p / normalizer * (close + row)


def softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


class Oracle:
    """float64 loss of one set of inputs, and gradients of a sample of its rows."""

    def __init__(self, backend: Any, shape: Shape, p: Any, q: Any) -> None:
        self.shape = shape
        self._backend = backend
        self._rows = inputs.sample_rows(shape.tokens)
        self.loss = float(backend.oracle_per_token(p, q, shape.op).mean())
        p_rows, q_rows = (backend.rows(x, self._rows) for x in (p, q))
        self._error: Any = 0.0
        if shape.op == LOGITS:
            self._gradient, self._error = logits_gradient(p_rows, q_rows, shape.tokens)
        else:
            self._gradient, _ = tvd_reference_grad(p_rows, q_rows, normalizer=shape.tokens)

    def check(self, implementation: str, result: tuple[Any, Any], upstream: float) -> float | None:
        """Relative error of the loss (``None`` for a phase without one); raises Wrong."""
        loss, gradient = result
        dtype = self.shape.dtype
        error = None
        if loss is not None:
            error = abs(self._backend.scalar(loss) - self.loss) / abs(self.loss)
            tolerance = loss_tolerance(implementation, self.shape)
            if not error <= tolerance:
                raise Wrong(f"relative error of the loss {error:.2e}, more than {tolerance:.0e}")
        if gradient is not None:
            if tuple(gradient.shape) != (self.shape.tokens, self.shape.vocab):
                raise Wrong(f"gradient has shape {tuple(gradient.shape)}")
            got = self._backend.rows(gradient, self._rows)
            expected = self._gradient * upstream
            allowed = np.abs(expected) * GRAD_TOLERANCE[dtype] + GRAD_ABSOLUTE[dtype]
            allowed = allowed + abs(upstream) * self._error
            bad = ~(np.abs(got - expected) <= allowed)
            if bad.any():
                row, column = np.argwhere(bad)[0]
                raise Wrong(
                    f"gradient[{self._rows[row]}, {column}] is {got[row, column]:.6g}, expected "
                    f"{expected[row, column]:.6g} ({bad.sum()} wrong in {len(bad)} rows)"
                )
        return error
