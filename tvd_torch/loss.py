"""Total variation distance loss for PyTorch: the public function, its module and its autograd."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tvd_core.contract import (
    KERNEL_DTYPES,
    KERNEL_VOCAB,
    LANES,
    REDUCTIONS,
    as_number,
    check_ignore_index,
    check_implementation,
    check_inputs,
    check_reduction,
    code_tiles,
    constant_message,
    dtype_name,
    kernel_dtype_message,
    kernel_vocab_message,
    no_compiled_forward_mode_message,
)
from tvd_torch import eager, sharded, triton_launch

IMPLEMENTATIONS = ("triton", "eager")
# Of others (fake tensors) only an operator knows what to make.
_PLAIN = (Tensor, torch.nn.Parameter)
_KERNEL_DTYPES = frozenset(getattr(torch, name) for name in KERNEL_DTYPES)


def available_implementations() -> dict[str, str | None]:
    """Implementations by name: ``None`` if this machine can run it, else the reason and remedy."""
    return {"triton": triton_launch.unavailable_reason(), "eager": None}


def choose_implementation(
    p: Tensor, q: Tensor, implementation: str | None, names: tuple[str, str] = ("p", "q")
) -> str:
    """Resolves ``None`` by hardware; fails for a named one that these inputs cannot use."""
    check_implementation(implementation, IMPLEMENTATIONS)
    in_kernel_dtypes = p.dtype in _KERNEL_DTYPES and q.dtype in _KERNEL_DTYPES
    if implementation is None:
        fits = in_kernel_dtypes and p.shape[-1] <= KERNEL_VOCAB
        usable = p.is_cuda and fits and triton_launch.unavailable_reason() is None
        return "triton" if usable else "eager"
    if implementation == "eager":
        return implementation
    reason = triton_launch.unavailable_reason()
    if reason is not None:
        raise ValueError(f"implementation 'triton' cannot run: {reason}")
    if not in_kernel_dtypes:
        name, x = (names[0], p) if p.dtype not in _KERNEL_DTYPES else (names[1], q)
        raise TypeError(kernel_dtype_message("triton", name, dtype_name(x), "eager"))
    if p.shape[-1] > KERNEL_VOCAB:
        raise ValueError(kernel_vocab_message("triton", p.shape[-1], "eager"))
    if not p.is_cuda and not (p.device.type == "cpu" and triton_launch.interpreting()):
        raise ValueError(
            f"implementation 'triton' needs tensors on a CUDA GPU, got {names[0]} on {p.device}: "
            "move them there or use implementation 'eager'"
        )
    return implementation


def tvd_loss(
    p: Tensor,
    q: Tensor,
    labels: Tensor | None = None,
    *,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    vocab_group: Any = None,
    token_group: Any = None,
    implementation: str | None = None,
) -> Tensor:
    """Total variation distance between two distributions per token, reduced over the tokens.

    ``tvd_t = 0.5 * sum_v |p[t, v] - q[t, v]|``, and for ``batchmean``
    ``loss = sum_t weights[t] * tvd_t / sum_t weights[t]`` over the tokens that are kept.

    With distributions the value lies in [0, 1], and 1 - TVD is the acceptance rate of speculative
    sampling. Inputs are not checked to sum to 1. The gradient is
    ``dL/dp = 0.5 * sign(p - q) * scale`` and ``dL/dq = -dL/dp``, with sign(0) = 0 and
    sign(NaN) = NaN.

    Args:
        p: ``[..., vocab]`` probabilities; float32, bfloat16 or float16 (float64: eager only).
            Strided inputs are copied to contiguous memory first.
        q: probabilities with the shape of ``p``; its dtype may differ.
        labels: integers with the leading shape of ``p``. A token whose label is ``ignore_index``
            contributes exactly 0 to the loss and gradients, whatever its rows hold; other values
            are not used. ``None`` keeps every token.
        reduction: ``"batchmean"``, ``"sum"``, ``"mean"``, ``"none"`` or ``"per_token"``.
        ignore_index: the label that marks an ignored token.
        weights: weight of each token, floats with the leading shape of ``p``; a constant. A
            weight of 0 ignores the token.
        normalizer: divisor of ``batchmean`` and ``mean`` in place of the kept weights' sum: a
            positive number (Python's or NumPy's, in float32's range for every dtype of ``p``) or a
            0-d tensor on the device; a constant. For gradient accumulation and data-parallel
            training, where the count of all the batch's tokens divides.
        vocab_group: ``torch.distributed.ProcessGroup`` whose processes hold the other columns of
            these tokens' rows: the last dimension is this process's shard, and may be empty.
        token_group: process group whose processes hold other tokens. The sum over tokens and the
            divisor are then those of the group.
        implementation: ``"triton"`` (CUDA GPUs), ``"eager"``, or ``None`` to pick by device. A
            named one is used or the call fails.

    Returns:
        float32 (float64 if an input is). ``batchmean`` is 0-d, sum over kept tokens / sum of kept
        weights, 0 if none is kept. ``sum``: 0-d. ``mean``: 0-d, ``batchmean / vocab`` as
        ``torch.nn.KLDivLoss`` defines its mean. ``per_token``: the leading shape. ``none``: the
        shape of ``p``, ``0.5 * |p - q|`` times the weights. With groups every process returns the
        loss of the whole inputs (``per_token`` and ``none``: its part), and its backward gives the
        gradient of its own shard. DTensors, sharded over tokens, vocab or both or replicated, take
        no group and give a DTensor.

    Raises:
        ValueError: a shape, device, mesh, reduction, normalizer or implementation does not fit.
        TypeError: something is not a dense tensor, or has the wrong dtype.

    Source: Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation",
    ACL 2023; Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
    ICML 2023 (acceptance rate).
    """
    is_sharded = sharded.is_sharded(p, q, vocab_group, token_group)
    normalizer = checked_normalizer(
        p, q, labels, weights, normalizer, reduction, ignore_index, is_shard=vocab_group is not None
    )
    ignore_index = int(ignore_index)
    if is_sharded:
        shards = sharded.of(p, q, ("p", "q"), vocab_group, token_group)
        constants = (labels, weights, normalizer)
        return _sharded_loss(p, q, *constants, reduction, ignore_index, implementation, shards)
    labels = comparable(labels, ignore_index)
    chosen = choose_implementation(p, q, implementation)
    # Asked here, because ctx.needs_input_grad says yes under no_grad too.
    want_gradient = torch.is_grad_enabled() and (p.requires_grad or q.requires_grad)
    if want_gradient:
        labels, weights = saveable(labels, weights)
    if chosen == "eager":
        return _eager_loss(p, q, labels, weights, normalizer, reduction, ignore_index)
    arguments = (p, q, labels, weights, normalizer, reduction, ignore_index, want_gradient)
    if torch.compiler.is_compiling() or type(p) not in _PLAIN or type(q) not in _PLAIN:
        if eager.forward_mode():
            raise NotImplementedError(no_compiled_forward_mode_message("triton", "eager"))
        return _compiled_loss(*arguments)
    if eager.transformed():
        from tvd_torch import transforms

        row_weights = kept_weights(labels, weights, ignore_index, torch.float32)
        return transforms.tvd_loss(p, q, row_weights, normalizer, reduction)
    if not want_gradient:
        return triton_launch.forward(*arguments)[0]  # 15 us of host time less than through autograd
    loss: Tensor = _TritonLoss.apply(*arguments)
    return loss


def checked_normalizer(
    p: Tensor,
    q: Tensor,
    labels: Tensor | None,
    weights: Tensor | None,
    normalizer: Any,
    reduction: str,
    ignore_index: int,
    names: tuple[str, str] = ("p", "q"),
    reductions: tuple[str, ...] = REDUCTIONS,
    is_shard: bool = False,
) -> Tensor | float | None:
    """Raises for inputs that the contract excludes; returns the normalizer, a number as a float."""
    arrays = {names[0]: p, names[1]: q, "labels": labels, "weights": weights}
    _check_dense(**arrays, normalizer=normalizer)
    sharded.check_meshes(p, q, names, labels=labels, weights=weights, normalizer=normalizer)
    normalizer = _traceable(normalizer, p)
    check_inputs(
        p,
        q,
        labels,
        weights,
        normalizer,
        reduction=reduction,
        ignore_index=ignore_index,
        array_type=Tensor,
        device_of=lambda tensor: tensor.device,
        names=names,
        reductions=reductions,
        is_shard=is_shard,
    )
    for name, constant in (("weights", weights), ("normalizer", normalizer)):
        if isinstance(constant, Tensor) and constant.requires_grad:
            raise ValueError(constant_message(name))
    number: Tensor | float | None = as_number(normalizer)
    return number


def comparable(labels: Tensor | None, ignore_index: int) -> Tensor | None:
    """Labels that may be compared as int64, or ``None`` where none of them can match."""
    if labels is not None and labels.dtype == torch.uint64 and ignore_index < 0:
        return None  # as int64 the largest would match
    return labels


def saveable(*constants: Tensor | None) -> tuple[Tensor | None, ...]:
    """Labels and weights as tensors that PyTorch saves for a backward."""
    return tuple(None if x is None else eager.saveable(x) for x in constants)


def _check_dense(**arguments: Any) -> None:
    """Raises ``TypeError`` for a tensor whose memory is not an array of its elements.

    Only PyTorch has such tensors, and a nested one has no shape for ``check_inputs`` to look at.
    """
    for name, x in arguments.items():
        if isinstance(x, Tensor) and (x.layout != torch.strided or x.is_nested):
            kind = "a nested tensor" if x.is_nested else str(x.layout)
            raise TypeError(f"{name} must be a dense tensor, got {kind}")


def _traceable(normalizer: Any, p: Any) -> Any:
    """A NumPy number as a tensor while Dynamo traces, which does not know its value."""
    numpy_number = isinstance(normalizer, (np.ndarray, np.generic))
    if numpy_number and torch.compiler.is_compiling() and isinstance(p, Tensor):
        return torch.as_tensor(normalizer, device=p.device)
    return normalizer


class TVDLoss(torch.nn.Module):
    """``tvd_loss`` as a module.

    ``loss = 0.5 * sum_v |p - q|`` per token, reduced; see :func:`tvd_loss`.

    Args:
        reduction: ``"batchmean"``, ``"sum"``, ``"mean"``, ``"none"`` or ``"per_token"``.
        ignore_index: the label that marks an ignored token.
        implementation: ``"triton"``, ``"eager"``, or ``None`` to pick by device.
        vocab_group, token_group: process groups, as for :func:`tvd_loss`.

    Raises:
        ValueError: an unknown reduction or implementation.
        TypeError: ``ignore_index`` is not an int, or a group not a process group.
    """

    def __init__(
        self,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        implementation: str | None = None,
        *,
        vocab_group: Any = None,
        token_group: Any = None,
    ) -> None:
        super().__init__()
        check_reduction(reduction)
        check_ignore_index(ignore_index)
        check_implementation(implementation, IMPLEMENTATIONS)
        sharded.check_groups(vocab_group, token_group)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.vocab_group, self.token_group = vocab_group, token_group
        self.implementation = implementation

    def forward(
        self,
        p: Tensor,
        q: Tensor,
        labels: Tensor | None = None,
        *,
        weights: Tensor | None = None,
        normalizer: Tensor | float | None = None,
    ) -> Tensor:
        """Returns ``tvd_loss(p, q, labels, ...)`` with this module's options."""
        return tvd_loss(
            p,
            q,
            labels,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            weights=weights,
            normalizer=normalizer,
            vocab_group=self.vocab_group,
            token_group=self.token_group,
            implementation=self.implementation,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        return sharded.deep_copy(self, memo)

    def extra_repr(self) -> str:
        """Options shown by ``print(module)``."""
        return (
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, "
            f"implementation={self.implementation!r}"
        )


# --- sharded -------------------------------------------------------------------------------------


def _sharded_loss(
    p: Tensor,
    q: Tensor,
    labels: Tensor | None,
    weights: Tensor | None,
    normalizer: Tensor | float | None,
    reduction: str,
    ignore_index: int,
    implementation: str | None,
    shards: sharded.Shards,
) -> Tensor:
    """Sums of local losses: a row's distance is that of its shards, added up."""
    p, q, labels, weights, normalizer = (
        sharded.local(x, shards.layout) for x in (p, q, labels, weights, normalizer)
    )
    choose_implementation(p, q, implementation)  # with no columns, too
    vocab = p.shape[-1]
    reduced = reduction not in ("none", "per_token")
    inner = "sum" if reduced else reduction
    options: dict[str, Any] = {"weights": weights, "ignore_index": ignore_index}
    if vocab:
        x = tvd_loss(p, q, labels, reduction=inner, implementation=implementation, **options)
    else:
        x = sharded.no_columns(p, q, inner)
    if reduction != "none":
        x = sharded.sum_over(x, shards.vocab)
    if reduced:
        dtype = eager.accumulation_dtype(p, q)
        row_weights = kept_weights(comparable(labels, ignore_index), weights, ignore_index, dtype)
        x = sharded.reduced(
            x, row_weights, math.prod(p.shape[:-1]), normalizer, reduction, vocab, shards
        )
    return sharded.wrapped(x, shards)


# --- eager ---------------------------------------------------------------------------------------


def kept_weights(
    labels: Tensor | None, weights: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor | None:
    """Weight of each token with 0 for the ignored ones; ``None`` if every token counts 1."""
    if labels is None:
        return None if weights is None else weights.to(dtype)
    kept = labels.to(torch.int64) != ignore_index
    return kept.to(dtype) if weights is None else torch.where(kept, weights.to(dtype), 0.0)


def _eager_loss(
    p: Tensor,
    q: Tensor,
    labels: Tensor | None,
    weights: Tensor | None,
    normalizer: Tensor | float | None,
    reduction: str,
    ignore_index: int,
) -> Tensor:
    dtype = eager.accumulation_dtype(p, q)
    row_weights = kept_weights(labels, weights, ignore_index, dtype)
    kept = None if row_weights is None else row_weights != 0
    if reduction == "none":
        elementwise = 0.5 * eager.masked_difference(p, q, kept)
        return elementwise if row_weights is None else elementwise * row_weights[..., None]
    per_token = eager.per_token(p, q, kept)
    return eager.reduce_tokens(per_token, row_weights, normalizer, reduction, p.shape[-1])


# --- triton --------------------------------------------------------------------------------------


class _TritonLoss(torch.autograd.Function):
    """The kernels under autograd: keeps the 2-bit sign codes, and nothing of p and q."""

    @staticmethod
    def forward(
        ctx: Any,
        p: Tensor,
        q: Tensor,
        labels: Tensor | None,
        weights: Tensor | None,
        normalizer: Tensor | float | None,
        reduction: str,
        ignore_index: int,
        keep_codes: bool,
    ) -> Tensor:
        loss, codes, divisor, _ = triton_launch.forward(
            p, q, labels, weights, normalizer, reduction, ignore_index, keep_codes
        )
        ctx.save_for_backward(codes, divisor, labels, weights)
        ctx.shape, ctx.reduction, ctx.ignore_index = p.shape, reduction, ignore_index
        ctx.dtypes = p.dtype, q.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # Only create_graph=True needs the gradient to be differentiable in its turn.
        run = _backward_op if torch.is_grad_enabled() else triton_launch.backward
        return *_gradients(ctx, run, upstream), *(None,) * 6


def _gradients(
    ctx: Any, run: Callable[..., Any], upstream: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of p and q, each if it is asked for; ``run`` is the kernel or its operator."""
    codes, divisor, labels, weights = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:2]
    p_dtype, q_dtype = (d if w else None for d, w in zip(ctx.dtypes, wanted, strict=True))
    dp, dq = run(
        codes,
        upstream,
        divisor,
        labels,
        weights,
        list(ctx.shape),
        p_dtype,
        q_dtype,
        ctx.reduction,
        ctx.ignore_index,
    )
    return dp if wanted[0] else None, dq if wanted[1] else None


# Under torch.compile the kernels are opaque operators, so that Dynamo traces through without a
# graph break. Eager calls take this road for a gradient that is differentiated again, and for
# nothing else: an operator with registered autograd costs 47-55 us of host time a call, a plain
# autograd.Function 10.


@torch.library.custom_op("tvd_torch::forward", mutates_args=())
def _forward_op(
    p: Tensor,
    q: Tensor,
    labels: Tensor | None,
    weights: Tensor | None,
    normalizer: Tensor | None,
    normalizer_number: float | None,
    reduction: str,
    ignore_index: int,
    keep_codes: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    loss, codes, divisor, _ = triton_launch.forward(
        p,
        q,
        labels,
        weights,
        normalizer if normalizer_number is None else normalizer_number,
        reduction,
        ignore_index,
        keep_codes,
    )
    if codes is None:
        codes = p.new_empty((0, 0), dtype=torch.uint8)
    return loss, codes, p.new_ones((), dtype=torch.float32) if divisor is None else divisor


@_forward_op.register_fake
def _(
    p: Tensor,
    q: Tensor,
    labels: Tensor | None,
    weights: Tensor | None,
    normalizer: Tensor | None,
    normalizer_number: float | None,
    reduction: str,
    ignore_index: int,
    keep_codes: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = {"none": p.shape, "per_token": p.shape[:-1]}.get(reduction, ())
    vocab = p.shape[-1]
    codes = (p.numel() // vocab, code_tiles(vocab) * LANES) if keep_codes else (0, 0)
    return (
        p.new_empty(shape, dtype=torch.float32),
        p.new_empty(codes, dtype=torch.uint8),
        p.new_empty((), dtype=torch.float32),
    )


@torch.library.custom_op("tvd_torch::backward", mutates_args=())
def _backward_op(
    codes: Tensor,
    upstream: Tensor,
    divisor: Tensor | None,
    labels: Tensor | None,
    weights: Tensor | None,
    shape: list[int],
    p_dtype: torch.dtype | None,
    q_dtype: torch.dtype | None,
    reduction: str,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    dp, dq = triton_launch.backward(
        codes,
        upstream,
        divisor,
        labels,
        weights,
        tuple(shape),
        p_dtype,
        q_dtype,
        reduction,
        ignore_index,
    )
    nothing = codes.new_empty(0, dtype=torch.float32)
    return nothing if dp is None else dp, nothing.clone() if dq is None else dq


@_backward_op.register_fake
def _(
    codes: Tensor,
    upstream: Tensor,
    divisor: Tensor | None,
    labels: Tensor | None,
    weights: Tensor | None,
    shape: list[int],
    p_dtype: torch.dtype | None,
    q_dtype: torch.dtype | None,
    reduction: str,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    def gradient(dtype: torch.dtype | None) -> Tensor:
        if dtype is None:
            return codes.new_empty(0, dtype=torch.float32)
        return codes.new_empty(shape, dtype=dtype)

    return gradient(p_dtype), gradient(q_dtype)


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    p, q, labels, weights, _, _, ctx.reduction, ctx.ignore_index, _ = inputs
    _, codes, divisor = output
    reduced = ctx.reduction not in ("none", "per_token")
    ctx.save_for_backward(codes, divisor if reduced else None, *saveable(labels, weights))
    ctx.shape, ctx.dtypes = p.shape, (p.dtype, q.dtype)


def _backward(ctx: Any, upstream: Tensor, _codes: Any, _divisor: Any) -> tuple[Any, ...]:
    return *_gradients(ctx, _backward_op, upstream), *(None,) * 7


def _save_for_double_backward(ctx: Any, inputs: Any, output: Any) -> None:
    codes, upstream, divisor, labels, weights, *ctx.rest = inputs
    ctx.save_for_backward(codes, divisor, labels, weights)
    ctx.upstream_shape = upstream.shape


def _double_backward(ctx: Any, *along: Tensor) -> tuple[Any, ...]:
    """The derivative of dp and dq with respect to the upstream gradient, which they scale with."""
    codes, divisor, labels, weights = ctx.saved_tensors
    shape, p_dtype, q_dtype, reduction, ignore_index = ctx.rest
    ones = torch.ones(ctx.upstream_shape, dtype=torch.float32, device=codes.device)
    constants = (divisor, labels, weights, shape, torch.float32, None, reduction, ignore_index)
    unit, _ = _backward_op(codes, ones, *constants)
    dp_along, dq_along = (
        0.0 if dtype is None else x.to(torch.float32)
        for dtype, x in zip((p_dtype, q_dtype), along, strict=True)
    )
    product = unit * (dp_along - dq_along)
    if reduction != "none":
        product = product.sum(-1) if reduction == "per_token" else product.sum()
    return None, product, *(None,) * 8


_forward_op.register_autograd(_backward, setup_context=_save_for_backward)
_backward_op.register_autograd(_double_backward, setup_context=_save_for_double_backward)


def _compiled_loss(
    p: Tensor,
    q: Tensor,
    labels: Tensor | None,
    weights: Tensor | None,
    normalizer: Tensor | float | None,
    reduction: str,
    ignore_index: int,
    keep_codes: bool,
) -> Tensor:
    is_tensor = isinstance(normalizer, Tensor)
    loss, _, _ = _forward_op(
        p,
        q,
        labels,
        weights,
        normalizer if is_tensor else None,
        None if is_tensor else normalizer,
        reduction,
        ignore_index,
        keep_codes,
    )
    return loss


def forward_with_codes(
    p: Tensor,
    q: Tensor,
    labels: Tensor | None = None,
    *,
    implementation: str = "triton",
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernels' forward as it runs when a gradient is wanted, for tests and measurements.

    Args:
        p, q, labels, reduction, ignore_index, weights, normalizer: as for :func:`tvd_loss`.
        implementation: ``"triton"``, the only one that keeps codes.

    Returns:
        The loss, the per-token values (leading shape, float32), and the packed sign codes
        ``[tokens, ceil(vocab / 2048) * 512]`` (uint8; unspecified in the rows of ignored tokens).
    """
    chosen = choose_implementation(p, q, implementation)
    if chosen != "triton":
        raise ValueError(f"implementation {chosen!r} keeps no codes")
    loss, codes, _, per_token = triton_launch.forward(
        p, q, labels, weights, as_number(normalizer), reduction, ignore_index, True
    )
    assert codes is not None
    return loss, per_token, codes
