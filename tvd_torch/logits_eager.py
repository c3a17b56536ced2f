"""The eager implementation of the losses from logits: the readable definition."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tvd_core.contract import logit_scale
from tvd_torch.eager import accumulation_dtype, masked_difference, reduce_tokens, saveable, sign

__all__ = ["Rows", "elementwise", "reduce_tokens", "rows"]


class Rows(NamedTuple):
    """What one pass over the logits gives for each token, ``[tokens]``; 0 for an ignored one."""

    tvd: Tensor
    """``0.5 * sum_v |p - q|`` of ``p = softmax(student / T)``, ``q = softmax(teacher / T)``."""
    student_lse: Tensor
    """``log(sum_v exp(student / T))``."""
    teacher_lse: Tensor
    """``log(sum_v exp(teacher / T))``."""
    kl: Tensor | None
    """``sum_v q * (log q - log p)``, if it was asked for."""
    target_logit: Tensor | None
    """``student / T`` at the target, if targets were given."""


def rows(
    student: Tensor,
    teacher: Tensor,
    row_weights: Tensor | None,
    temperature: float,
    *,
    want_kl: bool = False,
    targets: Tensor | None = None,
) -> Rows:
    """TVD, log-sum-exp, KL divergence and the target's logit of each row, differentiable in both.

    Args:
        student: ``[tokens, vocab]`` logits.
        teacher: ``[tokens, vocab]`` logits.
        row_weights: ``[tokens]``, 0 for an ignored token; only that is looked at.
        temperature: divides the logits.
        want_kl: whether the KL divergence is wanted.
        targets: ``[tokens]`` positions in the row, int64, each in the vocab.
    """
    kept = None if row_weights is None else row_weights != 0
    if torch.is_grad_enabled() and (student.requires_grad or teacher.requires_grad):
        student, teacher = saveable(student), saveable(teacher)
    tvd, student_lse, teacher_lse, kl, target_logit = _Rows.apply(
        student, teacher, kept, targets, temperature, want_kl
    )
    return Rows(
        tvd,
        student_lse,
        teacher_lse,
        kl if want_kl else None,
        None if targets is None else target_logit,
    )


def elementwise(
    student: Tensor, teacher: Tensor, row_weights: Tensor | None, temperature: float
) -> Tensor:
    """``0.5 * |p - q|`` of each element times its row's weight, for torch's own autograd."""
    kept = None if row_weights is None else row_weights != 0
    dtype = accumulation_dtype(student, teacher)
    p, q = (_softmax(_kept_rows(x, kept, dtype), temperature)[0] for x in (student, teacher))
    values = 0.5 * masked_difference(p, q, kept)
    return values if row_weights is None else values * row_weights[:, None]


def _kept_rows(x: Tensor, kept: Tensor | None, dtype: torch.dtype) -> Tensor:
    """In the dtype of the sums; rows that are not kept are 0, whatever they hold."""
    x = x.to(dtype)
    return x if kept is None else torch.where(kept[:, None], x, 0.0)


def _softmax(x: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """``softmax(x / T)``, its logarithm, and the log-sum-exp of each row.

    The maximum goes first: the scale then multiplies numbers from -inf to 0, so that nothing
    overflows, and an -inf stays one. A row without a finite maximum is NaN.
    """
    scale = logit_scale(temperature)
    top = x.detach().amax(-1, keepdim=True)
    z = (x - top) * scale
    e = torch.exp(z)
    total = e.sum(-1, keepdim=True)
    log_total = torch.log(total)
    return e / total, z - log_total, (top * scale + log_total)[:, 0]


def _divergence(q: Tensor, log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """``q * (log q - log p)``, 0 where ``q`` is, and the factor in brackets."""
    ratio = torch.where(q == 0, 0.0, log_q - log_p)
    return q * ratio, ratio


def _centred(x: Tensor, signs: Tensor) -> Tensor:
    """``x * (signs - sum_v x * signs)`` of a row of probabilities.

    ``1 - (above - below)`` would lose what a peaked row leaves of it. ``above + level + below = 1``
    makes it ``level + 2 * below``, which cancels nothing.
    """
    above = torch.where(signs > 0, x, 0.0).sum(-1, keepdim=True)
    below = torch.where(signs < 0, x, 0.0).sum(-1, keepdim=True)
    level = torch.where(signs == 0, x, 0.0).sum(-1, keepdim=True)
    factor = torch.where(signs == 0, below - above, signs)  # NaN stays
    factor = torch.where(signs > 0, level + 2 * below, factor)
    return x * torch.where(signs < 0, -level - 2 * above, factor)


class _Rows(torch.autograd.Function):
    """Keeps the logits as they came. Its backward can be differentiated by torch in its turn."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        kept: Tensor | None,
        targets: Tensor | None,
        temperature: float,
        want_kl: bool,
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(student, teacher, kept, targets)
        ctx.temperature, ctx.want_kl = temperature, want_kl
        dtype = accumulation_dtype(student, teacher)
        s, t = _kept_rows(student, kept, dtype), _kept_rows(teacher, kept, dtype)
        (p, log_p, student_lse), (q, log_q, teacher_lse) = (
            _softmax(x, temperature) for x in (s, t)
        )
        values: list[Tensor | None] = [0.5 * (p - q).abs().sum(-1), student_lse, teacher_lse]
        values.append(_divergence(q, log_q, log_p)[0].sum(-1) if want_kl else None)
        target_logit = None
        if targets is not None:
            target_logit = s.gather(-1, targets[:, None])[:, 0] * logit_scale(temperature)
        values.append(target_logit)
        if kept is None:
            return tuple(values)
        return tuple(None if x is None else torch.where(kept, x, 0.0) for x in values)

    @staticmethod
    def backward(ctx: Any, *upstreams: Any) -> tuple[Tensor | None, ...]:
        student, teacher, kept, targets = ctx.saved_tensors
        dtype = accumulation_dtype(student, teacher)
        s, t = _kept_rows(student, kept, dtype), _kept_rows(teacher, kept, dtype)
        (p, log_p, _), (q, log_q, _) = (_softmax(x, ctx.temperature) for x in (s, t))
        columns: list[Any] = [None if x is None else x[:, None] for x in upstreams]
        tvd, student_lse, teacher_lse, kl, target_logit = columns
        signs = sign((p - q).detach())
        ds = dt = None
        if ctx.needs_input_grad[0]:
            ds = 0.5 * tvd * _centred(p, signs) + student_lse * p
            if ctx.want_kl:
                ds = ds + kl * (p - q)
            if targets is not None:
                ds = ds.scatter_add(-1, targets[:, None], target_logit)
            ds = _input_gradient(ds, kept, ctx.temperature, student.dtype)
        if ctx.needs_input_grad[1]:
            dt = 0.5 * tvd * _centred(q, -signs) + teacher_lse * q
            if ctx.want_kl:
                terms, ratio = _divergence(q, log_q, log_p)
                dt = dt + kl * (q * ratio - q * terms.sum(-1, keepdim=True))
            dt = _input_gradient(dt, kept, ctx.temperature, teacher.dtype)
        return ds, dt, None, None, None, None


def _input_gradient(
    gradient: Tensor, kept: Tensor | None, temperature: float, dtype: torch.dtype
) -> Tensor:
    """By the chain rule through ``x / T``; selected, because 0 times an upstream may be NaN."""
    gradient = gradient * (1.0 / temperature)
    if kept is not None:
        gradient = torch.where(kept[:, None], gradient, 0.0)
    return gradient.to(dtype)
