"""The implementations under ``torch.func`` and forward-mode differentiation.

Each is a ``torch.autograd.Function`` with rules for ``vmap`` and ``jvp``. PyTorch takes 30 us more
to call one of those than a plain one as in the other modules, so they are for this alone. Tokens
are independent: a batch of inputs is more tokens.
"""

from typing import Any

import torch
from torch import Tensor

from tvd_core.contract import no_second_derivative_message
from tvd_torch import eager, logits_eager, logits_rows, triton_launch


def _batched(x: Any, dim: int | None, size: int) -> Any:
    """With the batch as the first dimension."""
    if not isinstance(x, Tensor):
        return x
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _sum(*terms: Tensor | None) -> Any:
    present = [x for x in terms if x is not None]
    return sum(present[1:], start=present[0]) if present else None


# --- probabilities, in the Triton kernels ---------------------------------------------------------


def tvd_loss(
    p: Tensor,
    q: Tensor,
    row_weights: Tensor | None,
    normalizer: Tensor | float | None,
    reduction: str,
) -> Tensor:
    """The loss by the kernels' values of tokens or elements, which PyTorch adds up."""
    unreduced = "none" if reduction == "none" else "per_token"
    kept = None if row_weights is None else (row_weights != 0).to(torch.float32)
    values: Tensor = _Values.apply(p, q, kept, unreduced)[0]
    if reduction == "none":
        return values if row_weights is None else values * row_weights[..., None]
    return eager.reduce_tokens(values, row_weights, normalizer, reduction, p.shape[-1])


