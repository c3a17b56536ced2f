"""Losses from logits for PyTorch: total variation distance, and what is built on it."""

import math
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from tvd_core.contract import (
    NORMALIZED_REDUCTIONS,
    REDUCTIONS,
    TOKEN_REDUCTIONS,
    check_factor,
    check_ignore_index,
    check_implementation,
    check_labels,
    check_reduction,
    check_temperature,
    no_elements_message,
)
from tvd_torch import eager, logits_eager, sharded
from tvd_torch.logits_eager import Rows
from tvd_torch.loss import (
    IMPLEMENTATIONS,
    checked_normalizer,
    choose_implementation,
    comparable,
    kept_weights,
    saveable,
)

_NAMES = ("student_logits", "teacher_logits")


class TVDStats(NamedTuple):
    """What the pass over the logits gives for each token beside the loss: the leading shape.

    0 for an ignored token. The temperature is in them, the weights are not.
    """

    per_token: Tensor
    """Total variation distance."""
    acceptance: Tensor
    """``1 - per_token``, the acceptance rate of speculative sampling."""
    student_lse: Tensor
    """``log(sum_v exp(student_logits / temperature))``."""
    teacher_lse: Tensor
    """``log(sum_v exp(teacher_logits / temperature))``."""


@overload
def tvd_from_logits(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    return_stats: Literal[False] = False,
    vocab_group: Any = None,
    token_group: Any = None,
    implementation: str | None = None,
) -> Tensor: ...


@overload
def tvd_from_logits(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    return_stats: Literal[True],
    vocab_group: Any = None,
    token_group: Any = None,
    implementation: str | None = None,
) -> tuple[Tensor, TVDStats]: ...


def tvd_from_logits(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    return_stats: bool = False,
    vocab_group: Any = None,
    token_group: Any = None,
    implementation: str | None = None,
) -> Tensor | tuple[Tensor, TVDStats]:
    """Total variation distance between the softmaxes of logits per token, reduced over the tokens.

    ``p = softmax(student_logits / temperature)``, ``q = softmax(teacher_logits / temperature)``,
    ``loss = tvd_loss(p, q)``; the kernels write neither to memory. With
    ``u = 0.5 * sign(p - q) * scale`` the student's gradient is
    ``p * (u - sum_v p * u) / temperature``, the teacher's ``-q * (u - sum_v q * u) / temperature``,
    each only if it is asked for.

    Args:
        student_logits: ``[..., vocab]``; float32, bfloat16 or float16 (float64: eager only). -inf
            masks an element, whose probability and gradient are 0. A row of nothing else is NaN.
        teacher_logits: logits with the shape of ``student_logits``; the dtype may differ.
        labels: integers with the leading shape. A token whose label is ``ignore_index`` contributes
            exactly 0 to the loss and gradients, whatever its rows hold; other values are not used.
            ``None`` keeps every token.
        temperature: divides the logits; a positive Python or NumPy number in float32's range.
        reduction: ``"batchmean"``, ``"sum"``, ``"mean"``, ``"none"`` or ``"per_token"``. ``"none"``
            is eager's only, which ``implementation=None`` then picks.
        ignore_index: the label that marks an ignored token.
        weights: weight of each token, floats with the leading shape; a constant. A weight of 0
            ignores the token.
        normalizer: divisor of ``batchmean`` and ``mean`` in place of the kept weights' sum, as for
            :func:`tvd_loss`.
        return_stats: whether to return ``TVDStats`` too.
        vocab_group: process group whose processes hold the other columns of these tokens' rows, as
            for :func:`tvd_loss`, in the order of its ranks. Maxima and sums are all-reduced, a few
            numbers a token; the logits stay where they are.
        token_group: process group whose processes hold other tokens, as for :func:`tvd_loss`.
        implementation: ``"triton"`` (CUDA GPUs), ``"eager"``, or ``None`` to pick by
            device. A named one is used or the call fails.

    Returns:
        float32 (float64 if an input is), of the shape that :func:`tvd_loss` gives it; with
        ``return_stats`` the pair of it and ``TVDStats``, which is differentiable. What groups and
        DTensors give is as for :func:`tvd_loss`; ``TVDStats`` are those of the local tokens.

    Raises:
        ValueError: a shape, device, mesh, temperature, reduction, normalizer or implementation does
            not fit.
        TypeError: something is not a dense tensor, or has the wrong type or dtype.

    Source: as for :func:`tvd_loss`.
    """
    call = _checked(
        student_logits,
        teacher_logits,
        labels,
        temperature,
        reduction,
        ignore_index,
        weights,
        normalizer,
        (vocab_group, token_group),
        implementation,
        REDUCTIONS,
    )
    rows = None if reduction == "none" and not return_stats else _rows(call)
    if reduction == "none":
        loss = _elementwise(call)
    else:
        assert rows is not None
        loss = _reduced(call, rows.tvd, reduction)
    return loss if rows is None or not return_stats else (loss, _stats(call, rows))


