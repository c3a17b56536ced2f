"""Contract clause 10: bad input is refused before anything runs, in both packages' same words."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from parity_tests import child, inputs, routes
from parity_tests.routes import Route
from parity_tests.x64 import enable_x64

P, Q = inputs.rows(2, 8)
LABELS = np.array([1, 2], np.int32)
WEIGHTS = np.ones(2, np.float32)
NAMES = "batchmean, sum, mean, none, per_token"
FLOATS = "float32, bfloat16, float16 or float64"
IN_RANGE = "normalizer must be positive and in float32's range (1.2e-38 to 3.4e38)"


def _floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@dataclasses.dataclass(frozen=True)
class Bad:
    """Changes to a good call, and the error they have to end in."""

    changes: dict[str, Any]
    error: type[Exception]
    words: str


BAD = {
    "q: vocab longer": Bad(
        {"p": _floats(2, 8), "q": _floats(2, 16)},
        ValueError,
        "q must have the shape of p (2, 8), got (2, 16)",
    ),
    "q: vocab shorter": Bad(
        {"q": _floats(2, 4)}, ValueError, "q must have the shape of p (2, 8), got (2, 4)"
    ),
    "q: one row, no broadcast": Bad(
        {"q": _floats(1, 8)}, ValueError, "q must have the shape of p (2, 8), got (1, 8)"
    ),
    "q: other rank": Bad(
        {"q": _floats(1, 2, 8)}, ValueError, "q must have the shape of p (2, 8), got (1, 2, 8)"
    ),
    "p: 0-d": Bad(
        {"p": _floats(), "q": _floats()}, ValueError, "p must have shape [..., vocab], got shape ()"
    ),
    "p: no vocab": Bad(
        {"p": _floats(2, 0), "q": _floats(2, 0)},
        ValueError,
        "p must have a vocab of at least 1, got shape (2, 0)",
    ),
    "p: integers": Bad({"p": P.astype(np.int32)}, TypeError, f"p must be {FLOATS}, got int32"),
    "q: bool": Bad({"q": Q > 0}, TypeError, f"q must be {FLOATS}, got bool"),
    "q: complex": Bad(
        {"q": Q.astype(np.complex64)}, TypeError, f"q must be {FLOATS}, got complex64"
    ),
    "p: float8": Bad(
        {"p": P.astype(ml_dtypes.float8_e4m3fn)},
        TypeError,
        f"p must be {FLOATS}, got float8_e4m3fn",
    ),
    "p: a list": Bad({"p": [[0.5, 0.5]]}, TypeError, "p must be a tensor or array, got list"),
    "q: None": Bad({"q": None}, TypeError, "q must be a tensor or array, got NoneType"),
    "labels: bool": Bad(
        {"labels": LABELS > 1},
        TypeError,
        "labels must be int8, int16, int32, int64, uint8, uint16, uint32 or uint64, got bool",
    ),
    "labels: float": Bad(
        {"labels": LABELS.astype(np.float32)},
        TypeError,
        "labels must be int8, int16, int32, int64, uint8, uint16, uint32 or uint64, got float32",
    ),
    "labels: shape of p": Bad(
        {"labels": np.zeros((2, 8), np.int32)},
        ValueError,
        "labels must have the leading shape of p (2,), got (2, 8)",
    ),
    "labels: too few": Bad(
        {"labels": np.zeros(1, np.int32)},
        ValueError,
        "labels must have the leading shape of p (2,), got (1,)",
    ),
    "labels: a list": Bad(
        {"labels": [1, 2]}, TypeError, "labels must be a tensor or array, got list"
    ),
    "weights: integers": Bad(
        {"weights": np.ones(2, np.int32)}, TypeError, f"weights must be {FLOATS}, got int32"
    ),
    "weights: per element": Bad(
        {"weights": np.ones((2, 8), np.float32)},
        ValueError,
        "weights must have the leading shape of p (2,), got (2, 8)",
    ),
    "weights: a number": Bad(
        {"weights": 2.0}, TypeError, "weights must be a tensor or array, got float"
    ),
    "reduction: unknown": Bad(
        {"reduction": "avg"}, ValueError, f"reduction must be one of {NAMES}, got 'avg'"
    ),
    "reduction: None": Bad(
        {"reduction": None}, ValueError, f"reduction must be one of {NAMES}, got None"
    ),
    "ignore_index: float": Bad(
        {"ignore_index": 1.5}, TypeError, "ignore_index must be an int, got 1.5"
    ),
    "ignore_index: bool": Bad(
        {"ignore_index": True}, TypeError, "ignore_index must be an int, got True"
    ),
    "ignore_index: too large": Bad(
        {"ignore_index": 2**63},
        ValueError,
        "ignore_index must fit in 64 bits, got 9223372036854775808",
    ),
    "normalizer: with sum": Bad(
        {"normalizer": 3.0, "reduction": "sum"},
        ValueError,
        "normalizer applies to reduction batchmean or mean only, got reduction 'sum'",
    ),
    "normalizer: zero": Bad({"normalizer": 0}, ValueError, f"{IN_RANGE}, got 0"),
    "normalizer: negative": Bad({"normalizer": -2.5}, ValueError, f"{IN_RANGE}, got -2.5"),
    "normalizer: NaN": Bad({"normalizer": float("nan")}, ValueError, f"{IN_RANGE}, got nan"),
    "normalizer: inf": Bad({"normalizer": float("inf")}, ValueError, f"{IN_RANGE}, got inf"),
    "normalizer: 0 in float32": Bad({"normalizer": 1e-50}, ValueError, f"{IN_RANGE}, got 1e-50"),
    "normalizer: subnormal": Bad({"normalizer": 1e-40}, ValueError, f"{IN_RANGE}, got 1e-40"),
    "normalizer: inf in float32": Bad({"normalizer": 1e40}, ValueError, f"{IN_RANGE}, got 1e+40"),
    "normalizer: inf in float64": Bad(
        {"normalizer": 10**400}, ValueError, f"{IN_RANGE}, got {10**400}"
    ),
    "normalizer: NumPy's, too small": Bad(
        {"normalizer": np.float64(1e-50)}, ValueError, f"{IN_RANGE}, got np.float64(1e-50)"
    ),
    "normalizer: text": Bad(
        {"normalizer": "4"}, TypeError, "normalizer must be a number or a 0-d array, got '4'"
    ),
    "normalizer: bool": Bad(
        {"normalizer": True}, TypeError, "normalizer must be a number or a 0-d array, got True"
    ),
    "normalizer: 1-d": Bad(
        {"normalizer": _floats(1)},
        ValueError,
        "normalizer must be a number or a 0-d array, got shape (1,)",
    ),
    "normalizer: bool array": Bad(
        {"normalizer": np.array(True)},
        TypeError,
        "normalizer must have a real dtype (float or integer), got bool",
    ),
}


def call(route: Route, changes: dict[str, Any]) -> None:
    """A call that is good but for the changes, through the route's package."""
    arguments = {"p": P, "q": Q, "labels": LABELS, "weights": WEIGHTS, **changes}
    if np.ndim(arguments["p"]) == 0 or np.shape(arguments["p"]) == (2, 0):
        arguments |= {"labels": None, "weights": None}
    moved = {k: _move(route, v) for k, v in arguments.items()}
    route.call(**moved)


