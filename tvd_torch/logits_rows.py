"""The Triton kernels of the losses from logits under PyTorch's autograd.

They are operators of ``torch.library``, in eager mode too: what that costs, about 50 us of host
time a call, is little beside kernels of this kind.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tvd_core import config
from tvd_core.contract import (
    base_2_scale,
    logit_scale,
    no_compiled_forward_mode_message,
    no_second_derivative_message,
    no_second_derivative_of_shards_message,
)
from tvd_torch import eager, triton_launch
from tvd_torch.eager import forward_mode, saveable, transformed
from tvd_torch.logits_eager import Rows
from tvd_torch.sharded import all_reduced, sum_in_order, without_second_derivative


def rows(
    student: Tensor,
    teacher: Tensor,
    row_weights: Tensor | None,
    temperature: float,
    *,
    want_kl: bool = False,
    targets: Tensor | None = None,
) -> Rows:
    """See :func:`tvd_torch.logits_eager.rows`.

    Keeps the student's logits, codes and three numbers a row; the teacher's logits only for their
    own gradient or that of the KL divergence.
    """
    keep = torch.is_grad_enabled() and (student.requires_grad or teacher.requires_grad)
    if keep:  # PyTorch saves no tensor of inference mode
        if want_kl or teacher.requires_grad:
            student, teacher = saveable(student), saveable(teacher)
        row_weights = None if row_weights is None else saveable(row_weights)
        targets = None if targets is None else saveable(targets)
    arguments = (student, teacher, row_weights, targets, temperature, want_kl)
    if torch.compiler.is_compiling():
        if forward_mode():
            raise NotImplementedError(no_compiled_forward_mode_message("triton", "eager"))
        values = _rows_op(*arguments, keep)
    elif transformed():
        from tvd_torch import transforms

        values = transforms.kernel_rows(*arguments)
    else:
        values = _rows_op(*arguments, keep)
    tvd, student_lse, teacher_lse, kl, target_logit = values[:5]
    return Rows(
        tvd,
        student_lse,
        teacher_lse,
        kl if want_kl else None,
        None if targets is None else target_logit,
    )


def reduce_tokens(
    per_token: Tensor,
    row_weights: Tensor | None,
    normalizer: Tensor | float | None,
    reduction: str,
    vocab: int,
) -> Tensor:
    """See :func:`tvd_torch.eager.reduce_tokens`; adds in the contract's order."""
    if row_weights is not None:
        per_token = per_token * row_weights
    if reduction == "per_token":
        return per_token
    if not torch.compiler.is_compiling() and transformed():
        return eager.reduced(per_token, row_weights, normalizer, reduction, vocab)
    is_tensor = isinstance(normalizer, Tensor)
    tensor, number = (normalizer, None) if is_tensor else (None, normalizer)
    loss: Tensor = _reduce_op(per_token, row_weights, tensor, number, reduction, vocab)[0]
    return loss


# --- rows ----------------------------------------------------------------------------------------


