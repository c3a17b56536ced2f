"""Losses from logits for JAX: total variation distance, and what is built on it."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from tvd_core.contract import (
    REDUCTIONS,
    TOKEN_REDUCTIONS,
    as_number,
    check_factor,
    check_labels,
    check_temperature,
    no_elements_message,
)
from tvd_jax import logits_xla, sharded, xla
from tvd_jax.logits_xla import Rows
from tvd_jax.loss import (
    ARRAY_TYPES,
    as_constant,
    check_arrays,
    choose_implementation,
    kept_weights,
)
from tvd_jax.sharded import Axes, AxisName

_NAMES = ("student_logits", "teacher_logits")


class TVDStats(NamedTuple):
    """What the pass over the logits gives for each token beside the loss: the leading shape.

    0 for an ignored token. The temperature is in them, the weights are not.
    """

    per_token: jax.Array
    """Total variation distance."""
    acceptance: jax.Array
    """``1 - per_token``, the acceptance rate of speculative sampling."""
    student_lse: jax.Array
    """``log(sum_v exp(student_logits / temperature))``."""
    teacher_lse: jax.Array
    """``log(sum_v exp(teacher_logits / temperature))``."""


@overload
def tvd_from_logits(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    labels: jax.Array | None = None,
    *,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: jax.Array | None = None,
    normalizer: jax.Array | float | None = None,
    return_stats: Literal[False] = False,
    axis_name: AxisName | None = None,
    token_axis_name: AxisName | None = None,
    implementation: str | None = None,
) -> jax.Array: ...


@overload
def tvd_from_logits(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    labels: jax.Array | None = None,
    *,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: jax.Array | None = None,
    normalizer: jax.Array | float | None = None,
    return_stats: Literal[True],
    axis_name: AxisName | None = None,
    token_axis_name: AxisName | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, TVDStats]: ...


def tvd_from_logits(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    labels: jax.Array | None = None,
    *,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: jax.Array | None = None,
    normalizer: jax.Array | float | None = None,
    return_stats: bool = False,
    axis_name: AxisName | None = None,
    token_axis_name: AxisName | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, TVDStats]:
    """Total variation distance between the softmaxes of logits per token, reduced over the tokens.

    ``p = softmax(student_logits / temperature)``, ``q = softmax(teacher_logits / temperature)``,
    ``loss = tvd_loss(p, q)``; the kernels write neither to memory. With
    ``u = 0.5 * sign(p - q) * scale`` the student's gradient is
    ``p * (u - sum_v p * u) / temperature``, the teacher's ``-q * (u - sum_v q * u) / temperature``,
    each only if it is asked for.

    Args:
        student_logits: ``[..., vocab]``; float32, bfloat16 or float16 (float64: XLA only). -inf
            masks an element, whose probability and gradient are 0. A row of nothing else is NaN.
        teacher_logits: logits with the shape of ``student_logits``; the dtype may differ.
        labels: integers with the leading shape. A token whose label is ``ignore_index`` contributes
            exactly 0 to the loss and gradients, whatever its rows hold; other values are not used.
            ``None`` keeps every token.
        temperature: divides the logits; a positive Python or NumPy number in float32's range.
        reduction: ``"batchmean"``, ``"sum"``, ``"mean"``, ``"none"`` or ``"per_token"``. ``"none"``
            is XLA's only, which ``implementation=None`` then picks.
        ignore_index: the label that marks an ignored token.
        weights: weight of each token, floats with the leading shape; a constant. A weight of 0
            ignores the token.
        normalizer: divisor of ``batchmean`` and ``mean`` in place of the kept weights' sum, as for
            :func:`tvd_loss`.
        return_stats: whether to return ``TVDStats`` too.
        axis_name, token_axis_name: inside ``jax.shard_map``, the mesh axes over which the vocab and
            the tokens are spread, as for :func:`tvd_loss`; labels stay positions in the whole row.
            A few numbers a token are exchanged, never the logits.
        implementation: ``"pallas"``, ``"triton"``, ``"xla"``, or ``None`` to pick by
            device. A named one is used or the call fails.

    Returns:
        float32 (float64 if an input is), of the shape that :func:`tvd_loss` gives it; with
        ``return_stats`` the pair of it and ``TVDStats``, which is differentiable.

    Raises:
        ValueError: a shape, device, temperature, reduction, normalizer, axis or implementation
            does not fit.
        TypeError: something is not an array, or has the wrong type or dtype.

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
        axis_name,
        token_axis_name,
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