def _move(route: Route, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if route.framework == "torch" and value.dtype == ml_dtypes.float8_e4m3fn:
        import torch

        return torch.from_numpy(value.view(np.uint8).copy()).view(torch.float8_e4m3fn)
    return route.array(value)


NUMPY_NORMALIZERS = {
    "too large": Bad({"normalizer": np.array(1e40)}, ValueError, f"{IN_RANGE}, got array(1.e+40)"),
    "1-d": Bad(
        {"normalizer": np.ones(1)},
        ValueError,
        "normalizer must be a number or a 0-d array, got shape (1,)",
    ),
    "bool": Bad(
        {"normalizer": np.True_},
        TypeError,
        "normalizer must have a real dtype (float or integer), got bool",
    ),
}


@pytest.mark.parametrize("case", NUMPY_NORMALIZERS)
def test_clause_10_numpy_normalizer(route: Route, case: str) -> None:
    """NumPy's own arrays, which PyTorch takes for the normalizer too: their value is looked at."""
    bad = NUMPY_NORMALIZERS[case]
    with pytest.raises(bad.error) as raised:
        route.call(route.array(P), route.array(Q), **bad.changes)
    assert str(raised.value) == bad.words


def test_clause_10_normalizer_of_float64_inputs_has_the_range_of_float32() -> None:
    for name in ("torch-eager", "jax-xla"):
        route = routes.get(name)
        if route.can_run:
            with enable_x64() if route.framework == "jax" else contextlib.nullcontext():
                p, q = (route.array(x.astype(np.float64)) for x in (P, Q))
                with pytest.raises(ValueError) as raised:
                    route.call(p, q, normalizer=1e-50)
            assert str(raised.value) == f"{IN_RANGE}, got 1e-50"


ARGUMENTS = ("p", "q", "labels", "weights", "normalizer")
NOT_DENSE = [(kind, name) for kind in ("sparse_coo", "nested", "jagged") for name in ARGUMENTS]
NOT_DENSE += [(kind, name) for kind in ("sparse_csr", "_mkldnn") for name in ("p", "q")]


def _not_dense(torch: Any, x: Any, kind: str) -> Any:
    if kind == "_mkldnn":
        return x.cpu().to_mkldnn()
    if kind in ("nested", "jagged"):
        layout = torch.jagged if kind == "jagged" else torch.strided
        return torch.nested.nested_tensor([P[0], P[1]], layout=layout)
    return x.to_sparse(layout=getattr(torch, kind))


@pytest.mark.filterwarnings("ignore:.*beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning")
@pytest.mark.parametrize(("kind", "name"), NOT_DENSE)
def test_clause_10_only_dense_tensors(torch_route: Route, kind: str, name: str) -> None:
    import torch

    good = {"p": P, "q": Q, "labels": LABELS, "weights": WEIGHTS, "normalizer": _floats()}
    arguments = {k: torch_route.array(v) for k, v in good.items()}
    arguments[name] = _not_dense(torch, arguments[name], kind)
    with pytest.raises(TypeError) as raised:
        torch_route.call(**arguments)
    words = "a nested tensor" if kind in ("nested", "jagged") else f"torch.{kind}"
    assert str(raised.value) == f"{name} must be a dense tensor, got {words}"


def test_clause_10_quantized_tensor(torch_route: Route) -> None:
    import torch

    p, q = torch_route.array(P), torch_route.array(Q)
    for name in ("p", "q"):
        quantized = {"p": p, "q": q, name: _quantized(torch, P)}
        with pytest.raises(TypeError) as raised:
            torch_route.call(**quantized)
        assert str(raised.value) == f"{name} must be {FLOATS}, got qint8"


def _quantized(torch: Any, x: np.ndarray) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in the wild
        return torch.quantize_per_tensor(torch.from_numpy(x), 0.1, 0, torch.qint8)


@pytest.mark.parametrize("name", ["p", "q"])
def test_clause_10_sparse_jax_array(jax_route: Route, name: str) -> None:
    from jax.experimental import sparse

    arguments = {"p": jax_route.array(P), "q": jax_route.array(Q)}
    arguments[name] = sparse.BCOO.fromdense(arguments[name])
    with pytest.raises(TypeError) as raised:
        jax_route.call(**arguments)
    assert str(raised.value) == f"{name} must be a tensor or array, got BCOO"


@pytest.mark.parametrize("case", BAD)
def test_clause_10_refused_with_these_words(route: Route, case: str) -> None:
    bad = BAD[case]
    with pytest.raises(bad.error) as raised:
        call(route, bad.changes)
    assert type(raised.value) is bad.error
    assert str(raised.value) == bad.words


def test_clause_10_the_good_call_is_accepted(route: Route) -> None:
    call(route, {})


def _message(package: str, code: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, TypeError)) as raised:
        code()
    return str(raised.value).replace(package, "PACKAGE")