@torch.library.custom_op("tvd_torch::logits_rows", mutates_args=())
def _rows_op(
    student: Tensor,
    teacher: Tensor,
    row_weights: Tensor | None,
    targets: Tensor | None,
    temperature: float,
    want_kl: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The five values of ``Rows``, the rows of both, and the codes; empty where not wanted."""
    tokens = student.shape[0]
    tvd, s_lse, t_lse, kl, target_logit = _empty_values(student, want_kl, targets)
    s_rows, t_rows, codes = _empty_kept(student, keep)
    if tokens:
        triton_launch.logits_forward(
            student, teacher, row_weights, temperature, tvd, s_rows, t_rows, s_lse, t_lse, kl, codes
        )
        if targets is not None:
            torch.mul(
                student.gather(1, targets[:, None])[:, 0].to(torch.float32),
                logit_scale(temperature),
                out=target_logit,
            )
            if row_weights is not None:
                target_logit.masked_fill_(row_weights == 0, 0.0)
    return tvd, s_lse, t_lse, kl, target_logit, s_rows, t_rows, codes


def _empty_values(student: Tensor, want_kl: bool, targets: Tensor | None) -> list[Tensor]:
    sizes = [student.shape[0]] * 3
    sizes += [student.shape[0] if wanted else 0 for wanted in (want_kl, targets is not None)]
    return [student.new_empty(size, dtype=torch.float32) for size in sizes]


def _empty_kept(student: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    tokens = student.shape[0]
    return (
        student.new_empty((3, tokens), dtype=torch.float32),
        student.new_empty((3, tokens), dtype=torch.float32),
        _empty_codes(student, keep),
    )


def _empty_codes(student: Tensor, keep: bool) -> Tensor:
    tokens, vocab = student.shape
    shape = (tokens, config.logits_codes_bytes(vocab)) if keep else (0, 0)
    return student.new_empty(shape, dtype=torch.uint8)


@_rows_op.register_fake
def _(
    student: Tensor,
    teacher: Tensor,
    row_weights: Tensor | None,
    targets: Tensor | None,
    temperature: float,
    want_kl: bool,
    keep: bool,
) -> Any:
    return *_empty_values(student, want_kl, targets), *_empty_kept(student, keep)


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    _save(ctx, inputs, output, (inputs[0].requires_grad, inputs[1].requires_grad))


def _save(ctx: Any, inputs: Any, output: Any, wanted: tuple[bool, ...]) -> None:
    """What ``_backward`` takes, of the arguments and results of ``_rows_op`` or their like."""
    student, teacher, row_weights, targets, ctx.temperature, ctx.want_kl, _ = inputs
    *_, kl, _, s_rows, t_rows, codes = output
    ctx.set_materialize_grads(False)
    want_student, want_teacher = wanted[:2]
    both = ctx.want_kl  # whose gradient takes the other's logits too
    ctx.save_for_backward(
        student if want_student or both else None,
        teacher if want_teacher or both else None,
        s_rows if want_student or both else None,
        t_rows if want_teacher or both else None,
        codes,
        kl if both and want_teacher else None,
        row_weights,
        targets,
    )


def _backward(ctx: Any, *upstreams: Tensor | None) -> tuple[Any, ...]:
    with torch.no_grad():
        found = _gradients(ctx, *upstreams)
    sources = (*ctx.saved_tensors[:2], *upstreams)
    message = no_second_derivative_message("triton", "eager")
    return without_second_derivative(found, sources, message)


def _gradients(ctx: Any, *upstreams: Tensor | None) -> tuple[Any, ...]:
    student, teacher, s_rows, t_rows, codes, kl, row_weights, targets = ctx.saved_tensors
    tvd_up, s_lse_up, t_lse_up, kl_up, target_up = upstreams[:5]
    if not ctx.want_kl:
        kl_up = None
    rest = (codes, row_weights, ctx.temperature)
    ds = dt = None
    if ctx.needs_input_grad[0]:
        target = (target_up, targets) if targets is not None else (None, None)
        ds = _backward_op(
            student, teacher, s_rows, t_rows, None, tvd_up, s_lse_up, kl_up, *target, *rest, True
        )
    if ctx.needs_input_grad[1]:
        dt = _backward_op(
            teacher, student, t_rows, s_rows, kl, tvd_up, t_lse_up, kl_up, None, None, *rest, False
        )
    return ds, dt, None, None, None, None, None


@torch.library.custom_op("tvd_torch::logits_backward", mutates_args=())
def _backward_op(
    logits: Tensor,
    other: Tensor | None,
    rows: Tensor,
    other_rows: Tensor | None,
    kl: Tensor | None,
    tvd_upstream: Tensor | None,
    lse_upstream: Tensor | None,
    kl_upstream: Tensor | None,
    target_upstream: Tensor | None,
    targets: Tensor | None,
    codes: Tensor,
    row_weights: Tensor | None,
    temperature: float,
    is_student: bool,
) -> Tensor:
    """The gradient of the student's or of the teacher's logits."""
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if logits.numel():
        if tvd_upstream is None:
            tvd_upstream = torch.zeros_like(rows[0])
        triton_launch.logits_backward(
            logits,
            other,
            rows,
            other_rows,
            kl,
            tvd_upstream,
            lse_upstream,
            kl_upstream,
            target_upstream,
            targets,
            codes,
            row_weights,
            temperature,
            is_student,
            gradient,
        )
    return gradient


@_backward_op.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


_rows_op.register_autograd(_backward, setup_context=_save_for_backward)


# --- shards of rows ------------------------------------------------------------------------------

LN2 = math.log(2.0)


class ShardedRows(torch.autograd.Function):
    """Rows that are cut: the kernel's statistics, those of the whole rows, then the differences."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        row_weights: Tensor | None,
        targets: Tensor | None,
        temperature: float,
        want_kl: bool,
        keep: bool,
        groups: Any,
    ) -> tuple[Tensor | None, ...]:
        """``targets`` are positions in the shard, -1 for those in another."""
        kept = None if row_weights is None else row_weights != 0
        reference, total = _statistics_op(student, teacher, row_weights, temperature).unbind(1)
        # How a maximum over processes takes a NaN is not defined. The sums show it.
        reference = torch.where(reference.isnan(), config.LOGITS_LOWEST, reference)
        top = all_reduced(reference, groups, "max")
        unit = config.logits_reference_unit(base_2_scale(temperature))
        total = sum_in_order(total * torch.exp2((reference - top) * unit), groups)
        given = torch.stack([top, 1.0 / total], 1)
        parts, codes = _difference_op(
            student, teacher, row_weights, temperature, given, want_kl, keep
        )
        if targets is not None:
            parts = torch.cat([parts, _at_targets(student, targets, temperature)[None]])
        tvd, below, *rest = all_reduced(parts, groups).unbind()
        below = torch.where(tvd == 0.0, 1.0, below)  # all are ties: gradients of 0
        log_total = torch.log2(total)
        s_lse, t_lse = ((top * unit + log_total) * LN2).unbind()
        kl = rest[0] + (log_total[0] - log_total[1]) * LN2 if want_kl else None
        target_logit = None if targets is None else rest[-1]
        values: tuple[Tensor | None, ...] = (tvd, s_lse, t_lse, kl, target_logit)
        if kept is not None:
            values = tuple(None if x is None else torch.where(kept, x, 0.0) for x in values)
        s_rows, t_rows = (
            torch.stack([top[i], 1.0 / total[i], below + 2.0 * tvd * i]) for i in (0, 1)
        )
        arguments = (student, teacher, row_weights, targets, temperature, want_kl, keep)
        _save(ctx, arguments, (*values, s_rows, t_rows, codes), ctx.needs_input_grad)
        return values

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor | None) -> tuple[Any, ...]:
        """As of whole rows."""
        with torch.no_grad():
            found = (*_gradients(ctx, *upstreams), None)
        sources = (*ctx.saved_tensors[:2], *upstreams)
        return without_second_derivative(found, sources, no_second_derivative_of_shards_message())


