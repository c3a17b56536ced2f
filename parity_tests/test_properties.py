"""Properties over drawn shapes, dtypes, strides, labels, ties, NaN, Inf and denormals."""

import dataclasses
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis.extra import numpy as npst

from parity_tests import inputs, oracle, routes
from parity_tests.oracle import assert_same_bits
from parity_tests.routes import Route
from tvd_core.contract import REDUCTIONS
from tvd_core.reference import pack_codes, per_token_float32, unpack_codes

# An interpreted Triton launch takes 15-30 ms a tile; Pallas's interpreter traces every new shape
# for a second, so it draws from few shapes.
EXAMPLES = {"interpreted": 12, "other": 60}
VOCABS = (1, 3, 511, 513, 2049)
LEADING = ((), (1,), (3,), (2, 2))
PALLAS_SHAPES = (((3,), 3), ((2,), 513))

# Exact in all three dtypes: ties across dtypes, both zeros, the largest and the smallest float16.
SPECIAL = (0.0, -0.0, 0.25, 0.5, 1.0, -1.0, 65504.0, 2.0**-14, 2.0**-24)
NOT_FINITE = (np.nan, np.inf, -np.inf)
# Denormal in float32 and bfloat16, not in float16. Compiled kernels and eager PyTorch keep them. On
# a CPU, XLA flushes them to 0, and Triton's interpreter turns bfloat16's into another number.
DENORMAL = (2.0**-133, 3 * 2.0**-133)


def transposed(x: Any) -> Any:
    return x.T


def every_second(x: Any) -> Any:
    return x[..., ::2]


def offset(x: Any) -> Any:
    return x[..., 1:]


@dataclasses.dataclass
class Call:
    """One call of ``tvd_loss`` and the layout through which it sees its inputs."""

    p: np.ndarray
    q: np.ndarray
    layout: Any
    options: dict[str, Any]
    upstream: np.ndarray


def examples(route: Route) -> settings:
    return settings(
        max_examples=EXAMPLES["interpreted" if route.interpreted else "other"],
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def keeps_denormals(route: Route, dtype: str) -> bool:
    if dtype == "float16":
        return False
    if route.compiled_on_gpu or route.name == "torch-eager":
        return True
    return route.name == "torch-triton" and dtype == "float32"


def elements(route: Route, dtype: str) -> st.SearchStrategy[float]:
    special = SPECIAL + NOT_FINITE + (DENORMAL if keeps_denormals(route, dtype) else ())
    return st.one_of(st.sampled_from(special), st.floats(0, 1, width=16))


@st.composite
def array(draw: Any, route: Route, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = elements(route, dtype)
    # One fill value keeps the draws few; a tie wherever p and q share it.
    drawn = draw(npst.arrays(np.float32, shape, elements=values, fill=st.sampled_from(SPECIAL)))
    return inputs.cast(drawn, dtype)


@st.composite
def calls(draw: Any, route: Route) -> Call:
    pallas = route.name == "jax-pallas" and route.interpreted
    if pallas:
        leading, vocab = draw(st.sampled_from(PALLAS_SHAPES))
        reduction = draw(st.sampled_from(["batchmean", "per_token"]))
    else:
        leading, vocab = draw(st.sampled_from(LEADING)), draw(st.sampled_from(VOCABS))
        reduction = draw(st.sampled_from(REDUCTIONS))
    dtypes = draw(st.sampled_from(inputs.DTYPE_PAIRS))
    layouts = [routes.identity]
    shape = (*leading, vocab)
    if len(shape) == 2 and not pallas:
        layouts += [transposed, every_second]
    layout = draw(st.sampled_from(layouts))
    stored = {transposed: shape[::-1], every_second: (*leading, 2 * vocab)}.get(layout, shape)
    p, q = (draw(array(route, stored, dtype)) for dtype in dtypes)

    tokens = draw(st.sampled_from([None, "labels", "weights", "both"]))
    labels = weights = None
    if tokens in ("labels", "both"):
        labels = draw(npst.arrays(np.int32, leading, elements=st.sampled_from([-100, 0, 7])))
    if tokens in ("weights", "both"):
        weights = draw(npst.arrays(np.float32, leading, elements=st.sampled_from([0, 0.5, 1, 3])))
    upstream_shape = {"none": shape, "per_token": leading}.get(reduction, ())
    upstream = np.full(upstream_shape, draw(st.floats(-8, 8, width=16)), np.float32)
    options = {"labels": labels, "weights": weights, "reduction": reduction}
    return Call(p, q, layout, options, upstream)


def test_property_every_route_matches_the_oracle(route: Route) -> None:
    @examples(route)
    @given(calls(route))
    def matches(call: Call) -> None:
        oracle.check(
            route, call.p, call.q, layout=call.layout, upstream=call.upstream, **call.options
        )

    matches()


def test_property_kernel_bits_match_the_model(kernel_route: Route) -> None:
    """Any values, NaN and Inf too: per-token bits and codes. Which NaN it is, is not promised."""
    pallas = kernel_route.name == "jax-pallas" and kernel_route.interpreted
    shapes = st.sampled_from([(3, 3), (2, 513)] if pallas else [(1, 1), (2, 513), (1, 2049)])

    @examples(kernel_route)
    @given(st.data(), shapes, st.sampled_from(inputs.DTYPE_PAIRS))
    def matches(data: st.DataObject, shape: tuple[int, int], dtypes: tuple[str, str]) -> None:
        p, q = (data.draw(array(kernel_route, shape, dtype)) for dtype in dtypes)
        result = kernel_route.forward(p, q)
        right = per_token_float32(p, q)
        same_nan = np.where(np.isnan(right), np.float32(0), right)
        actual = np.where(np.isnan(result.per_token), np.float32(0), result.per_token)
        np.testing.assert_array_equal(np.isnan(result.per_token), np.isnan(right))
        assert_same_bits("per_token", actual, same_nan)
        assert_same_bits("codes", result.codes, pack_codes(p, q))

    matches()


@settings(derandomize=True, deadline=None, database=None)
@given(
    npst.arrays(
        np.uint8, st.tuples(st.integers(1, 3), st.integers(1, 2100)), elements=st.integers(0, 3)
    )
)
def test_property_codes_unpack_to_what_was_packed(codes: np.ndarray) -> None:
    """The layout that both frameworks share loses nothing."""
    values = np.array([0, 1, -1, np.nan], np.float32)[codes]
    packed = pack_codes(values, np.zeros_like(values))
    np.testing.assert_array_equal(unpack_codes(packed, codes.shape[1]), codes)
