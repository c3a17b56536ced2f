"""Contract clause 7: one summation order, so the same bits from every kernel, every time."""

import itertools

import numpy as np
import pytest

from parity_tests import inputs, routes
from parity_tests.oracle import assert_same_bits, divisor_float32, gradient_float32
from parity_tests.routes import Route
from tvd_core import config
from tvd_core.contract import LANES, code_tiles
from tvd_core.reference import (
    pack_codes,
    per_token_float32,
    reduce_float32,
    sign_codes,
    unpack_codes,
)

# Vocab with its dtypes: a tail only; full tiles only; both; odd rows of 2-byte elements.
CASES = (
    (3, "float32", "float32"),
    (600, "bfloat16", "float16"),
    (2048, "float32", "bfloat16"),
    (2049, "bfloat16", "bfloat16"),
    (4500, "float32", "float32"),
    (6145, "float16", "float16"),
)
TOKENS = 3
PAIRS = list(itertools.combinations(routes.runnable(kernels=True), 2))


def weighting(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, weights, and the kept weights that they make."""
    labels, weights = inputs.labels_for(tokens, seed=4), inputs.weights_for(tokens)
    return labels, weights, np.where(labels == -100, np.float32(0), weights)


@pytest.mark.parametrize(("vocab", "p_dtype", "q_dtype"), CASES)
def test_clause_07_forward_bits_follow_the_documented_order(
    kernel_route: Route, vocab: int, p_dtype: str, q_dtype: str
) -> None:
    p, q = inputs.rows(TOKENS, vocab, p_dtype, q_dtype)
    result = kernel_route.forward(p, q)
    assert_same_bits("per_token", result.per_token, per_token_float32(p, q))
    total = reduce_float32(result.per_token)
    assert_same_bits("loss", result.loss, np.asarray(total / np.float32(TOKENS)))
    assert result.codes.shape == (TOKENS, code_tiles(vocab) * LANES)
    assert_same_bits("codes", result.codes, pack_codes(p, q))


@pytest.mark.parametrize(("tokens", "vocab"), [(17, 2035), (9, 4095)])
def test_clause_07_bits_of_rows_at_many_shifts(
    kernel_route: Route, tokens: int, vocab: int
) -> None:
    """Odd rows are read from multiples of 64 elements on: some reach into one window more."""
    p, q = inputs.rows(tokens, vocab)
    result = kernel_route.forward(p, q, reduction="per_token")
    assert_same_bits("per_token", result.per_token, per_token_float32(p, q))
    assert_same_bits("codes", result.codes, pack_codes(p, q))
    upstream = np.full(tokens, 1 / 3, np.float32)
    gradients = kernel_route.run(p, q, reduction="per_token", upstream=upstream)
    right = gradient_float32(p, q, upstream * np.float32(0.5), np.ones(tokens, np.float32))
    assert_same_bits("dp", gradients.dp + np.float32(0), right + np.float32(0))


@pytest.mark.parametrize(
    ("tokens", "vocab", "dtype"),
    [(3, 10240, "float32"), (4, 8000, "bfloat16"), (3, 6145, "float32"), (66, 129, "bfloat16")],
)
@pytest.mark.parametrize("in_blocks", [False, True], ids=["flat", "blocks"])
def test_clause_07_bits_do_not_depend_on_the_pallas_grid(
    tokens: int, vocab: int, dtype: str, in_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks for all rows, so that their rings are filled again and again; and flat arrays in
    blocks of rows, as they are from 2**31 elements on."""
    route = routes.get("jax-pallas")
    if not route.can_run:
        pytest.skip(route.mode)
    import jax

    from tvd_core import config
    from tvd_jax import compat, pallas_kernels

    monkeypatch.setattr(compat, "sm_count", lambda: 2)
    monkeypatch.setattr(config, "PALLAS_MAX_BLOCKS_PER_SM", 1)
    if in_blocks:
        monkeypatch.setattr(pallas_kernels._Tiling, "_in_blocks", True)
    jax.clear_caches()
    p, q = inputs.rows(tokens, vocab, dtype)
    right = per_token_float32(p, q)
    assert_same_bits("sums only", route.loss(p, q, reduction="per_token"), right)
    result = route.forward(p, q, reduction="none")
    assert_same_bits("per_token", result.per_token, right)
    assert_same_bits("codes", result.codes, pack_codes(p, q))
    jax.clear_caches()


def test_clause_07_both_frameworks_ask_ahead_alike() -> None:
    for package in ("triton", "jax"):
        pytest.importorskip(package)
    from tvd_core import triton_kernels
    from tvd_jax import pallas_kernels, pallas_ptx

    each = triton_kernels.PREFETCHED.value
    assert each == pallas_ptx.PREFETCHED
    assert each * LANES == 128 * pallas_kernels.WARPGROUP  # 128 bytes a thread
    assert config.BACKWARD_PREFETCH % each == 0
    assert triton_kernels.STEP.value == pallas_kernels.REDUCE_TILE


def test_clause_07_the_triton_kernels_use_the_contracts_constants() -> None:
    triton_kernels = pytest.importorskip("tvd_core.triton_kernels")
    from tvd_core import config, contract

    values = [getattr(triton_kernels, n).value for n in ("LANES", "TILE", "WINDOW_ALIGNMENT")]
    assert values == [contract.LANES, contract.TILE, config.WINDOW_ALIGNMENT]


@pytest.mark.parametrize(
    ("tokens", "vocab", "dtype"),
    [
        # A row a thread in Pallas: full blocks, and a last one that overlaps.
        (128, 1, "float32"),
        (130, 3, "float32"),
        (130, 3, "bfloat16"),
        (300, 16, "float32"),
        # A row a block again.
        (129, 17, "float32"),
        (129, 17, "bfloat16"),
        # Rows that reach into one window more or not, as they are shifted.
        (17, 2035, "float32"),
        (17, 2035, "bfloat16"),
        (3, 4095, "float32"),
        (18, 4096, "bfloat16"),
    ],
)
def test_clause_07_bits_of_the_forward_that_keeps_nothing(
    kernel_route: Route, tokens: int, vocab: int, dtype: str
) -> None:
    if kernel_route.interpreted and kernel_route.framework == "torch":
        tokens = min(tokens, 18)  # a row is a program there, and the interpreter runs one at a time
    p, q = inputs.rows(tokens, vocab, dtype)
    per_token = kernel_route.loss(p, q, reduction="per_token")
    assert_same_bits("per_token", per_token, per_token_float32(p, q))
    weights = inputs.weights_for(tokens)
    weighted = kernel_route.loss(p, q, reduction="per_token", weights=weights)
    right = np.where(weights == 0, np.float32(0), per_token * weights)
    assert_same_bits("weighted per_token", weighted, right)


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
def test_clause_07_weighted_forward_bits(kernel_route: Route, reduction: str) -> None:
    vocab, tokens = 600, 5
    p, q = inputs.rows(tokens, vocab)
    labels, weights, kept = weighting(tokens)
    result = kernel_route.forward(p, q, labels, weights=weights, reduction=reduction)
    per_token = np.where(kept == 0, np.float32(0), per_token_float32(p, q) * kept)
    assert_same_bits("per_token", result.per_token, per_token)
    divisor = divisor_float32(kept, vocab, reduction)
    assert_same_bits("loss", result.loss, np.asarray(reduce_float32(per_token) / divisor))
    codes = unpack_codes(result.codes, vocab)
    np.testing.assert_array_equal(codes[kept != 0], sign_codes(p, q)[kept != 0])


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "per_token"])
def test_clause_07_gradient_bits(kernel_route: Route, reduction: str) -> None:
    vocab, tokens = 600, 5
    p, q = inputs.rows(tokens, vocab)
    labels, weights, kept = weighting(tokens)
    upstream = np.float32(1 / 3)
    result = kernel_route.run(p, q, labels, weights=weights, reduction=reduction, upstream=upstream)
    scale = upstream * np.float32(0.5) / divisor_float32(kept, vocab, reduction) * kept
    right = gradient_float32(p, q, scale, kept)
    # A gradient of 0 may carry either sign; everything else has to agree in every bit.
    assert_same_bits("dp", result.dp + np.float32(0), right + np.float32(0))
    assert_same_bits("dq", result.dq + np.float32(0), np.float32(0) - right)