def test_clause_10_unknown_implementation() -> None:
    for framework, names in (("torch", "triton, eager"), ("jax", "pallas, triton, xla")):
        for route in routes.runnable(framework)[:1]:
            package = pytest.importorskip(f"tvd_{framework}")
            p, q = route.array(P), route.array(Q)
            message = _message(
                package.__name__,
                lambda: package.tvd_loss(p, q, implementation="cuda"),  # noqa: B023
            )
            assert message == f"implementation must be None or one of {names}, got 'cuda'"


def test_clause_10_no_gradient_for_constants_in_torch(torch_route: Route) -> None:
    p, q = torch_route.array(P), torch_route.array(Q)
    for name, value in (("weights", WEIGHTS), ("normalizer", np.array(2.0, np.float32))):
        constant = torch_route.array(value).requires_grad_()
        with pytest.raises(ValueError) as raised:
            torch_route.call(p, q, **{name: constant})
        assert str(raised.value) == constant_words(name)


def test_clause_10_no_gradient_for_constants_in_jax(jax_route: Route) -> None:
    import jax

    p, q = jax_route.array(P), jax_route.array(Q)
    for name, value in (("weights", WEIGHTS), ("normalizer", np.array(2.0, np.float32))):
        constant = jax_route.array(value)
        with jax_route.running(), pytest.raises(ValueError) as raised:
            jax.grad(lambda c: jax_route.call(p, q, **{name: c}))(constant)  # noqa: B023
        assert str(raised.value) == constant_words(name)