class _Values(torch.autograd.Function):
    """The unreduced loss and the sign codes, ``[tokens, bytes]``."""

    @staticmethod
    def forward(p: Tensor, q: Tensor, kept: Tensor | None, reduction: str) -> tuple[Tensor, Tensor]:
        values, codes, _, _ = triton_launch.forward(p, q, None, kept, None, reduction, -100, True)
        assert codes is not None
        return values, codes

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        p, q, kept, ctx.reduction = inputs
        ctx.save_for_backward(output[1], kept)
        ctx.save_for_forward(output[1], kept)
        ctx.mark_non_differentiable(output[1])
        ctx.shape, ctx.dtypes, ctx.values_shape = (
            tuple(p.shape),
            (p.dtype, q.dtype),
            output[0].shape,
        )

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _codes: Any) -> tuple[Any, ...]:
        codes, kept = ctx.saved_tensors
        return (
            *_Gradients.apply(codes, upstream, kept, ctx.shape, *ctx.dtypes, ctx.reduction),
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, p: Tensor | None, q: Tensor | None, *_: Any) -> tuple[Any, None]:
        codes, kept = ctx.saved_tensors
        ones = torch.ones(ctx.values_shape, dtype=torch.float32, device=codes.device)
        options = (kept, ctx.shape, torch.float32, torch.float32, ctx.reduction)
        dp, dq = _Gradients.apply(codes, ones, *options)
        along = _sum(None if p is None else dp * p, None if q is None else dq * q)
        return along if ctx.reduction == "none" or along is None else along.sum(-1), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        p, q, kept, reduction = (
            _batched(x, dim, size) for x, dim in zip(arguments, in_dims, strict=True)
        )
        values, codes = _Values.apply(p, q, kept, reduction)
        return (values, codes.reshape(size, codes.shape[0] // size, codes.shape[1])), (0, 0)


class _Gradients(torch.autograd.Function):
    """dp and dq, linear in the upstream gradient."""

    @staticmethod
    def forward(
        codes: Tensor,
        upstream: Tensor,
        kept: Tensor | None,
        shape: tuple[int, ...],
        p_dtype: torch.dtype,
        q_dtype: torch.dtype,
        reduction: str,
    ) -> tuple[Tensor, Tensor]:
        constants = (None, None, kept, shape, p_dtype, q_dtype, reduction, -100)
        dp, dq = triton_launch.backward(codes, upstream, *constants)
        assert dp is not None and dq is not None
        return dp, dq

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        codes, upstream, kept, *ctx.rest = inputs
        ctx.save_for_backward(codes, kept)
        ctx.save_for_forward(codes, kept)
        ctx.upstream_shape = upstream.shape

    @staticmethod
    def backward(ctx: Any, dp: Tensor, dq: Tensor) -> tuple[Any, ...]:
        codes, kept = ctx.saved_tensors
        shape, _, _, reduction = ctx.rest
        ones = torch.ones(ctx.upstream_shape, dtype=torch.float32, device=codes.device)
        unit, _ = _Gradients.apply(
            codes, ones, kept, shape, torch.float32, torch.float32, reduction
        )
        product = unit * (dp.to(torch.float32) - dq.to(torch.float32))
        return None, product if reduction == "none" else product.sum(-1), *(None,) * 5

    @staticmethod
    def jvp(ctx: Any, _codes: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, Any]:
        if upstream is None:
            return None, None
        codes, kept = ctx.saved_tensors
        result: tuple[Tensor, Tensor] = _Gradients.apply(codes, upstream, kept, *ctx.rest)
        return result

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        codes, upstream, kept = (
            _batched(x, dim, size) for x, dim in zip(arguments[:3], in_dims[:3], strict=True)
        )
        shape, *rest = arguments[3:]
        codes = codes.reshape(size * codes.shape[1], codes.shape[2])
        return _Gradients.apply(codes, upstream, kept, (size, *shape), *rest), (0, 0)


# --- rows of logits, in eager PyTorch -------------------------------------------------------------


def eager_rows(*arguments: Any) -> tuple[Tensor, ...]:
    """The five values of ``Rows``, whatever is not wanted as a tensor without meaning."""
    values: tuple[Tensor, ...] = _EagerRows.apply(*arguments)
    return values


class _EagerRows(torch.autograd.Function):
    """The values of ``Rows``; empty ones are not wanted."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        student: Tensor,
        teacher: Tensor,
        kept: Tensor | None,
        targets: Tensor | None,
        temperature: float,
        want_kl: bool,
    ) -> tuple[Tensor, ...]:
        values = logits_eager.values(student, teacher, kept, targets, temperature, want_kl)
        assert values[0] is not None
        nothing = values[0].new_zeros(())
        return tuple(nothing.clone() if x is None else x for x in values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.save_for_forward(*inputs[:4])
        ctx.temperature, ctx.want_kl = inputs[4:]

    @staticmethod
    def backward(ctx: Any, *upstreams: Any) -> tuple[Tensor | None, ...]:
        student, teacher, kept, targets = ctx.saved_tensors
        if not ctx.want_kl:
            upstreams = *upstreams[:3], None, upstreams[4]
        if targets is None:
            upstreams = *upstreams[:4], None
        arguments = (kept, targets, ctx.temperature, upstreams, (True, True))
        return *logits_eager.gradients((student, teacher), *arguments), *(None,) * 4

    @staticmethod
    def jvp(ctx: Any, ds: Tensor | None, dt: Tensor | None, *_: Any) -> tuple[Any, ...]:
        student, teacher, kept, targets = ctx.saved_tensors
        dtype = eager.accumulation_dtype(student, teacher)
        logits = student.to(dtype), teacher.to(dtype)
        one, zero = torch.ones_like(logits[0][:, 0]), torch.zeros_like(logits[0][:, 0])
        wanted = [True, True, True, ctx.want_kl, targets is not None]
        tangents: list[Any] = []
        for i, is_wanted in enumerate(wanted):
            if not is_wanted:
                tangents.append(one.new_zeros(()))
                continue
            upstreams: list[Any] = [one if i == j else zero for j in range(5)]
            if i != 3:
                upstreams[3] = None
            arguments = (kept, targets, ctx.temperature, tuple(upstreams), (True, True))
            by_student, by_teacher = logits_eager.gradients(logits, *arguments)
            terms = ((by_student, ds), (by_teacher, dt))
            tangents.append(_along(terms, zero))
        return tuple(tangents)


def _along(terms: Any, zero: Tensor) -> Tensor:
    """Sums over rows of gradients times tangents, where a gradient of 0 wins over any."""
    total = zero
    for gradient, tangent in terms:
        if gradient is not None and tangent is not None:
            total = total + torch.where(gradient == 0, 0.0, gradient * tangent).sum(-1)
    return total


# --- rows of logits, in the Triton kernels --------------------------------------------------------


def kernel_rows(*arguments: Any) -> tuple[Tensor, ...]:
    """The five values of ``Rows``, and what is kept beside them."""
    values: tuple[Tensor, ...] = _KernelRows.apply(*arguments)
    return values


class _KernelRows(torch.autograd.Function):
    """The five values of ``Rows``, the rows of both, ``[3, tokens]``, and the codes."""

    @staticmethod
    def forward(
        student: Tensor,
        teacher: Tensor,
        row_weights: Tensor | None,
        targets: Tensor | None,
        temperature: float,
        want_kl: bool,
    ) -> tuple[Tensor, ...]:
        arguments = (student, teacher, row_weights, targets, temperature, want_kl, True)
        values: tuple[Tensor, ...] = logits_rows._rows_op(*arguments)
        return values

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.temperature, ctx.want_kl = inputs
        kl, (s_rows, t_rows, codes) = output[3], output[5:]
        ctx.mark_non_differentiable(s_rows, t_rows, codes)
        ctx.save_for_backward(*tensors, s_rows, t_rows, codes, kl)
        ctx.save_for_forward(*tensors, s_rows, t_rows, codes, kl)

    @staticmethod
    def backward(ctx: Any, *upstreams: Any) -> tuple[Any, ...]:
        student, teacher = ctx.saved_tensors[:2]
        return *_KernelRows.gradients(ctx, student, teacher, upstreams), *(None,) * 4

    @staticmethod
    def gradients(ctx: Any, student: Tensor, teacher: Tensor, upstreams: Any) -> tuple[Any, Any]:
        """Of both logits, by the upstream gradients of the five values."""
        _, _, row_weights, targets, s_rows, t_rows, codes, kl = ctx.saved_tensors
        tvd, s_lse, t_lse, kl_upstream, target = upstreams[:5]
        if not ctx.want_kl:
            kl = kl_upstream = None
        if targets is None:
            target = None
        rest = (codes, row_weights, ctx.temperature)
        by_student = (None, tvd, s_lse, kl_upstream, target, targets, *rest, True)
        by_teacher = (kl, tvd, t_lse, kl_upstream, None, None, *rest, False)
        return (
            _RowsGradient.apply(student, teacher, s_rows, t_rows, *by_student),
            _RowsGradient.apply(teacher, student, t_rows, s_rows, *by_teacher),
        )

    @staticmethod
    def jvp(ctx: Any, ds: Tensor | None, dt: Tensor | None, *_: Any) -> tuple[Any, ...]:
        student, teacher, _, targets, *_rest = ctx.saved_tensors
        student, teacher = student.to(torch.float32), teacher.to(torch.float32)
        one, zero = torch.ones_like(student[:, 0]), torch.zeros_like(student[:, 0])
        wanted = (True, True, True, ctx.want_kl, targets is not None)
        tangents: list[Any] = []
        for i, is_wanted in enumerate(wanted):
            if not is_wanted:
                tangents.append(one[:0])
                continue
            upstreams = [one if i == j else zero for j in range(5)]
            gradients = _KernelRows.gradients(ctx, student, teacher, upstreams)
            tangents.append(_along(zip(gradients, (ds, dt), strict=True), zero))
        return *tangents, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        tensors = [
            _merged(_batched(x, dim, size))
            for x, dim in zip(arguments[:4], in_dims[:4], strict=True)
        ]
        output = _KernelRows.apply(*tensors, *arguments[4:])
        values = [x.reshape(size, x.shape[0] // size) for x in output[:5]]
        rows = [x.reshape(3, size, x.shape[1] // size) for x in output[5:7]]
        codes = output[7].reshape(size, output[7].shape[0] // size, output[7].shape[1])
        return (*values, *rows, codes), (0,) * 5 + (1, 1, 0)


def _merged(x: Any) -> Any:
    """A batch of tokens as more tokens."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) if isinstance(x, Tensor) else x


class _RowsGradient(torch.autograd.Function):
    """The gradient of the student's or of the teacher's logits."""

    CODES = 10  # which argument they are

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        gradient: Tensor = logits_rows._backward_op(*arguments)
        return gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(no_second_derivative_message("triton", "eager"))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
        size = info.batch_size
        if in_dims[_RowsGradient.CODES] is None:
            # Which byte holds an element's code hangs on where in memory its row starts.
            each = [
                [
                    x if dim is None else x.select(dim, i)
                    for x, dim in zip(arguments, in_dims, strict=True)
                ]
                for i in range(size)
            ]
            return torch.stack([_RowsGradient.apply(*one) for one in each]), 0
        batched = [_batched(x, dim, size) for x, dim in zip(arguments, in_dims, strict=True)]
        merged = [
            x.movedim(0, 1).reshape(3, -1) if i in (2, 3) else _merged(x)
            for i, x in enumerate(batched)
        ]
        gradient = _RowsGradient.apply(*merged)
        tokens, vocab = gradient.shape
        return gradient.reshape(size, tokens // size, vocab), 0