class TVDFromLogitsLoss(torch.nn.Module):
    """``tvd_from_logits`` as a module.

    ``loss = 0.5 * sum_v |softmax(s / temperature) - softmax(t / temperature)|`` per token, reduced;
    see :func:`tvd_from_logits`.

    Args:
        temperature: divides the logits.
        reduction: ``"batchmean"``, ``"sum"``, ``"mean"``, ``"none"`` or ``"per_token"``.
        ignore_index: the label that marks an ignored token.
        implementation: ``"triton"``, ``"eager"``, or ``None`` to pick by device.
        vocab_group, token_group: process groups, as for :func:`tvd_from_logits`.

    Raises:
        ValueError: a temperature out of range, an unknown reduction or implementation.
        TypeError: ``temperature`` is not a number, ``ignore_index`` not an int, or a group not a
            process group.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        implementation: str | None = None,
        *,
        vocab_group: Any = None,
        token_group: Any = None,
    ) -> None:
        super().__init__()
        check_temperature(temperature)
        check_reduction(reduction)
        check_ignore_index(ignore_index)
        check_implementation(implementation, IMPLEMENTATIONS)
        sharded.check_groups(vocab_group, token_group)
        self.temperature = temperature
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.vocab_group, self.token_group = vocab_group, token_group
        self.implementation = implementation

    def forward(
        self,
        student_logits: Tensor,
        teacher_logits: Tensor,
        labels: Tensor | None = None,
        *,
        weights: Tensor | None = None,
        normalizer: Tensor | float | None = None,
    ) -> Tensor:
        """Returns ``tvd_from_logits(student_logits, ...)`` with this module's options."""
        return tvd_from_logits(
            student_logits,
            teacher_logits,
            labels,
            temperature=self.temperature,
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
            f"temperature={self.temperature!r}, reduction={self.reduction!r}, "
            f"ignore_index={self.ignore_index}, implementation={self.implementation!r}"
        )


def acceptance_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    vocab_group: Any = None,
    token_group: Any = None,
    implementation: str | None = None,
) -> Tensor:
    """Negative logarithm of the acceptance rate: ``-log(1 - tvd_t)`` per token, reduced.

    The acceptance rate counts as at least half an epsilon, 2**-24 (2**-53 in float64), the smallest
    that ``1 - tvd`` can be beside 0. So the loss is at most 16.7 a token, and where the
    distributions overlap by less its gradient is that of the distance times 2**24: finite, and not
    cut off.

    Arguments that are not listed are those of :func:`tvd_from_logits`.

    Args:
        reduction: ``"batchmean"``, ``"sum"``, ``"mean"`` or ``"per_token"``.

    Returns:
        float32 (float64 if an input is), of the leading shape for ``per_token``, else 0-d.

    Raises:
        ValueError: as :func:`tvd_from_logits`.
        TypeError: likewise.

    Source: Samarin et al., "LK Losses: Direct Acceptance Rate Optimization for Speculative
    Decoding", arXiv 2602.23881.
    """
    call = _checked(
        student_logits,
        teacher_logits,
        labels,
        temperature,
        reduction,
        ignore_index,
        weights,
        normalizer,
        (vocab_group, token_group),
        implementation,
        TOKEN_REDUCTIONS,
    )
    acceptance = 1 - _rows(call).tvd
    floor = torch.finfo(acceptance.dtype).eps / 2
    return _reduced(call, -torch.log(_at_least(acceptance, floor)), reduction)


