"""The eager implementation of the losses from logits: the readable definition."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tvd_core.contract import logit_scale
from tvd_torch.eager import (
    accumulation_dtype,
    masked_difference,
    reduce_tokens,
    saveable,
    sign,
    transformed,
)

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
    function: Any = _Rows.apply
    if not torch.compiler.is_compiling() and transformed():
        from tvd_torch import transforms

        function = transforms.eager_rows
    tvd, student_lse, teacher_lse, kl, target_logit = function(
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
    p, q = (softmax(x, temperature)[0] for x in kept_rows(student, teacher, kept))
    values = 0.5 * masked_difference(p, q, kept)
    return values if row_weights is None else values * row_weights[:, None]


def kept_rows(student: Tensor, teacher: Tensor, kept: Tensor | None) -> list[Tensor]:
    """In the dtype of the sums; rows that are not kept are 0, whatever they hold."""
    dtype = accumulation_dtype(student, teacher)
    both = [x.to(dtype) for x in (student, teacher)]
    return both if kept is None else [torch.where(kept[:, None], x, 0.0) for x in both]


def exponentials(x: Tensor, scale: float, top: Tensor) -> tuple[Tensor, Tensor]:
    """``exp(z)`` and ``z = (x - top) * scale``.

    The maximum goes first: the scale then multiplies numbers from -inf to 0, so that nothing
    overflows, and an -inf stays one. A row without a finite maximum is NaN.
    """
    z = (x - top) * scale
    return torch.exp(z), z


def softmax(
    x: Tensor, temperature: float, top: Tensor | None = None, total: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``softmax(x / T)``, its logarithm, and the log-sum-exp of each row.

    ``top`` and ``total``, each ``[tokens, 1]``, are the maximum of a row and the sum of its
    exponentials; those of ``x``, unless it is a shard of the rows.
    """
    if top is None:
        top = x.detach().amax(-1, keepdim=True)
    scale = logit_scale(temperature)
    e, z = exponentials(x, scale, top)
    if total is None:
        total = e.sum(-1, keepdim=True)
    log_total = torch.log(total)
    return e / total, z - log_total, (top * scale + log_total)[:, 0]


def divergence(q: Tensor, log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """``q * (log q - log p)``, 0 where ``q`` is, and the factor in brackets."""
    ratio = torch.where(q == 0, 0.0, log_q - log_p)
    return q * ratio, ratio


def sums_by_sign(x: Tensor, signs: Tensor) -> list[Tensor]:
    """The parts of a row of probabilities where the sign is 1, 0 and -1."""
    return [torch.where(signs == sign, x, 0.0).sum(-1) for sign in (1, 0, -1)]


def _centred(x: Tensor, signs: Tensor, sums: Any) -> Tensor:
    """``x * (signs - sum_v x * signs)`` of a row of probabilities, with its ``sums_by_sign``.

    ``1 - (above - below)`` would lose what a peaked row leaves of it. ``above + level + below = 1``
    makes it ``level + 2 * below``, which cancels nothing.
    """
    above, level, below = sums
    factor = torch.where(signs == 0, below - above, signs)  # NaN stays
    factor = torch.where(signs > 0, level + 2 * below, factor)
    return x * torch.where(signs < 0, -level - 2 * above, factor)


class RowSums(NamedTuple):
    """What the gradient of a shard of rows needs to know of the whole rows."""

    top: Tensor
    """``[2, tokens, 1]``: the maximum of student and teacher."""
    total: Tensor
    """``[2, tokens, 1]``: the sums of their exponentials."""
    by_sign: Tensor
    """``[6, tokens, 1]``: ``sums_by_sign`` of both."""
    kl: Tensor | None
    """``[tokens]``: the divergence, if its gradient is wanted."""


def gradients(
    logits: tuple[Tensor, Tensor],
    kept: Tensor | None,
    targets: Tensor | None,
    temperature: float,
    upstreams: tuple[Any, ...],
    wanted: tuple[bool, ...],
    known: RowSums | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of both logits from those of ``Rows``, each if wanted; of the divergence if given.

    ``known`` is what the rows come to where these are shards of them.
    """
    s, t = kept_rows(*logits, kept)
    of_rows: Any = ((None, None),) * 2
    if known is not None:
        of_rows = zip(known.top, known.total, strict=True)
    (p, log_p, _), (q, log_q, _) = (
        softmax(x, temperature, *sums) for x, sums in zip((s, t), of_rows, strict=True)
    )
    columns: list[Any] = [None if x is None else x[:, None] for x in upstreams]
    tvd, student_lse, teacher_lse, kl, target_logit = columns
    signs = sign((p - q).detach())
    ds = dt = None
    if wanted[0]:
        sums = known.by_sign[:3] if known else [x[:, None] for x in sums_by_sign(p, signs)]
        ds = 0.5 * tvd * _centred(p, signs, sums) + student_lse * p
        if kl is not None:
            ds = ds + kl * (p - q)
        if targets is not None:
            ds = ds.scatter_add(-1, targets[:, None], target_logit)
        ds = _input_gradient(ds, kept, temperature, logits[0].dtype)
    if wanted[1]:
        sums = known.by_sign[3:] if known else [x[:, None] for x in sums_by_sign(q, -signs)]
        dt = 0.5 * tvd * _centred(q, -signs, sums) + teacher_lse * q
        if kl is not None:
            terms, ratio = divergence(q, log_q, log_p)
            whole = terms.sum(-1) if known is None or known.kl is None else known.kl
            dt = dt + kl * (q * ratio - q * whole[:, None])
        dt = _input_gradient(dt, kept, temperature, logits[1].dtype)
    return ds, dt


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
        return values(student, teacher, kept, targets, temperature, want_kl)

    @staticmethod
    def backward(ctx: Any, *upstreams: Any) -> tuple[Tensor | None, ...]:
        student, teacher, kept, targets = ctx.saved_tensors
        if not ctx.want_kl:
            upstreams = *upstreams[:3], None, upstreams[4]
        found = gradients(
            (student, teacher), kept, targets, ctx.temperature, upstreams, ctx.needs_input_grad[:2]
        )
        return *found, None, None, None, None


def values(
    student: Tensor,
    teacher: Tensor,
    kept: Tensor | None,
    targets: Tensor | None,
    temperature: float,
    want_kl: bool,
) -> tuple[Tensor | None, ...]:
    """The values of ``Rows``."""
    s, t = kept_rows(student, teacher, kept)
    (p, log_p, student_lse), (q, log_q, teacher_lse) = (softmax(x, temperature) for x in (s, t))
    found: list[Tensor | None] = [0.5 * (p - q).abs().sum(-1), student_lse, teacher_lse]
    found.append(divergence(q, log_q, log_p)[0].sum(-1) if want_kl else None)
    target_logit = None
    if targets is not None:
        target_logit = s.gather(-1, targets[:, None])[:, 0] * logit_scale(temperature)
    found.append(target_logit)
    if kept is None:
        return tuple(found)
    return tuple(None if x is None else torch.where(kept, x, 0.0) for x in found)


def _input_gradient(
    gradient: Tensor, kept: Tensor | None, temperature: float, dtype: torch.dtype
) -> Tensor:
    """By the chain rule through ``x / T``; selected, because 0 times an upstream may be NaN."""
    gradient = gradient * (1.0 / temperature)
    if kept is not None:
        gradient = torch.where(kept[:, None], gradient, 0.0)
    return gradient.to(dtype)
