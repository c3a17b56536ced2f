"""Runs a loss from logits on a route and holds value and gradients against the float64 oracle."""

import math
from typing import Any

import numpy as np

from parity_tests.budget import U32, additions
from parity_tests.logits_budget import budget_of, check_gradient, check_values
from parity_tests.routes import Result, Route
from tvd_core.reference import (
    _divisor,
    _kept_weights,
    logits_reference,
    logits_reference_grad,
    logits_rows_grad_reference,
)


def kept_rows(
    x: np.ndarray, labels: np.ndarray | None, options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Logits with ignored rows 0, and the weight of each token."""
    kept = _kept_weights(
        x.shape[:-1], labels, options.get("ignore_index", -100), options.get("weights")
    )
    return np.where(kept[..., None] == 0, 0.0, x.astype(np.float64)), kept


def check(
    route: Route,
    student: np.ndarray,
    teacher: np.ndarray,
    labels: np.ndarray | None = None,
    *,
    temperature: float = 1.0,
    upstream: Any = 1.0,
    wrt: str = "pq",
    **options: Any,
) -> Result:
    """Value and gradients of ``tvd_from_logits`` inside the budget, for any reduction but none."""
    call = {"temperature": temperature, "upstream": upstream, **options}
    result = route.run(student, teacher, labels, wrt=wrt, function="tvd_from_logits", **call)
    s, kept = kept_rows(student, labels, options)
    t, _ = kept_rows(teacher, labels, options)
    budget = budget_of(s, t, temperature)
    del call["upstream"]
    loss = logits_reference(s, t, labels, **call)
    gradients = logits_reference_grad(s, t, labels, upstream=upstream, **call)
    scale = _scale(kept, student.shape[-1], options)
    errors = budget.gradients(_relative(kept), tvd=upstream * scale)
    _check_loss(result, loss, budget.errors.tvd * kept, kept, student.shape[-1], options)
    _check_gradients(route, result, gradients, errors, (student, teacher), wrt)
    return result


def check_tokens(
    route: Route,
    function: str,
    student: np.ndarray,
    teacher: np.ndarray,
    labels: np.ndarray | None,
    values: Any,
    *,
    temperature: float = 1.0,
    **options: Any,
) -> Result:
    """A loss made of what the rows come to.

    ``values(budget)`` gives the loss of each token, its own error, and its derivatives by name of
    the row's value, of which ``target`` is the derivative by the student's logit / T at the label.
    """
    result = route.run(
        student, teacher, labels, function=function, temperature=temperature, **options
    )
    options = {k: v for k, v in options.items() if k not in ("eta", "ce_weight", "tvd_weight")}
    s, kept = kept_rows(student, labels, options)
    t, _ = kept_rows(teacher, labels, options)
    budget = budget_of(s, t, temperature)
    per_token, own_error, partials = values(budget)
    rows_error = sum(
        np.abs(d) * getattr(budget.errors, n) for n, d in partials.items() if n != "target"
    )
    scale = _scale(kept, student.shape[-1], options)
    upstreams = {n: d * scale for n, d in partials.items() if n != "target"}
    ds, dt = logits_rows_grad_reference(s, t, temperature=temperature, **upstreams)
    relative = _relative(kept) + own_error
    errors = budget.gradients(relative, **upstreams)
    if "target" in partials:
        at = (*np.indices(kept.shape), np.where(kept == 0, 0, labels))
        of_target = partials["target"] * scale / temperature
        ds[at] += of_target
        errors[0][at] += np.abs(of_target) * (relative + 4 * U32)
    selected = [np.where(kept[..., None] == 0, 0.0, x) for x in (ds, dt)]
    tokens = np.where(kept == 0, 0.0, per_token * kept)
    divisor = _divisor(
        kept, student.shape[-1], options.get("reduction", "batchmean"), options.get("normalizer")
    )
    loss = tokens.sum() / divisor if options.get("reduction") != "per_token" else tokens
    error = (rows_error + (own_error + 4 * U32) * np.abs(per_token)) * kept
    _check_loss(result, loss, error, kept, student.shape[-1], options)
    _check_gradients(route, result, tuple(selected), errors, (student, teacher), "pq")
    return result


def _scale(kept: np.ndarray, vocab: int, options: dict[str, Any]) -> np.ndarray:
    divisor = _divisor(
        kept, vocab, options.get("reduction", "batchmean"), options.get("normalizer")
    )
    return kept / (divisor or 1.0)


def _relative(kept: np.ndarray) -> np.ndarray:
    """Of a token's upstream gradient: the divisor's sum, two products, a division."""
    return np.full(kept.shape, U32 * (additions(kept.size) + 4))


def _check_loss(
    result: Result,
    expected: Any,
    error: np.ndarray,
    kept: np.ndarray,
    vocab: int,
    options: dict[str, Any],
) -> None:
    reduction = options.get("reduction", "batchmean")
    error = np.where(kept == 0, 0.0, error)
    if reduction != "per_token":
        divisor = _divisor(kept, vocab, reduction, options.get("normalizer"))
        error = error.sum() / (divisor or 1.0)
    tokens = math.prod(kept.shape)
    error = error + U32 * (2 * additions(tokens) + 4) * np.abs(expected)
    check_values("loss", result.loss, expected, error)


def _check_gradients(
    route: Route,
    result: Result,
    expected: tuple[np.ndarray, ...],
    errors: tuple[np.ndarray, ...],
    arrays: tuple[np.ndarray, np.ndarray],
    wrt: str,
) -> None:
    assert (result.dp is not None, result.dq is not None) == ("p" in wrt, "q" in wrt)
    names = ("dstudent", "dteacher")
    parts = zip(names, (result.dp, result.dq), expected, errors, arrays, strict=True)
    for name, actual, right, error, x in parts:
        if actual is not None:
            assert (actual.dtype, actual.shape) == (x.dtype, x.shape)
            check_gradient(name, actual, right, error, route=route)