@pytest.mark.parametrize(("vocab", "p_dtype", "q_dtype"), CASES)
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda route: str(route))
def test_clause_07_kernels_agree_bit_for_bit(
    one: Route, other: Route, vocab: int, p_dtype: str, q_dtype: str
) -> None:
    """The scale is a power of two, because Triton's interpreter truncates bfloat16 stores."""
    p, q = inputs.rows(4, vocab, p_dtype, q_dtype, seed=1)
    p[3, : min(vocab, 5)] = np.nan
    first, second = (route.forward(p, q, reduction="none") for route in (one, other))
    for name in ("loss", "per_token", "codes"):
        assert_same_bits(name, getattr(first, name), getattr(second, name))
    left, right = (route.run(p, q, upstream=0.5) for route in (one, other))
    for name in ("loss", "dp", "dq"):
        assert_same_bits(name, getattr(left, name), getattr(right, name))


def test_clause_07_at_least_two_kernels_are_compared() -> None:
    missing = [r.mode for r in routes.ROUTES if r.is_kernel and not r.can_run]
    if not PAIRS:
        pytest.skip(f"one kernel route only; {'; '.join(missing)}")
    assert len({route.framework for pair in PAIRS for route in pair}) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("vocab", [1271, 4096, 4160])
def test_clause_07_bits_where_the_codes_stay_in_l2(
    kernel_route: Route, vocab: int, dtype: str
) -> None:
    """From so many tokens on the forward reads in another way, on a GPU."""
    if not kernel_route.compiled_on_gpu:
        pytest.skip("needs a CUDA GPU")
    p, q = inputs.rows(config.STREAM_TOKENS + 1, vocab, dtype)
    forward = kernel_route.forward(p, q)
    assert_same_bits("per_token", forward.per_token, per_token_float32(p, q))
    assert_same_bits(
        "codes", unpack_codes(forward.codes, vocab), unpack_codes(pack_codes(p, q), vocab)
    )


