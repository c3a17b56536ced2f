"""Clause 10 for logits: refused before anything runs, in both packages' same words."""

from typing import Any

import numpy as np
import pytest

from parity_tests.logits_budget import logits
from parity_tests.routes import Route
from parity_tests.test_clause_10_errors import BAD, IN_RANGE, Bad, constant_words

S, T = logits(2, 8)
LABELS = np.array([1, 2], np.int32)
WEIGHTS = np.ones(2, np.float32)
TOKEN_NAMES = "batchmean, sum, mean, per_token"
FUNCTIONS = ("tvd_from_logits", "acceptance_loss", "hybrid_loss", "cross_entropy_tvd_loss")
IN_WORDS = {"p": "student_logits", "q": "teacher_logits"}


def renamed(words: str) -> str:
    """Words about p and q as words about logits."""
    for short, long in IN_WORDS.items():
        words = words.replace(f"of {short} ", f"of {long} ")
        words = f"{long}{words[1:]}" if words.startswith(f"{short} ") else words
    return words


def call(route: Route, changes: dict[str, Any]) -> None:
    good = {"p": S, "q": T, "labels": LABELS, "weights": WEIGHTS, "function": "tvd_from_logits"}
    arguments = {**good, **changes}
    if np.ndim(arguments["p"]) == 0 or np.shape(arguments["p"]) == (2, 0):
        arguments |= {"labels": None, "weights": None}
    moved = {k: route.array(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    p, q = moved.pop("p"), moved.pop("q")
    route.call(p, q, **moved)


def refused(route: Route, bad: Bad) -> None:
    with pytest.raises(bad.error) as raised:
        call(route, bad.changes)
    assert type(raised.value) is bad.error
    assert str(raised.value) == bad.words


@pytest.mark.parametrize("case", [name for name in BAD if name != "p: float8"])
def test_logits_refused_as_p_and_q_are(logits_route: Route, case: str) -> None:
    bad = BAD[case]
    refused(logits_route, Bad(bad.changes, bad.error, renamed(bad.words)))


def test_the_words_are_of_logits() -> None:
    assert renamed(BAD["q: other rank"].words) == (
        "teacher_logits must have the shape of student_logits (2, 8), got (1, 2, 8)"
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_logits_the_good_call_is_accepted(logits_route: Route, function: str) -> None:
    call(logits_route, {"function": function})
    call(logits_route, {"function": function, "temperature": np.float32(2.0)})
    call(logits_route, {"function": function, "temperature": 3})


def _number(name: str) -> str:
    return f"{name} must be a Python or NumPy number, got"


POSITIVE = IN_RANGE.replace("normalizer", "temperature")
TEMPERATURES = {
    "zero": (0.0, ValueError, f"{POSITIVE}, got 0.0"),
    "negative": (-1, ValueError, f"{POSITIVE}, got -1"),
    "NaN": (float("nan"), ValueError, f"{POSITIVE}, got nan"),
    "inf": (float("inf"), ValueError, f"{POSITIVE}, got inf"),
    "subnormal": (1e-40, ValueError, f"{POSITIVE}, got 1e-40"),
    "too large": (10**400, ValueError, f"{POSITIVE}, got {10**400}"),
    "NumPy's zero": (np.float32(0), ValueError, f"{POSITIVE}, got np.float32(0.0)"),
    "bool": (True, TypeError, f"{_number('temperature')} True"),
    "NumPy's bool": (np.True_, TypeError, f"{_number('temperature')} np.True_"),
    "text": ("1", TypeError, f"{_number('temperature')} '1'"),
    "None": (None, TypeError, f"{_number('temperature')} None"),
    "complex": (1j, TypeError, f"{_number('temperature')} 1j"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("case", TEMPERATURES)
def test_logits_temperature_is_refused(logits_route: Route, function: str, case: str) -> None:
    value, error, words = TEMPERATURES[case]
    refused(logits_route, Bad({"temperature": value, "function": function}, error, words))


def test_logits_temperature_of_a_device_is_refused(logits_route: Route) -> None:
    with pytest.raises(TypeError, match="temperature must be a Python or NumPy number"):
        call(logits_route, {"temperature": logits_route.array(np.ones(2, np.float32))[0]})


FACTORS = (("hybrid_loss", "eta"), ("cross_entropy_tvd_loss", "ce_weight"))
FACTORS += (("cross_entropy_tvd_loss", "tvd_weight"),)


@pytest.mark.parametrize(("function", "name"), FACTORS)
def test_logits_factor_is_refused(logits_route: Route, function: str, name: str) -> None:
    words = f"{name} must be finite in float32 and at least 0, got"
    for value in (-1.0, float("nan"), float("inf"), 1e40):
        changes = {name: value, "function": function}
        refused(logits_route, Bad(changes, ValueError, f"{words} {value!r}"))
    refused(
        logits_route, Bad({name: True, "function": function}, TypeError, _number(name) + " True")
    )
    call(logits_route, {name: 0, "function": function})


@pytest.mark.parametrize("function", FUNCTIONS[1:])
def test_logits_losses_of_tokens_have_no_reduction_none(logits_route: Route, function: str) -> None:
    words = f"reduction must be one of {TOKEN_NAMES}, got 'none'"
    refused(logits_route, Bad({"reduction": "none", "function": function}, ValueError, words))


def test_logits_cross_entropy_needs_labels(logits_route: Route) -> None:
    words = "labels must be a tensor or array, got NoneType"
    changes = {"labels": None, "function": "cross_entropy_tvd_loss"}
    refused(logits_route, Bad(changes, TypeError, words))


def test_logits_kernels_have_no_reduction_none(logits_kernel_route: Route) -> None:
    remedy = {"torch": "eager", "jax": "xla"}[logits_kernel_route.framework]
    words = (
        f"implementation {logits_kernel_route.implementation!r} has no reduction 'none' for "
        f"logits: use implementation {remedy!r}"
    )
    refused(logits_kernel_route, Bad({"reduction": "none"}, ValueError, words))


@pytest.mark.parametrize("name", ["weights", "normalizer"])
def test_logits_no_gradient_for_constants_in_torch(logits_torch_route: Route, name: str) -> None:
    value = {"weights": WEIGHTS, "normalizer": np.array(2.0, np.float32)}[name]
    constant = logits_torch_route.array(value).requires_grad_()
    refused(logits_torch_route, Bad({name: constant}, ValueError, constant_words(name)))


@pytest.mark.parametrize("name", ["weights", "normalizer"])
def test_logits_no_gradient_for_constants_in_jax(logits_jax_route: Route, name: str) -> None:
    import jax

    value = {"weights": WEIGHTS, "normalizer": np.array(2.0, np.float32)}[name]
    s, t, constant = (logits_jax_route.array(x) for x in (S, T, value))

    def loss(constant: Any) -> Any:
        return logits_jax_route.call(s, t, function="tvd_from_logits", **{name: constant})

    with logits_jax_route.running(), pytest.raises(ValueError) as raised:
        jax.grad(loss)(constant)
    assert str(raised.value) == constant_words(name)


def test_logits_other_device_in_torch(logits_torch_route: Route) -> None:
    s, t = logits_torch_route.array(S), logits_torch_route.array(T).to("meta")
    with pytest.raises(ValueError) as raised:
        logits_torch_route.call(s, t, function="tvd_from_logits")
    assert str(raised.value) == (
        f"teacher_logits must be on the device of student_logits ({s.device}), got meta"
    )


def test_logits_only_dense_tensors(logits_torch_route: Route) -> None:
    s, t = logits_torch_route.array(S), logits_torch_route.array(T)
    with pytest.raises(TypeError) as raised:
        logits_torch_route.call(s.to_sparse(), t, function="tvd_from_logits")
    assert str(raised.value) == "student_logits must be a dense tensor, got torch.sparse_coo"


def test_logits_unknown_implementation(logits_route: Route) -> None:
    package = pytest.importorskip(f"tvd_{logits_route.framework}")
    s, t = logits_route.array(S), logits_route.array(T)
    names = {"torch": "triton, eager", "jax": "pallas, triton, xla"}[logits_route.framework]
    with pytest.raises(ValueError) as raised:
        package.tvd_from_logits(s, t, implementation="cuda")
    assert str(raised.value) == f"implementation must be None or one of {names}, got 'cuda'"


def test_logits_kernels_refuse_float64(logits_kernel_route: Route) -> None:
    if logits_kernel_route.framework == "jax":
        pytest.skip("JAX has no float64 outside its 64-bit mode")
    words = "implementation 'triton' takes float32, bfloat16 or float16, got teacher_logits float64"
    with pytest.raises(TypeError) as raised:
        call(logits_kernel_route, {"q": T.astype(np.float64)})
    assert str(raised.value) == words + ": cast it or use implementation 'eager'"


def test_logits_module_checks_its_options() -> None:
    pytest.importorskip("torch")
    import tvd_torch

    for changes, error in (
        ({"temperature": 0}, ValueError),
        ({"temperature": True}, TypeError),
        ({"reduction": "avg"}, ValueError),
        ({"ignore_index": 1.5}, TypeError),
        ({"implementation": "cuda"}, ValueError),
    ):
        with pytest.raises(error):
            tvd_torch.TVDFromLogitsLoss(**changes)
