"""Total variation distance loss for PyTorch, value and gradient, as Triton kernels."""

from tvd_core import __version__
from tvd_torch.loss import TVDLoss, available_implementations, tvd_loss

__all__ = ["TVDLoss", "__version__", "available_implementations", "tvd_loss"]