def hybrid_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    *,
    eta: float = 1.0,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    vocab_group: Any = None,
    token_group: Any = None,
    implementation: str | None = None,
) -> Tensor:
    """KL divergence where the draft is far from the teacher, the distance where it is near.

    ``lambda_t * kl_t + (1 - lambda_t) * tvd_t`` per token, reduced, with
    ``kl_t = sum_v q * (log q - log p)`` of teacher ``q`` and student ``p``, and
    ``lambda_t = exp(-eta * (1 - tvd_t))``, which counts as constant in the gradient.

    Terms where ``q`` is 0 are 0; a student logit of -inf where ``q`` is not makes the token inf.
    The gradient of the divergence takes the teacher's probabilities, so the teacher's logits are
    kept for the backward, which ``tvd_from_logits`` need not do.

    Arguments that are not listed are those of :func:`tvd_from_logits`.

    Args:
        eta: how fast the divergence fades as the acceptance rate grows; a number from 0 on.
        reduction: ``"batchmean"``, ``"sum"``, ``"mean"`` or ``"per_token"``.

    Returns:
        float32 (float64 if an input is), of the leading shape for ``per_token``, else 0-d.

    Raises:
        ValueError: as :func:`tvd_from_logits`; ``eta`` is not such a number.
        TypeError: likewise.

    Source: Samarin et al., "LK Losses: Direct Acceptance Rate Optimization for Speculative
    Decoding", arXiv 2602.23881.
    """
    check_factor("eta", eta)
    call = _checked(
        student_logits,
        teacher_logits,
        labels,
        temperature,
        reduction,
        ignore_index,
        weights,
        normalizer,
        (vocab_group, token_group),
        implementation,
        TOKEN_REDUCTIONS,
    )
    rows = _rows(call, want_kl=True)
    assert rows.kl is not None
    share = torch.exp(-float(eta) * (1 - rows.tvd.detach()).clamp(min=0))
    divergence = torch.where(share == 0, 0.0, share * rows.kl)  # 0 * inf would be NaN
    return _reduced(call, divergence + (1 - share) * rows.tvd, reduction)


def cross_entropy_tvd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    *,
    ce_weight: float = 1.0,
    tvd_weight: float = 1.0,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    vocab_group: Any = None,
    token_group: Any = None,
    implementation: str | None = None,
) -> Tensor:
    """Cross entropy of the student on hard labels and the distance to the teacher, in one pass.

    ``ce_weight * ce_t + tvd_weight * tvd_t`` per token, reduced, with
    ``ce_t = -log(softmax(student_logits / temperature)[label_t])``. The temperature is that of the
    distance, because both come from one softmax.

    Arguments that are not listed are those of :func:`tvd_from_logits`.

    Args:
        labels: integers with the leading shape, ``ignore_index`` or a position in the vocab. The
            loss of a token with another label is NaN.
        ce_weight: factor of the cross entropy, a number from 0 on; with 0 it is left out.
        tvd_weight: factor of the distance, a number from 0 on.
        reduction: ``"batchmean"``, ``"sum"``, ``"mean"`` or ``"per_token"``.

    Returns:
        float32 (float64 if an input is), of the leading shape for ``per_token``, else 0-d.

    Raises:
        ValueError: as :func:`tvd_from_logits`; a weight is not such a number.
        TypeError: likewise.
    """
    check_factor("ce_weight", ce_weight)
    check_factor("tvd_weight", tvd_weight)
    check_labels(labels, Tensor)
    call = _checked(
        student_logits,
        teacher_logits,
        labels,
        temperature,
        reduction,
        ignore_index,
        weights,
        normalizer,
        (vocab_group, token_group),
        implementation,
        TOKEN_REDUCTIONS,
    )
    assert call.labels is not None
    vocab: Any = call.logits[0].shape[1]
    if call.shards is not None:
        vocab = sharded.vocab_size(vocab, call.shards, call.labels.device)
    targets = call.labels.reshape(-1).to(torch.int64)
    inside = (targets >= 0) & (targets < vocab)
    rows = _rows(call, targets=torch.where(inside, targets, 0))
    assert rows.target_logit is not None
    # Of a sure token the difference is rounded: by half a unit in the last place of its logit.
    cross_entropy = _at_least(rows.student_lse - rows.target_logit, 0.0)
    outside = ~inside if call.row_weights is None else ~inside & (call.row_weights != 0)
    cross_entropy = torch.where(outside, torch.nan, cross_entropy)
    per_token = float(tvd_weight) * rows.tvd
    if ce_weight:  # 0 * inf would be NaN, and a label's logit may be -inf
        per_token = float(ce_weight) * cross_entropy + per_token
    return _reduced(call, per_token, reduction)


# --- what the losses share -----------------------------------------------------------------------


class _Call(NamedTuple):
    """Checked inputs as rows of logits, and the module of the implementation that takes them."""

    logits: tuple[Tensor, Tensor]
    labels: Tensor | None
    row_weights: Tensor | None
    normalizer: Tensor | float | None
    temperature: float
    leading: torch.Size
    module: Any
    shards: sharded.Shards | None


