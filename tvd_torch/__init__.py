"""Total variation distance loss for PyTorch, value and gradient, as Triton kernels."""

from tvd_core import __version__
from tvd_torch.from_logits import (
    TVDFromLogitsLoss,
    TVDStats,
    acceptance_loss,
    cross_entropy_tvd_loss,
    hybrid_loss,
    tvd_from_logits,
)
from tvd_torch.loss import TVDLoss, available_implementations, tvd_loss

__all__ = [
    "TVDFromLogitsLoss",
    "TVDLoss",
    "TVDStats",
    "__version__",
    "acceptance_loss",
    "available_implementations",
    "cross_entropy_tvd_loss",
    "hybrid_loss",
    "tvd_from_logits",
    "tvd_loss",
]