def acceptance_loss(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    labels: jax.Array | None = None,
    *,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: jax.Array | None = None,
    normalizer: jax.Array | float | None = None,
    axis_name: AxisName | None = None,
    token_axis_name: AxisName | None = None,
    implementation: str | None = None,
) -> jax.Array:
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
        axis_name,
        token_axis_name,
        implementation,
        TOKEN_REDUCTIONS,
    )
    acceptance = 1 - _rows(call).tvd
    floor = jnp.finfo(acceptance.dtype).eps / 2
    return _reduced(call, -jnp.log(_at_least(acceptance, floor)), reduction)


def hybrid_loss(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    labels: jax.Array | None = None,
    *,
    eta: float = 1.0,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: jax.Array | None = None,
    normalizer: jax.Array | float | None = None,
    axis_name: AxisName | None = None,
    token_axis_name: AxisName | None = None,
    implementation: str | None = None,
) -> jax.Array:
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
        axis_name,
        token_axis_name,
        implementation,
        TOKEN_REDUCTIONS,
    )
    rows = _rows(call, want_kl=True)
    assert rows.kl is not None
    share = jnp.exp(-float(eta) * jnp.maximum(1 - lax.stop_gradient(rows.tvd), 0))
    divergence = jnp.where(share == 0, 0.0, share * rows.kl)  # 0 * inf would be NaN
    return _reduced(call, divergence + (1 - share) * rows.tvd, reduction)


def cross_entropy_tvd_loss(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    labels: jax.Array,
    *,
    ce_weight: float = 1.0,
    tvd_weight: float = 1.0,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    weights: jax.Array | None = None,
    normalizer: jax.Array | float | None = None,
    axis_name: AxisName | None = None,
    token_axis_name: AxisName | None = None,
    implementation: str | None = None,
) -> jax.Array:
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
    check_labels(labels, ARRAY_TYPES)
    call = _checked(
        student_logits,
        teacher_logits,
        labels,
        temperature,
        reduction,
        ignore_index,
        weights,
        normalizer,
        axis_name,
        token_axis_name,
        implementation,
        TOKEN_REDUCTIONS,
    )
    vocab = call.vocab
    given: Any = labels
    if isinstance(given, np.ndarray):  # compared before JAX narrows 64 bits to 32
        given = np.where((given >= 0) & (given < vocab), given, -1).astype(np.int32)
    targets = jnp.asarray(given)
    if targets.dtype.itemsize < 4:  # in which the vocab's size would wrap
        targets = targets.astype(jnp.int32)
    inside = (targets >= 0) & (targets < vocab)
    rows = _rows(call, targets=jnp.where(inside, targets, 0).astype(jnp.int32))
    assert rows.target_logit is not None
    # Of a sure token the difference is rounded: by half a unit in the last place of its logit.
    cross_entropy = _at_least(rows.student_lse - rows.target_logit, 0.0)
    outside = ~inside if call.row_weights is None else ~inside & (call.row_weights != 0)
    cross_entropy = jnp.where(outside, jnp.nan, cross_entropy)
    per_token = float(tvd_weight) * rows.tvd
    if ce_weight:  # 0 * inf would be NaN, and a label's logit may be -inf
        per_token = float(ce_weight) * cross_entropy + per_token
    return _reduced(call, per_token, reduction)


# --- what the losses share -----------------------------------------------------------------------


class _Call(NamedTuple):
    """Checked inputs, of the leading shape, and the functions of the implementation for them."""

    logits: tuple[jax.Array, jax.Array]
    row_weights: jax.Array | None
    normalizer: jax.Array | float | None
    temperature: float
    vocab: int
    """Of a whole row."""
    axes: Axes
    """Over which the vocab and the tokens are spread, inside ``jax.shard_map``."""
    spec: tuple[Any, ...] | None
    """How the logits are spread over a mesh of explicit axes."""
    rows: Callable[..., Rows]
    reduce_tokens: Callable[..., jax.Array]

    def on_shards(
        self, function: Callable[..., Any], arrays: list[Any], out: Any, normalizer: Any = None
    ) -> Any:
        """``function`` of arrays of the leading shape, or that and a vocab; of their shards."""
        if self.spec is None:
            return function(*arrays, normalizer)
        whole, tokens = P(*self.spec), P(*self.spec[:-1])
        specs = [whole if x is not None and x.ndim == len(self.spec) else tokens for x in arrays]
        arguments = [*zip(arrays, specs, strict=True), (normalizer, P())]
        out_specs = {"whole": whole, "tokens": tokens, "scalar": P()}[out]
        return sharded.over_explicit_axes(function, arguments, out_specs)