def _at_targets(student: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """The logit / T at targets in the shard, 0 for others."""
    if not student.shape[1]:
        return student.new_zeros(student.shape[0], dtype=torch.float32)
    found = student.gather(1, targets.clamp(min=0)[:, None])[:, 0].to(torch.float32)
    return torch.where(targets >= 0, found * logit_scale(temperature), 0.0)


@torch.library.custom_op("tvd_torch::logits_statistics", mutates_args=())
def _statistics_op(
    student: Tensor, teacher: Tensor, row_weights: Tensor | None, temperature: float
) -> Tensor:
    """``[2, 2, tokens]``: of student and teacher, the reference of each row and its sum."""
    rows = student.new_zeros((2, 2, student.shape[0]), dtype=torch.float32)
    rows[:, 0] = config.LOGITS_LOWEST
    if student.numel():
        nothing = rows[0, 0, :0]
        triton_launch.logits_forward(
            student, teacher, row_weights, temperature, nothing, rows[0], rows[1], nothing,
            nothing, nothing, nothing, "ALONE",
        )  # fmt: skip
    return rows


@_statistics_op.register_fake
def _(student: Tensor, *_: Any) -> Tensor:
    return student.new_empty((2, 2, student.shape[0]), dtype=torch.float32)


@torch.library.custom_op("tvd_torch::logits_difference", mutates_args=())
def _difference_op(
    student: Tensor,
    teacher: Tensor,
    row_weights: Tensor | None,
    temperature: float,
    given: Tensor,
    want_kl: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Of the shards of rows whose references and factors, ``[2, 2, tokens]``, are given.

    ``[2 or 3, tokens]``: the distance, the sum of ``p * (1 - sign(p - q))``, and, if wanted, the
    divergence without the logarithm of the factors; and the codes.
    """
    tokens = student.shape[0]
    parts = student.new_zeros((3 if want_kl else 2, tokens), dtype=torch.float32)
    codes = _empty_codes(student, keep)
    if student.numel():
        s_rows = student.new_zeros((3, tokens), dtype=torch.float32)
        nothing = parts[0, :0]
        triton_launch.logits_forward(
            student, teacher, row_weights, temperature, parts[0], s_rows, nothing, nothing,
            nothing, parts[2] if want_kl else nothing, codes, "GIVEN", given.contiguous(),
        )  # fmt: skip
        parts[1] = s_rows[2]
    return parts, codes


@_difference_op.register_fake
def _(
    student: Tensor,
    teacher: Tensor,
    row_weights: Tensor | None,
    temperature: float,
    given: Tensor,
    want_kl: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    shape = (3 if want_kl else 2, student.shape[0])
    return student.new_empty(shape, dtype=torch.float32), _empty_codes(student, keep)


# --- reduction -----------------------------------------------------------------------------------


@torch.library.custom_op("tvd_torch::reduce_tokens", mutates_args=())
def _reduce_op(
    per_token: Tensor,
    row_weights: Tensor | None,
    normalizer: Tensor | None,
    normalizer_number: float | None,
    reduction: str,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """The loss and its divisor."""
    return triton_launch.reduce_tokens(
        per_token.contiguous(),
        row_weights,
        normalizer if normalizer_number is None else normalizer_number,
        reduction,
        vocab,
    )


@_reduce_op.register_fake
def _(per_token: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return per_token.new_empty(()), per_token.new_empty(())


def _save_divisor(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.tokens = inputs[0].shape
    ctx.save_for_backward(output[1])


def _reduce_backward(ctx: Any, upstream: Tensor, _divisor: Any) -> tuple[Any, ...]:
    (divisor,) = ctx.saved_tensors
    # With no token kept the divisor is 0, and no gradient goes further than the row weights.
    return (upstream / divisor).expand(ctx.tokens), *(None,) * 5


_reduce_op.register_autograd(_reduce_backward, setup_context=_save_divisor)