def _checked(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None,
    temperature: float,
    reduction: str,
    ignore_index: int,
    weights: Tensor | None,
    normalizer: Tensor | float | None,
    groups: tuple[Any, Any],
    implementation: str | None,
    reductions: tuple[str, ...],
) -> _Call:
    is_sharded = sharded.is_sharded(student_logits, teacher_logits, *groups)
    normalizer = checked_normalizer(
        student_logits,
        teacher_logits,
        labels,
        weights,
        normalizer,
        reduction,
        ignore_index,
        _NAMES,
        reductions,
        groups[0] is not None,
    )
    check_temperature(temperature)
    shards = None
    if is_sharded:
        shards = sharded.of(student_logits, teacher_logits, _NAMES, *groups)
        student_logits, teacher_logits, labels, weights, normalizer = (
            sharded.local(x, shards.layout)
            for x in (student_logits, teacher_logits, labels, weights, normalizer)
        )
    module = _module(student_logits, teacher_logits, implementation, reduction)
    if torch.is_grad_enabled() and (student_logits.requires_grad or teacher_logits.requires_grad):
        labels, weights = saveable(labels, weights)
    dtype = eager.accumulation_dtype(student_logits, teacher_logits)
    known = comparable(labels, int(ignore_index))
    row_weights = kept_weights(known, weights, int(ignore_index), dtype)
    tokens, vocab = math.prod(student_logits.shape[:-1]), student_logits.shape[-1]
    return _Call(
        (student_logits.reshape(tokens, vocab), teacher_logits.reshape(tokens, vocab)),
        labels,
        None if row_weights is None else row_weights.reshape(tokens),
        normalizer,
        float(temperature),
        student_logits.shape[:-1],
        module,
        shards,
    )


def _module(
    student_logits: Tensor, teacher_logits: Tensor, implementation: str | None, reduction: str
) -> Any:
    """The module of the implementation: the one place where that is looked up."""
    chosen = choose_implementation(student_logits, teacher_logits, implementation, _NAMES)
    if chosen != "eager" and reduction == "none" and implementation is not None:
        raise ValueError(no_elements_message(chosen, "eager"))
    if chosen == "eager" or reduction == "none":
        return logits_eager
    from tvd_torch import logits_rows

    return logits_rows


def _rows(call: _Call, *, want_kl: bool = False, targets: Tensor | None = None) -> Rows:
    options: dict[str, Any] = {"want_kl": want_kl, "targets": targets}
    of_rows = (*call.logits, call.row_weights, call.temperature)
    rows: Rows
    if call.shards is not None and call.shards.vocab:
        rows = sharded.rows(*of_rows, call.shards, call.module is not logits_eager, **options)
    else:
        rows = call.module.rows(*of_rows, **options)
    return rows


def _reduced(call: _Call, per_token: Tensor, reduction: str) -> Tensor:
    vocab = call.logits[0].shape[1]
    inner = reduction
    if call.shards is not None and reduction in NORMALIZED_REDUCTIONS:
        inner = "sum"  # of the local tokens
    normalizer = call.normalizer if inner == reduction else None
    x: Tensor = call.module.reduce_tokens(per_token, call.row_weights, normalizer, inner, vocab)
    if reduction == "per_token":
        x = x.reshape(call.leading)
    elif call.shards is not None:
        tokens = per_token.numel()
        constants = (call.row_weights, tokens, call.normalizer)
        x = sharded.reduced(x, *constants, reduction, vocab, call.shards)
    return x if call.shards is None else sharded.wrapped(x, call.shards)


def _elementwise(call: _Call) -> Tensor:
    shape = (*call.leading, call.logits[0].shape[1])
    if call.shards is None:
        elements = logits_eager.elementwise(*call.logits, call.row_weights, call.temperature)
        return elements.reshape(shape)
    elements = sharded.elementwise(
        *call.logits, call.row_weights, call.temperature, call.shards.vocab
    )
    return sharded.wrapped(elements.reshape(shape), call.shards)


def _at_least(x: Tensor, floor: float) -> Tensor:
    """The value of the larger, the gradient of ``x``: a maximum would have none below."""
    return torch.where(x < floor, x - x.detach() + floor, x)


def _stats(call: _Call, rows: Rows) -> TVDStats:
    acceptance = _at_least(1 - rows.tvd, 0.0)  # the distance may round to more than 1
    if call.row_weights is not None:
        acceptance = torch.where(call.row_weights != 0, acceptance, 0.0)
    values = (rows.tvd, acceptance, rows.student_lse, rows.teacher_lse)
    shaped = (x.reshape(call.leading) for x in values)
    if call.shards is not None:
        return TVDStats(*(sharded.wrapped(x, call.shards) for x in shaped))
    return TVDStats(*shaped)