def constant_words(name: str) -> str:
    return (
        f"{name} is a constant of this loss and has no gradient: detach it first "
        "(PyTorch: .detach(), JAX: jax.lax.stop_gradient)"
    )


@pytest.mark.parametrize("name", ["q", "labels", "weights", "normalizer"])
def test_clause_10_other_device_in_torch(torch_route: Route, name: str) -> None:
    values = {
        "q": Q,
        "labels": LABELS,
        "weights": WEIGHTS,
        "normalizer": np.array(2.0, np.float32),
    }
    arguments = {k: torch_route.array(v) for k, v in values.items()}
    arguments[name] = arguments[name].to("meta")
    p = torch_route.array(P)
    with pytest.raises(ValueError) as raised:
        torch_route.call(p, **arguments)
    assert str(raised.value) == f"{name} must be on the device of p ({p.device}), got meta"


def test_clause_10_other_device_in_jax() -> None:
    pytest.importorskip("jax")
    out = child.run(
        """
        import jax, jax.numpy as jnp, tvd_jax
        one, two = jax.devices()
        p = jax.device_put(jnp.ones((2, 8)), one)
        other = {
            "q": jnp.ones((2, 8)), "labels": jnp.ones(2, jnp.int32), "weights": jnp.ones(2),
            "normalizer": jnp.float32(2),
        }
        for name, value in other.items():
            arguments = {k: jax.device_put(v, two if k == name else one) for k, v in other.items()}
            try:
                tvd_jax.tvd_loss(p, **arguments)
            except ValueError as error:
                print(str(error).replace(str(one), "ONE").replace(str(two), "TWO"))
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        JAX_PLATFORMS="cpu",
    )
    names = ("q", "labels", "weights", "normalizer")
    expected = [f"{name} must be on the device of p (ONE), got TWO" for name in names]
    assert out.splitlines() == expected
