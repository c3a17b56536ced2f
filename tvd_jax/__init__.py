"""Total variation distance loss for JAX, value and gradient, as Pallas or Triton kernels."""

from tvd_core import __version__
from tvd_jax.from_logits import (
    TVDStats,
    acceptance_loss,
    cross_entropy_tvd_loss,
    hybrid_loss,
    tvd_from_logits,
)
from tvd_jax.loss import available_implementations, tvd_loss

__all__ = [
    "TVDStats",
    "__version__",
    "acceptance_loss",
    "available_implementations",
    "cross_entropy_tvd_loss",
    "hybrid_loss",
    "tvd_from_logits",
    "tvd_loss",
]