def _checked(
    student_logits: Any,
    teacher_logits: Any,
    labels: Any,
    temperature: float,
    reduction: str,
    ignore_index: int,
    weights: Any,
    normalizer: Any,
    axis_name: Any,
    token_axis_name: Any,
    implementation: str | None,
    reductions: tuple[str, ...],
) -> _Call:
    check_arrays(
        student_logits,
        teacher_logits,
        labels,
        weights,
        normalizer,
        reduction,
        ignore_index,
        _NAMES,
        reductions,
    )
    check_temperature(temperature)
    axes = sharded.check_axes(axis_name, token_axis_name)
    student, teacher = jnp.asarray(student_logits), jnp.asarray(teacher_logits)
    spec = None if axes else sharded.explicit_spec(student)
    if spec is not None:
        sharded.check_same_spec(_NAMES, (student, teacher), spec)
        axes = sharded.axes_of_spec(spec)
    functions = _functions(student_logits, teacher_logits, implementation, reduction)
    weights = as_constant("weights", weights)
    normalizer = as_constant("normalizer", as_number(normalizer))
    dtype = xla.accumulation_dtype(student, teacher)
    row_weights = kept_weights(labels, weights, int(ignore_index), dtype)
    vocab = student.shape[-1] if spec is not None else axes.vocab_size(student.shape[-1])
    return _Call(
        (student, teacher),
        row_weights,
        normalizer,
        float(temperature),
        vocab,
        axes,
        spec,
        *functions,
    )


def _functions(
    student_logits: Any,
    teacher_logits: Any,
    implementation: str | None,
    reduction: str,
) -> tuple[Callable[..., Rows], Callable[..., jax.Array]]:
    """``rows`` and ``reduce_tokens``: the one place where implementations are looked up."""
    chosen = choose_implementation(student_logits, teacher_logits, implementation, _NAMES)
    if chosen != "xla" and reduction == "none" and implementation is not None:
        raise ValueError(no_elements_message(chosen, "xla"))
    if chosen == "xla" or reduction == "none" or student_logits.size == 0:
        return logits_xla.rows, logits_xla.reduce_tokens
    from tvd_jax import logits_rows

    return (
        functools.partial(logits_rows.rows, implementation=chosen),
        functools.partial(logits_rows.reduce_tokens, implementation=chosen),
    )


def _rows(call: _Call, *, want_kl: bool = False, targets: jax.Array | None = None) -> Rows:
    def of(student: Any, teacher: Any, row_weights: Any, targets: Any, _: Any) -> Rows:
        options = {"want_kl": want_kl, "targets": targets, "axes": call.axes}
        return call.rows(student, teacher, row_weights, call.temperature, **options)

    return call.on_shards(of, [*call.logits, call.row_weights, targets], "tokens")


def _elementwise(call: _Call) -> jax.Array:
    def of(student: Any, teacher: Any, row_weights: Any, _: Any) -> jax.Array:
        return logits_xla.elementwise(student, teacher, row_weights, call.temperature, call.axes)

    return call.on_shards(of, [*call.logits, call.row_weights], "whole")


def _reduced(call: _Call, per_token: jax.Array, reduction: str) -> jax.Array:
    def of(per_token: Any, row_weights: Any, normalizer: Any) -> jax.Array:
        return call.reduce_tokens(
            per_token, row_weights, normalizer, reduction, call.vocab, call.axes
        )

    out = "tokens" if reduction == "per_token" else "scalar"
    return call.on_shards(of, [per_token, call.row_weights], out, call.normalizer)


def _at_least(x: jax.Array, floor: float) -> jax.Array:
    """The value of the larger, the gradient of ``x``: a maximum would have none below."""
    return jnp.where(x < floor, x - lax.stop_gradient(x) + floor, x)


def _stats(call: _Call, rows: Rows) -> TVDStats:
    acceptance = _at_least(1 - rows.tvd, 0.0)  # the distance may round to more than 1
    if call.row_weights is not None:
        acceptance = jnp.where(call.row_weights != 0, acceptance, 0)
    return TVDStats(rows.tvd, acceptance, rows.student_lse, rows.teacher_lse)
