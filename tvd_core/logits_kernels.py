"""The Triton kernels of the total variation distance of two softmaxes. Imports Triton only.

As ``triton_kernels``: one program owns a row at a time, arguments come as inputs, run-time scalars,
outputs, constexprs, and rows that do not start at a multiple of 16 elements are read in windows.

A row is read twice, for the maximum and the sum of each softmax, then for the difference. The
second time it comes from L2, because the programs hold no more rows at a time than fit there.
"""

import math

import triton
import triton.language as tl

from tvd_core import config, contract
from tvd_core.triton_kernels import INTERPRETED, _base, _known_multiple, _shift

LANES = tl.constexpr(contract.LOGITS_LANES)
TILE = tl.constexpr(contract.LOGITS_TILE)  # 4 sub-tiles of LANES elements, whose codes share bytes
WINDOW_ALIGNMENT = tl.constexpr(config.WINDOW_ALIGNMENT)
LOWEST = tl.constexpr(config.LOGITS_LOWEST)
HIGHEST_SUM = tl.constexpr(config.LOGITS_HIGHEST_SUM)
SAMPLE = tl.constexpr(config.LOGITS_SAMPLE)
LN2 = tl.constexpr(math.log(2))
# What STATISTICS says of the references and sums of the rows. Shards of rows need the last two:
# ALONE, then GIVEN what those of all the shards come to.
COMPUTED = tl.constexpr(0)
ALONE = tl.constexpr(1)
GIVEN = tl.constexpr(2)


@triton.jit
def _sum_lanes(acc):
    """Adds LANES lanes: ((a0 + a1) + a2) + a3 in groups of 4, then adjacent pairs; shape [1]."""
    even, odd = tl.split(tl.reshape(acc, [512, 2, 2]))
    a0, a2 = tl.split(even)
    a1, a3 = tl.split(odd)
    s = ((a0 + a1) + a2) + a3
    # Sums of two, whose order cannot matter. Written with tl.split as in triton_kernels, every
    # thread computed all of it: 1000 additions of the 3900 instructions of the kernel.
    s = tl.sum(tl.reshape(s, [256, 2]), 1)
    s = tl.sum(tl.reshape(s, [128, 2]), 1)
    s = tl.sum(tl.reshape(s, [64, 2]), 1)
    s = tl.sum(tl.reshape(s, [32, 2]), 1)
    s = tl.sum(tl.reshape(s, [16, 2]), 1)
    s = tl.sum(tl.reshape(s, [8, 2]), 1)
    s = tl.sum(tl.reshape(s, [4, 2]), 1)
    s = tl.sum(tl.reshape(s, [2, 2]), 1)
    return tl.sum(tl.reshape(s, [1, 2]), 1)


