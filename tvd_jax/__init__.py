"""Total variation distance loss for JAX, value and gradient, as Pallas or Triton kernels."""

from tvd_core import __version__
from tvd_jax.loss import available_implementations, tvd_loss

__all__ = ["__version__", "available_implementations", "tvd_loss"]
