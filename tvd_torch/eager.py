"""The eager implementation: the readable definition, and a row-blocked form for CPUs."""

from typing import Any

import torch
from torch import Tensor

# Elements per block of rows: |p - q| of a block (4 MiB) stays in the cache, and a small vocabulary
# does not make a loop over tokens. float32 on 2 CPU cores, ms for the forward and with gradient:
#   tokens x vocab      2**17      2**20      2**21    16 rows   one-line formula
#   2**20 x 4           4, 11      4, 11      4, 11  678, 2770               5, 7
#   4096 x 32768      58, 419    31, 373    47, 397    42, 361           318, 621
#   512 x 151936      31, 228    18, 196    20, 204    18, 201           184, 355
BLOCK_ELEMENTS = 2**20


def accumulation_dtype(p: Tensor, q: Tensor) -> torch.dtype:
    """float32, or float64 if either input is."""
    return torch.float64 if torch.float64 in (p.dtype, q.dtype) else torch.float32


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation has a say, which autograd would hear.

    Private names: where a version of PyTorch has others, every call counts as transformed.
    """
    active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
    return forward_mode() or active()


def forward_mode() -> bool:
    """Whether there are dual numbers."""
    return getattr(torch.autograd.forward_ad, "_current_level", 0) >= 0


def sign(d: Tensor) -> Tensor:
    """Sign with sign(0) = 0 and sign(NaN) = NaN; ``torch.sign(NaN)`` is 0."""
    return torch.where(d.isnan(), d, torch.sign(d))


def masked_difference(p: Tensor, q: Tensor, kept: Tensor | None) -> Tensor:
    """|p - q|, 0 in rows that are not kept: the definition, for torch's own autograd.

    The rows are selected before the difference, so that the gradient is selected too and a NaN in
    an ignored row stays out of it. ``d * sign(d)`` because ``torch.abs`` gives NaN the gradient 0.
    """
    dtype = accumulation_dtype(p, q)
    p, q = p.to(dtype), q.to(dtype)
    if kept is not None:
        p, q = (torch.where(kept[..., None], x, 0.0) for x in (p, q))
    d = p - q
    return d * sign(d.detach())


def per_token(p: Tensor, q: Tensor, kept: Tensor | None) -> Tensor:
    """``0.5 * sum_v |p - q|`` per token, 0 for one that is not kept."""
    if p.is_cpu and not torch.compiler.is_compiling() and not transformed():
        if torch.is_grad_enabled() and (p.requires_grad or q.requires_grad):
            p, q = saveable(p), saveable(q)
        rows: Tensor = _BlockedRows.apply(p, q, kept)
        return rows
    return 0.5 * masked_difference(p, q, kept).sum(-1)


def reduce_tokens(
    per_token: Tensor,
    row_weights: Tensor | None,
    normalizer: Tensor | float | None,
    reduction: str,
    vocab: int,
) -> Tensor:
    """``per_token`` times the weights, and what the reduction makes of it; any but ``none``."""
    if row_weights is not None:
        per_token = per_token * row_weights
    if reduction == "per_token":
        return per_token
    return reduced(per_token, row_weights, normalizer, reduction, vocab)


def reduced(
    per_token: Tensor,
    row_weights: Tensor | None,
    normalizer: Tensor | float | None,
    reduction: str,
    vocab: int,
) -> Tensor:
    """The sum of values that have the weights in them, over the divisor of the reduction."""
    total = per_token.sum()
    if reduction == "sum":
        return total
    dtype, device = per_token.dtype, per_token.device
    if normalizer is not None:
        divisor = torch.as_tensor(normalizer, dtype=dtype, device=device)
    elif row_weights is not None:
        divisor = row_weights.sum()
    else:
        divisor = torch.full((), per_token.numel(), dtype=dtype, device=device)
    if reduction == "mean":
        divisor = divisor * vocab
    return divided(total, divisor)


def divided(total: Tensor, divisor: Tensor) -> Tensor:
    """``total / divisor``, where 0 / 0 counts as 0.

    With no token kept the loss is 0, and stays attached. A total that is 0 for another reason keeps
    its divisor, which the gradient needs.
    """
    nothing = (total == 0) & (divisor == 0)
    return total / torch.where(nothing, torch.ones_like(divisor), divisor)


def saveable(x: Tensor) -> Tensor:
    """``x``, or a copy if it was made in inference mode: PyTorch saves no such tensor."""
    if torch.compiler.is_compiling() or not x.is_inference():  # Dynamo cannot ask the latter
        return x
    return x.clone()


def _rows(x: Tensor) -> Tensor:
    """``[tokens, vocab]``; ``reshape(-1, vocab)`` could not tell the tokens if there are none."""
    return x.reshape(x.numel() // x.shape[-1], x.shape[-1])


def _blocks(x: Tensor) -> list[slice]:
    """Blocks of the rows of ``x [tokens, vocab]``."""
    rows = max(1, BLOCK_ELEMENTS // x.shape[1])
    return [slice(start, start + rows) for start in range(0, x.shape[0], rows)]


class _BlockedRows(torch.autograd.Function):
    """``per_token`` by blocks of rows that stay in the cache. Keeps p and q, not a gradient."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, q: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(p, q, kept)
        dtype = accumulation_dtype(p, q)
        p2, q2 = _rows(p), _rows(q)
        values = torch.empty(p2.shape[0], dtype=dtype, device=p.device)
        for rows in _blocks(p2):
            difference = p2[rows].to(dtype) - q2[rows].to(dtype)
            torch.sum(difference.abs_(), -1, out=values[rows])
        values = values.mul_(0.5).reshape(p.shape[:-1])
        return values if kept is None else torch.where(kept, values, 0.0)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        p, q, kept = ctx.saved_tensors
        want_p, want_q, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True: differentiable in the upstream gradient
            dp, dq = _definition_gradients(p, q, kept, upstream)
            return dp if want_p else None, dq if want_q else None, None
        return *_blocked_gradients(p, q, kept, upstream, (want_p, want_q)), None


def _definition_gradients(
    p: Tensor, q: Tensor, kept: Tensor | None, upstream: Tensor
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(p, q)
    d = p.detach().to(dtype) - q.detach().to(dtype)
    if kept is not None:
        # Both factors, so that a NaN in either stays out of this and out of its derivative.
        d, upstream = torch.where(kept[..., None], d, 0.0), torch.where(kept, upstream, 0.0)
    gradient = 0.5 * sign(d) * upstream[..., None]
    return gradient.to(p.dtype), (-gradient).to(q.dtype)


def _blocked_gradients(
    p: Tensor, q: Tensor, kept: Tensor | None, upstream: Tensor, want: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    dp = torch.empty(p.shape, dtype=p.dtype, device=p.device) if want[0] else None
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if want[1] else None
    p2, q2, scales = _rows(p), _rows(q), upstream.reshape(-1)
    for rows in _blocks(p2):
        block_kept = None if kept is None else kept.reshape(-1)[rows]
        block = _definition_gradients(p2[rows], q2[rows], block_kept, scales[rows])
        for gradient, values in zip((dp, dq), block, strict=True):
            if gradient is not None:
                _rows(gradient)[rows] = values
    return dp, dq