@triton.jit
def _logits(
    row_ptr,
    position,
    shift,
    end,
    readable,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Logits of a sub-tile as float32, -inf where they are not the row's."""
    at = row_ptr + position
    if not MASKED:
        return tl.load(at, eviction_policy=POLICY).to(tl.float32)
    if ALIGNED:
        x = tl.load(at, mask=position < end, other=float("-inf"), eviction_policy=POLICY)
        return x.to(tl.float32)
    inside = (position >= shift) & (position < end)
    x = tl.load(at, mask=position < readable, other=float("-inf"), eviction_policy=POLICY)
    x = x.to(tl.float32)
    if readable < end:  # the array's last row
        rest = tl.load(at, mask=inside & (position >= readable), other=float("-inf"))
        x = tl.where(position < readable, x, rest.to(tl.float32))
    return tl.where(inside, x, float("-inf"))


@triton.jit
def _exponent(x, scale, reference, COLD: tl.constexpr):
    """x * scale relative to the reference, rounded once; COLD: the reference is a logit."""
    if COLD:
        return (x - reference) * scale
    zero = tl.zeros([LANES], tl.float32)
    return tl.fma(x, zero + scale, zero - reference)


@triton.jit
def _first_reference(row_ptr, shift, end, readable, unit, ALIGNED: tl.constexpr):
    """What the exponents of a row are relative to at first: the maximum of a sample."""
    position = tl.arange(0, LANES)
    x = _logits(row_ptr, position, shift, end, readable, True, ALIGNED, "evict_last")
    x = tl.where(position < shift + SAMPLE, x, float("-inf"))
    return tl.maximum(tl.max(x, 0) * unit, LOWEST)


@triton.jit
def _whole_tile(row_ptr, start, first, end, POLICY: tl.constexpr):
    """The logits of a tile's four sub-tiles, as they are; none before first, none from end on.

    For loops that read a tile ahead. In the others the compiler puts half of a tile's loads after
    the arithmetic of the other half, where there are no codes, so that too few are under way.
    """
    position = start + tl.arange(0, LANES)
    inside = (position >= first) & (position < end)
    at = row_ptr + position
    x0 = tl.load(at, mask=inside, eviction_policy=POLICY)
    x1 = tl.load(at + LANES, mask=inside, eviction_policy=POLICY)
    x2 = tl.load(at + 2 * LANES, mask=inside, eviction_policy=POLICY)
    x3 = tl.load(at + 3 * LANES, mask=inside, eviction_policy=POLICY)
    return x0, x1, x2, x3


@triton.jit
def _add_exponential(total, x, scale, reference, COLD: tl.constexpr):
    """Adds 2 ** (x * scale - reference) to the lanes."""
    return total + tl.exp2(_exponent(x.to(tl.float32), scale, reference, COLD))


@triton.jit
def _add_exponentials(
    total,
    reference,
    row_ptr,
    start,
    shift,
    end,
    readable,
    scale,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLD: tl.constexpr,
):
    """Adds 2 ** (x * scale - reference) of a tile to the lanes."""
    for k in tl.static_range(4):
        position = start + k * LANES + tl.arange(0, LANES)
        x = _logits(row_ptr, position, shift, end, readable, MASKED, ALIGNED, "evict_last")
        total = _add_exponential(total, x, scale, reference, COLD)
    return total


@triton.jit
def _totals(
    s_row,
    t_row,
    s_reference,
    t_reference,
    shift,
    end,
    readable,
    scale,
    ALIGNED: tl.constexpr,
    COLD: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The sums of both rows' exponentials, by lane."""
    s = tl.zeros([LANES], tl.float32)
    t = tl.zeros([LANES], tl.float32)
    full = end // TILE * TILE
    first = 0
    if not ALIGNED:
        if full > 0:  # the first window holds elements of the row before
            s = _add_exponentials(
                s, s_reference, s_row, 0, shift, end, readable, scale, True, ALIGNED, COLD
            )
            t = _add_exponentials(
                t, t_reference, t_row, 0, shift, end, readable, scale, True, ALIGNED, COLD
            )
        first = TILE
    if AHEAD:
        s0, s1, s2, s3 = _whole_tile(s_row, first, first, full, "evict_last")
        t0, t1, t2, t3 = _whole_tile(t_row, first, first, full, "evict_last")
        for start in range(first, full, TILE):
            s4, s5, s6, s7 = _whole_tile(s_row, start + TILE, first, full, "evict_last")
            t4, t5, t6, t7 = _whole_tile(t_row, start + TILE, first, full, "evict_last")
            s = _add_exponential(s, s0, scale, s_reference, COLD)
            s = _add_exponential(s, s1, scale, s_reference, COLD)
            s = _add_exponential(s, s2, scale, s_reference, COLD)
            s = _add_exponential(s, s3, scale, s_reference, COLD)
            t = _add_exponential(t, t0, scale, t_reference, COLD)
            t = _add_exponential(t, t1, scale, t_reference, COLD)
            t = _add_exponential(t, t2, scale, t_reference, COLD)
            t = _add_exponential(t, t3, scale, t_reference, COLD)
            s0, s1, s2, s3 = s4, s5, s6, s7
            t0, t1, t2, t3 = t4, t5, t6, t7
    else:
        for start in range(first, full, TILE):
            s = _add_exponentials(
                s, s_reference, s_row, start, shift, end, readable, scale, False, ALIGNED, COLD
            )
            t = _add_exponentials(
                t, t_reference, t_row, start, shift, end, readable, scale, False, ALIGNED, COLD
            )
    if full < end:
        s = _add_exponentials(
            s, s_reference, s_row, full, shift, end, readable, scale, True, ALIGNED, COLD
        )
        t = _add_exponentials(
            t, t_reference, t_row, full, shift, end, readable, scale, True, ALIGNED, COLD
        )
    return s, t


@triton.jit
def _maximum(row_ptr, shift, end, readable, ALIGNED: tl.constexpr):
    """The highest logit of a row."""
    highest = tl.full([LANES], float("-inf"), tl.float32)
    for start in range(0, end, LANES):
        position = start + tl.arange(0, LANES)
        x = _logits(row_ptr, position, shift, end, readable, True, ALIGNED, "evict_last")
        highest = tl.maximum(highest, x)
    return tl.max(highest, 0)


@triton.jit
def _log2(x):
    """The logarithm of a scalar by the instruction that the Pallas kernel uses too."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _below(d):
    """(1 - sign(d)) / 2 of differences of probabilities: 0, 0.5 or 1.

    As one saturating instruction. Subnormal differences, so some of probabilities below 2 ** -102,
    count as 0: times 2 ** 127 they would come out between those three. A NaN gives 0, in the
    interpreters 0.5: codes of such rows mean nothing.
    """
    if INTERPRETED:
        return tl.where(d >= 2.0**-126, 0.0, tl.where(d <= -(2.0**-126), 1.0, 0.5))
    return tl.inline_asm_elementwise(
        "fma.rn.ftz.sat.f32 $0, $1, 0fFF000000, 0f3F000000;",
        "=f,f",
        [d],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _row_sum(lanes, shift, ALIGNED: tl.constexpr):
    """The sum of a row's lanes in the contract's order."""
    if not ALIGNED:
        lanes = tl.gather(lanes, (tl.arange(0, LANES) + shift) % LANES, 0)
    return tl.sum(_sum_lanes(lanes), 0)


@triton.jit
def _statistics(
    s_row,
    t_row,
    kept,
    shift,
    end,
    readable,
    scale,
    ALIGNED: tl.constexpr,
    COLD: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The reference of each row, and the sum of its exponentials relative to it."""
    unit = 1.0 if COLD else scale
    s_highest = _first_reference(s_row, shift, end, readable, unit, ALIGNED)
    t_highest = _first_reference(t_row, shift, end, readable, unit, ALIGNED)
    s_total, t_total = _totals(
        s_row, t_row, s_highest, t_highest, shift, end, readable, scale, ALIGNED, COLD, AHEAD
    )
    s_sum = _row_sum(s_total, shift, ALIGNED)
    t_sum = _row_sum(t_total, shift, ALIGNED)
    within = (s_sum < HIGHEST_SUM) & (t_sum < HIGHEST_SUM)
    if tl.where(kept & (within == 0), 1, 0) > 0:
        # The sample was far below the maximum, or there is a NaN: once more from the maximum.
        s_highest = _maximum(s_row, shift, end, readable, ALIGNED) * unit
        t_highest = _maximum(t_row, shift, end, readable, ALIGNED) * unit
        s_highest = tl.maximum(s_highest, LOWEST)
        t_highest = tl.maximum(t_highest, LOWEST)
        s_total, t_total = _totals(
            s_row, t_row, s_highest, t_highest, shift, end, readable, scale, ALIGNED, COLD, AHEAD
        )
        s_sum = _row_sum(s_total, shift, ALIGNED)
        t_sum = _row_sum(t_total, shift, ALIGNED)
    return s_highest, s_sum, t_highest, t_sum


@triton.jit
def _difference(
    s,
    t,
    scale,
    s_reference,
    s_factor,
    t_reference,
    t_factor,
    distance,
    below,
    divergence,
    codes,
    COLD: tl.constexpr,
    KEEP_CODES: tl.constexpr,
    WANT_KL: tl.constexpr,
):
    """Adds a sub-tile to the sums, and its codes below those before; see ``_difference_tile``."""
    s = _exponent(s.to(tl.float32), scale, s_reference, COLD)
    t = _exponent(t.to(tl.float32), scale, t_reference, COLD)
    exponential = tl.exp2(s)
    q = tl.exp2(t) * t_factor
    # Compiled without contraction to an FMA, or p - p would not be 0.
    d = exponential * s_factor - q
    distance += tl.abs(d)
    if KEEP_CODES:
        half_code = _below(d)
        below = tl.fma(exponential, half_code, below)
        codes = tl.fma(codes, tl.full([LANES], 4.0, tl.float32), half_code)
    if WANT_KL:
        divergence += tl.where(q == 0.0, 0.0, q * (t - s))
    return distance, below, divergence, codes


@triton.jit
def _store_codes(codes_row, start, codes):
    """Writes a tile's codes, the lowest byte of each lane."""
    at = codes_row + start // 4 + tl.arange(0, LANES)
    tl.store(at, codes.to(tl.uint32, bitcast=True).to(tl.uint8))


@triton.jit
def _difference_tile(
    s_row,
    t_row,
    codes_row,
    start,
    shift,
    end,
    readable,
    scale,
    s_reference,
    s_factor,
    t_reference,
    t_factor,
    distance,
    below,
    divergence,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLD: tl.constexpr,
    KEEP_CODES: tl.constexpr,
    WANT_KL: tl.constexpr,
):
    """Adds |p - q|, (1 - sign(p - q)) / 2 * p / s_factor and q * (log2(q / p) + a constant).

    From the last sub-tile to the first. The code of an element is 1 - sign(p - q): 0 where p > q,
    1 at a tie, 2 where p < q; that of sub-tile k takes bits 2 k and 2 k + 1 of a byte. Codes are
    built in a float32, because the FMA units have more time left than those for integers: half a
    code is a unit in the last place of 2 ** 22, to which the first value comes after a tile's four
    factors of 4.
    """
    lanes = tl.arange(0, LANES)
    codes = tl.full([LANES], 2.0**14, tl.float32)
    for k in tl.static_range(4):
        position = start + (3 - k) * LANES + lanes
        s = _logits(s_row, position, shift, end, readable, MASKED, ALIGNED, "evict_first")
        t = _logits(t_row, position, shift, end, readable, MASKED, ALIGNED, "evict_first")
        distance, below, divergence, codes = _difference(
            s, t, scale, s_reference, s_factor, t_reference, t_factor,
            distance, below, divergence, codes, COLD, KEEP_CODES, WANT_KL,
        )  # fmt: skip
    if KEEP_CODES:
        _store_codes(codes_row, start, codes)
    return distance, below, divergence


@triton.jit
def _differences(
    s_row,
    t_row,
    codes_row,
    shift,
    end,
    readable,
    scale,
    s_reference,
    s_factor,
    t_reference,
    t_factor,
    ALIGNED: tl.constexpr,
    COLD: tl.constexpr,
    KEEP_CODES: tl.constexpr,
    WANT_KL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """What ``_difference_tile`` adds up over a row, by lane, from the row's first element on.

    From the last tile to the first, so that what the sums read last is read again before it has
    left L2.
    """
    distance = tl.zeros([LANES], tl.float32)
    below = tl.zeros([LANES], tl.float32)
    divergence = tl.zeros([LANES], tl.float32)
    full = end // TILE * TILE
    first = 0 if ALIGNED else TILE
    if full < end:
        distance, below, divergence = _difference_tile(
            s_row, t_row, codes_row, full, shift, end, readable, scale,
            s_reference, s_factor, t_reference, t_factor, distance, below, divergence,
            True, ALIGNED, COLD, KEEP_CODES, WANT_KL,
        )  # fmt: skip
    if AHEAD:
        s0, s1, s2, s3 = _whole_tile(s_row, full - TILE, first, full, "evict_first")
        t0, t1, t2, t3 = _whole_tile(t_row, full - TILE, first, full, "evict_first")
        for done in range(first, full, TILE):
            start = full - TILE + first - done
            s4, s5, s6, s7 = _whole_tile(s_row, start - TILE, first, full, "evict_first")
            t4, t5, t6, t7 = _whole_tile(t_row, start - TILE, first, full, "evict_first")
            codes = tl.full([LANES], 2.0**14, tl.float32)
            distance, below, divergence, codes = _difference(
                s3, t3, scale, s_reference, s_factor, t_reference, t_factor,
                distance, below, divergence, codes, COLD, KEEP_CODES, WANT_KL,
            )  # fmt: skip
            distance, below, divergence, codes = _difference(
                s2, t2, scale, s_reference, s_factor, t_reference, t_factor,
                distance, below, divergence, codes, COLD, KEEP_CODES, WANT_KL,
            )  # fmt: skip
            distance, below, divergence, codes = _difference(
                s1, t1, scale, s_reference, s_factor, t_reference, t_factor,
                distance, below, divergence, codes, COLD, KEEP_CODES, WANT_KL,
            )  # fmt: skip
            distance, below, divergence, codes = _difference(
                s0, t0, scale, s_reference, s_factor, t_reference, t_factor,
                distance, below, divergence, codes, COLD, KEEP_CODES, WANT_KL,
            )  # fmt: skip
            if KEEP_CODES:
                _store_codes(codes_row, start, codes)
            s0, s1, s2, s3 = s4, s5, s6, s7
            t0, t1, t2, t3 = t4, t5, t6, t7
    else:
        for done in range(first, full, TILE):
            distance, below, divergence = _difference_tile(
                s_row, t_row, codes_row, full - TILE + first - done, shift, end, readable, scale,
                s_reference, s_factor, t_reference, t_factor, distance, below, divergence,
                False, ALIGNED, COLD, KEEP_CODES, WANT_KL,
            )  # fmt: skip
    if not ALIGNED:  # noqa: SIM102 (known when compiling)
        if full > 0:
            distance, below, divergence = _difference_tile(
                s_row, t_row, codes_row, 0, shift, end, readable, scale,
                s_reference, s_factor, t_reference, t_factor, distance, below, divergence,
                True, ALIGNED, COLD, KEEP_CODES, WANT_KL,
            )  # fmt: skip
    if not ALIGNED:
        rotation = (tl.arange(0, LANES) + shift) % LANES
        distance = tl.gather(distance, rotation, 0)
        if KEEP_CODES:
            below = tl.gather(below, rotation, 0)
        if WANT_KL:
            divergence = tl.gather(divergence, rotation, 0)
    return distance, below, divergence


# Numbers are not specialized, so that none of them compiles a new kernel.
@triton.jit(do_not_specialize=["tokens", "vocab"])
def logits_forward_kernel(
    s_ptr,
    t_ptr,
    weights_ptr,
    given_ptr,
    scale,
    tokens,
    vocab,
    distance_ptr,
    s_rows_ptr,
    t_rows_ptr,
    s_lse_ptr,
    t_lse_ptr,
    divergence_ptr,
    codes_ptr,
    HAS_WEIGHTS: tl.constexpr,
    KEEP_CODES: tl.constexpr,
    WANT_KL: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLD: tl.constexpr,
    STATISTICS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """tvd[row] = 0.5 * sum_v |softmax(s)_v - softmax(t)_v| for logits s / T and t / T.

    Grid: any number of programs. ``scale`` is log2(e) / T; COLD, that it is so high that logits
    times it are too far apart for a reference that is rounded: the references are logits then. A
    row of weight 0 is not read: its results are 0, its codes not written. s_rows and t_rows are [3,
    tokens]: the reference m * scale (m the highest logit), the factor
    1 / sum_v 2 ** (x_v * scale - reference), and sum_v p_v * (1 - sign(p_v - q_v)), or with q_v
    in t_rows. That sum keeps what 1 - (a sum of
    signs) would lose of a student that puts almost all where the teacher puts almost nothing. lse
    is the log-sum-exp of x / T, divergence KL(q || p), both in nats. AHEAD: tiles are read one
    ahead, for which there have to be registers.

    STATISTICS ALONE: writes the references, and the sums where the factors would be, nothing else.
    GIVEN: ``given`` is [2, 2, tokens], the reference and factor of s and of t, of rows of which
    these are shards. Writes the shard's part of the distance, of the third sum into
    s_rows, and of the divergence, which lacks log(t_factor / s_factor); nothing else.
    """
    vocab = _known_multiple(vocab, ALIGNED)
    scale = tl.cast(scale, tl.float32)
    codes_bytes = tl.cdiv(vocab + (0 if ALIGNED else WINDOW_ALIGNMENT - 1), TILE) * LANES
    for row_number in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = tl.cast(row_number, tl.int64)
        one = tl.arange(0, 1)
        weight = 1.0
        if HAS_WEIGHTS:
            weight = tl.load(weights_ptr + row)
        kept = weight != 0.0
        shift = _shift(row, vocab, ALIGNED)
        base = _base(row, vocab, ALIGNED)
        end = tl.where(kept, vocab + shift, 0)
        readable = _readable_of(base, shift + vocab, tokens, vocab)
        s_row = s_ptr + base
        t_row = t_ptr + base
        codes_row = codes_ptr + row * codes_bytes

        if STATISTICS == GIVEN:
            s_highest, s_factor = tl.load(given_ptr + row), tl.load(given_ptr + tokens + row)
            t_given_ptr = given_ptr + 2 * tl.cast(tokens, tl.int64)
            t_highest, t_factor = tl.load(t_given_ptr + row), tl.load(t_given_ptr + tokens + row)
        else:
            s_highest, s_sum, t_highest, t_sum = _statistics(
                s_row, t_row, kept, shift, end, readable, scale, ALIGNED, COLD, AHEAD
            )
            if STATISTICS == ALONE:
                s_factor, t_factor = s_sum, t_sum
            else:
                s_factor, t_factor = tl.div_rn(1.0, s_sum), tl.div_rn(1.0, t_sum)
                unit = scale if COLD else 1.0
                s_lse = (s_highest * unit - _log2(s_factor)) * LN2
                t_lse = (t_highest * unit - _log2(t_factor)) * LN2
                tl.store(s_lse_ptr + row + one, tl.where(kept, s_lse, 0.0) + 0.0 * one)
                tl.store(t_lse_ptr + row + one, tl.where(kept, t_lse, 0.0) + 0.0 * one)
            tl.store(s_rows_ptr + row + one, tl.where(kept, s_highest, 0.0) + 0.0 * one)
            tl.store(t_rows_ptr + row + one, tl.where(kept, t_highest, 0.0) + 0.0 * one)
            tl.store(s_rows_ptr + tokens + row + one, tl.where(kept, s_factor, 1.0) + 0.0 * one)
            tl.store(t_rows_ptr + tokens + row + one, tl.where(kept, t_factor, 1.0) + 0.0 * one)

        if STATISTICS != ALONE:
            distance, below, divergence = _differences(
                s_row, t_row, codes_row, shift, end, readable, scale,
                s_highest, s_factor, t_highest, t_factor, ALIGNED, COLD, KEEP_CODES, WANT_KL, AHEAD,
            )  # fmt: skip
            value = tl.where(kept, _sum_lanes(distance) * 0.5, 0.0)
            tl.store(distance_ptr + row + one, value)
            if KEEP_CODES:
                s_below = tl.where(kept, _sum_lanes(below) * (2.0 * s_factor), 1.0)
                if STATISTICS == COMPUTED:  # 1 if all are ties, for gradients of 0
                    s_below = tl.where(value == 0.0, 1.0, s_below)
                s_below += value * 0.0  # NaN where that is, though no comparison was true there
                tl.store(s_rows_ptr + 2 * tl.cast(tokens, tl.int64) + row + one, s_below)
                if STATISTICS == COMPUTED:
                    t_below = s_below + 2.0 * value
                    tl.store(t_rows_ptr + 2 * tl.cast(tokens, tl.int64) + row + one, t_below)
            if WANT_KL:
                value = _sum_lanes(divergence)
                if STATISTICS == COMPUTED:
                    value += _log2(t_factor) - _log2(s_factor)
                tl.store(divergence_ptr + row + one, tl.where(kept, value * LN2, 0.0))


@triton.jit
def _readable_of(base, end, tokens, vocab):
    """As ``_readable``, for a grid that is not one program a row."""
    limit = tl.cast(tokens, tl.int64) * vocab - base
    return tl.minimum((end + 15).to(tl.int64), limit).to(tl.int32) // 16 * 16


@triton.jit(do_not_specialize=["tokens", "vocab"])
def logits_backward_kernel(
    x_ptr,
    other_ptr,
    codes_ptr,
    rows_ptr,
    other_rows_ptr,
    distance_upstream_ptr,
    sum_upstream_ptr,
    kl_upstream_ptr,
    kl_ptr,
    target_upstream_ptr,
    targets_ptr,
    weights_ptr,
    scale,
    temperature,
    tokens,
    vocab,
    dx_ptr,
    SIGN: tl.constexpr,
    HAS_SUM: tl.constexpr,
    HAS_KL: tl.constexpr,
    HAS_TARGET: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    COLD: tl.constexpr,
):
    """Gradient of the logits x, the student's (SIGN 1) or the teacher's (SIGN -1).

    dx_v = (p_v * (SIGN * 0.5 * distance_upstream * (below - code_v) + sum_upstream) ...) / T
    with code_v = 1 - sign_v, p = softmax(x) from the row's reference and factor, q that of the
    other logits. HAS_KL adds kl_upstream times (p_v - q_v) or, for the teacher,
    p_v * (log(p_v / q_v) - kl); HAS_TARGET adds target_upstream where v is the row's target.
    Grid: (tokens * windows,), one window a program.
    """
    vocab = _known_multiple(vocab, ALIGNED)
    scale = tl.cast(scale, tl.float32)
    temperature = tl.cast(temperature, tl.float32)
    windows = tl.cdiv(vocab + (0 if ALIGNED else WINDOW_ALIGNMENT - 1), TILE)
    row = (tl.program_id(0) // windows).to(tl.int64)
    start = tl.program_id(0) % windows * TILE
    shift = _shift(row, vocab, ALIGNED)
    base = _base(row, vocab, ALIGNED)
    end = shift + vocab
    kept = True
    if HAS_WEIGHTS:
        kept = tl.load(weights_ptr + row) != 0.0
    read = tl.where(kept, end, 0)
    readable = tl.where(kept, _readable_of(base, end, tokens, vocab), 0)
    reference = tl.load(rows_ptr + row)
    factor = tl.load(rows_ptr + tokens + row)
    below = tl.load(rows_ptr + 2 * tl.cast(tokens, tl.int64) + row)
    half = tl.load(distance_upstream_ptr + row) * (0.5 * SIGN)
    rest = tl.zeros([], tl.float32)
    if HAS_SUM:
        rest = tl.load(sum_upstream_ptr + row)
    other_reference = 0.0
    other_factor = 0.0
    kl_factor = 0.0
    kl_rest = 0.0
    if HAS_KL:
        kl_upstream = tl.load(kl_upstream_ptr + row)
        other_reference = tl.load(other_rows_ptr + row)
        other_factor = tl.load(other_rows_ptr + tokens + row)
        if SIGN > 0:
            rest += kl_upstream
            kl_factor = tl.div_rn(kl_upstream, temperature) * other_factor
        else:
            kl_factor = tl.div_rn(kl_upstream, temperature) * factor
            kl_rest = (_log2(factor) - _log2(other_factor)) * LN2 - tl.load(kl_ptr + row)
    target = -1
    at_target = 0.0
    if HAS_TARGET:
        target = tl.load(targets_ptr + row).to(tl.int32) + shift
        at_target = tl.div_rn(tl.load(target_upstream_ptr + row), temperature)
    factor = tl.div_rn(factor, temperature)
    tie = tl.fma(half, below - 1.0, rest) * factor
    plus = tl.fma(half, below, rest) * factor
    minus = tl.fma(half, below - 2.0, rest) * factor

    codes_row = codes_ptr + row * (windows * LANES)
    lanes = tl.arange(0, LANES)
    codes = tl.load(codes_row + start // 4 + lanes, eviction_policy="evict_first").to(tl.int32)
    inner = (start + TILE <= end) & (start >= shift)
    for k in tl.static_range(4):
        position = start + k * LANES + lanes
        inside = (position >= shift) & (position < end)
        if ALIGNED:
            mask = position < read
            x = tl.load(x_ptr + base + position, mask=mask, other=0.0).to(tl.float32)
            if HAS_KL:
                other = tl.load(other_ptr + base + position, mask=mask, other=0.0).to(tl.float32)
        else:
            x = _logits(x_ptr + base, position, shift, read, readable, True, ALIGNED, "evict_first")
            if HAS_KL:
                other = _logits(
                    other_ptr + base, position, shift, read, readable, True, ALIGNED, "evict_first"
                )
        code = (codes >> (2 * k)) & 3
        coefficient = tl.where(code >= 2, minus, tl.where(code == 1, tie, plus))
        x = _exponent(x, scale, reference, COLD)
        exponential = tl.exp2(x)
        dx = exponential * coefficient
        if HAS_KL:
            other = _exponent(other, scale, other_reference, COLD)
            if SIGN > 0:
                dx = dx - tl.exp2(other) * kl_factor
            else:
                ratio = (x - other) * LN2 + kl_rest
                dx += tl.where(exponential == 0.0, 0.0, exponential * kl_factor * ratio)
        if HAS_TARGET:
            dx += tl.where(position == target, at_target, 0.0)
        dx = tl.where(kept, dx, 0.0).to(dx_ptr.dtype.element_ty)
        pointers = dx_ptr + base + position
        if ALIGNED:
            tl.store(pointers, dx, mask=position < end, eviction_policy="evict_first")
        elif inner:
            tl.store(pointers, dx, eviction_policy="evict_first")
        else:
            tl.store(pointers, dx, mask=inside, eviction_policy="evict_first")