def test_clause_07_a_ring_of_copies_that_turns_often(kernel_route: Route) -> None:
    """A tile a row, and some 20 rows a block: each barrier of Pallas's ring is used many times."""
    if not kernel_route.compiled_on_gpu:
        pytest.skip("needs a CUDA GPU")
    p, q = inputs.rows(16000, 2048)
    right = per_token_float32(p, q)
    for _ in range(5):
        forward = kernel_route.forward(p, q)
        assert_same_bits("per_token", forward.per_token, right)
    assert_same_bits("codes", forward.codes, pack_codes(p, q))


def test_clause_07_same_bits_from_run_to_run(route: Route) -> None:
    p, q = inputs.rows(4, 3000)
    labels, weights, _ = weighting(4)
    runs = [route.run(p, q, labels, weights=weights, upstream=0.3) for _ in range(2)]
    for name in ("loss", "dp", "dq"):
        assert_same_bits(name, getattr(runs[0], name), getattr(runs[1], name))


def test_clause_07_a_row_does_not_depend_on_its_batch(kernel_route: Route) -> None:
    p, q = inputs.rows(4, 2500, "bfloat16")
    batch = kernel_route.forward(p, q)
    for row in (0, 3):
        alone = kernel_route.forward(p[row : row + 1], q[row : row + 1])
        assert_same_bits("per_token", alone.per_token, batch.per_token[row : row + 1])
        assert_same_bits("codes", alone.codes, batch.codes[row : row + 1])


def test_clause_07_the_gradient_does_not_depend_on_what_else_is_asked_for(
    kernel_route: Route,
) -> None:
    p, q = inputs.rows(2, 2500)
    both = kernel_route.run(p, q, upstream=0.3)
    assert_same_bits("dp", kernel_route.run(p, q, upstream=0.3, wrt="p").dp, both.dp)
    assert_same_bits("dq", kernel_route.run(p, q, upstream=0.3, wrt="q").dq, both.dq)
    assert_same_bits("loss", kernel_route.loss(p, q), both.loss)
