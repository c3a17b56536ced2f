"""The Triton kernels of the total variation distance. Imports Triton only.

PyTorch launches them directly and JAX through jax-triton, so arguments come in the order that
both can bind: inputs, run-time scalars, outputs, constexprs. An argument that a variant does not
use is bound to any valid pointer. Everything is contiguous; rows are ``vocab`` apart.

One program owns one row. A row is added up by 512 lanes in the order that the contract fixes, with
the tree across the lanes written out: ``tl.sum`` leaves its order to the compiler (on an H200 it
agreed with this order in 71 % of 16384 rows, and was no faster).
"""

import triton
import triton.language as tl

LANES = tl.constexpr(512)
TILE = tl.constexpr(2048)  # 4 sub-tiles of LANES elements, whose codes share LANES bytes


@triton.jit
def _sum_lanes(acc):
    """Adds LANES lanes: ((a0 + a1) + a2) + a3 in groups of 4, then adjacent pairs; shape [1]."""
    even, odd = tl.split(tl.reshape(acc, [128, 2, 2]))
    a0, a2 = tl.split(even)
    a1, a3 = tl.split(odd)
    s = ((a0 + a1) + a2) + a3
    a, b = tl.split(tl.reshape(s, [64, 2]))
    a, b = tl.split(tl.reshape(a + b, [32, 2]))
    a, b = tl.split(tl.reshape(a + b, [16, 2]))
    a, b = tl.split(tl.reshape(a + b, [8, 2]))
    a, b = tl.split(tl.reshape(a + b, [4, 2]))
    a, b = tl.split(tl.reshape(a + b, [2, 2]))
    a, b = tl.split(tl.reshape(a + b, [1, 2]))
    return a + b


@triton.jit
def _row_weight(
    labels_ptr,
    weights_ptr,
    ignore_index,
    offsets,
    mask,
    HAS_LABELS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):
    """Weight of the tokens at ``offsets``: 0 for an ignored one or one masked away."""
    if HAS_WEIGHTS:
        weight = tl.load(weights_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    else:
        weight = tl.where(mask, 1.0, 0.0)
    if HAS_LABELS:
        label = tl.load(labels_ptr + offsets, mask=mask, other=0).to(tl.int64)
        weight = tl.where(label == ignore_index, 0.0, weight)
    return weight


@triton.jit
def _forward_tile(
    p_row,
    q_row,
    codes_row,
    elementwise_row,
    start,
    vocab,
    weight,
    acc,
    MASKED: tl.constexpr,
    KEEP_CODES: tl.constexpr,
    ELEMENTWISE: tl.constexpr,
):
    """Adds |p - q| of one tile to the lanes; stores its codes or its elementwise values."""
    lanes = tl.arange(0, LANES)
    codes = tl.zeros([LANES], tl.int32)
    for k in tl.static_range(4):
        offsets = start + k * LANES + lanes
        # Upcast at the load: bf16 arithmetic would lose bits, and is garbage in the interpreter.
        if MASKED:
            p = tl.load(p_row + offsets, mask=offsets < vocab, other=0.0).to(tl.float32)
            q = tl.load(q_row + offsets, mask=offsets < vocab, other=0.0).to(tl.float32)
        else:
            p = tl.load(p_row + offsets).to(tl.float32)
            q = tl.load(q_row + offsets).to(tl.float32)
        d = p - q
        acc += tl.abs(d)
        if KEEP_CODES:
            sign = tl.where(d > 0, 1, tl.where(d < 0, 2, tl.where(d == 0, 0, 3)))
            codes |= sign << (2 * k)
        if ELEMENTWISE:
            value = tl.where(weight == 0.0, 0.0, (0.5 * tl.abs(d)) * weight)
            if MASKED:
                tl.store(elementwise_row + offsets, value, mask=offsets < vocab)
            else:
                tl.store(elementwise_row + offsets, value)
    if KEEP_CODES:
        tl.store(codes_row + start // 4 + lanes, codes.to(tl.uint8))
    return acc


@triton.jit(do_not_specialize=["ignore_index"])
def tvd_forward_kernel(
    p_ptr,
    q_ptr,
    labels_ptr,
    weights_ptr,
    ignore_index,
    vocab,
    per_token_ptr,
    codes_ptr,
    elementwise_ptr,
    HAS_LABELS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    KEEP_CODES: tl.constexpr,
    ELEMENTWISE: tl.constexpr,
):
    """per_token[row] = weight * 0.5 * sum_v |p - q|, with the sign codes if they are kept.

    Grid: (tokens,). An ignored row is not read, and its codes are not written.
    """
    row = tl.program_id(0).to(tl.int64)
    weight = _row_weight(
        labels_ptr, weights_ptr, ignore_index, row, row >= 0, HAS_LABELS, HAS_WEIGHTS
    )
    kept = weight != 0.0
    # Elementwise values of an ignored row have to be written too (as 0).
    end = vocab if ELEMENTWISE else tl.where(kept, vocab, 0)
    full = end // TILE * TILE

    p_row = p_ptr + row * vocab
    q_row = q_ptr + row * vocab
    codes_row = codes_ptr + row * (tl.cdiv(vocab, TILE) * LANES)
    elementwise_row = elementwise_ptr + row * vocab
    acc = tl.zeros([LANES], tl.float32)
    for start in range(0, full, TILE):
        acc = _forward_tile(
            p_row,
            q_row,
            codes_row,
            elementwise_row,
            start,
            vocab,
            weight,
            acc,
            False,
            KEEP_CODES,
            ELEMENTWISE,
        )
    if full < end:
        acc = _forward_tile(
            p_row,
            q_row,
            codes_row,
            elementwise_row,
            full,
            vocab,
            weight,
            acc,
            True,
            KEEP_CODES,
            ELEMENTWISE,
        )
    value = _sum_lanes(acc) * 0.5
    tl.store(per_token_ptr + row + tl.arange(0, 1), tl.where(kept, value * weight, 0.0))


@triton.jit
def _reduce_step(
    per_token_ptr,
    labels_ptr,
    weights_ptr,
    ignore_index,
    start,
    tokens,
    total,
    count,
    MASKED: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Adds 8 * LANES tokens, and the weights of the kept ones, to the lanes."""
    for k in tl.static_range(8):
        offsets = start + k * LANES + tl.arange(0, LANES)
        mask = offsets < tokens if MASKED else offsets >= 0
        if MASKED:
            total += tl.load(per_token_ptr + offsets, mask=mask, other=0.0)
        else:
            total += tl.load(per_token_ptr + offsets)
        if COUNT:
            count += _row_weight(
                labels_ptr, weights_ptr, ignore_index, offsets, mask, HAS_LABELS, HAS_WEIGHTS
            )
    return total, count


@triton.jit(do_not_specialize=["ignore_index", "tokens"])
def tvd_reduce_kernel(
    per_token_ptr,
    labels_ptr,
    weights_ptr,
    normalizer_ptr,
    ignore_index,
    tokens,
    divisor,
    divisor_factor,
    loss_ptr,
    divisor_ptr,
    HAS_LABELS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_NORMALIZER: tl.constexpr,
    COUNT: tl.constexpr,
):
    """loss = sum of per_token / divisor, both written for the backward. Grid: (1,).

    The divisor is ``divisor_factor`` (vocab for the mean, else 1) times: the sum of the kept
    weights if COUNT, else the 0-d normalizer if HAS_NORMALIZER, else the number ``divisor``.
    """
    total = tl.zeros([LANES], tl.float32)
    count = tl.zeros([LANES], tl.float32)
    # Whole steps without a mask: tokens are not specialized, so a mask would split the loads.
    full = tokens // (8 * LANES) * (8 * LANES)
    for start in range(0, full, 8 * LANES):
        total, count = _reduce_step(
            per_token_ptr,
            labels_ptr,
            weights_ptr,
            ignore_index,
            start,
            tokens,
            total,
            count,
            False,
            HAS_LABELS,
            HAS_WEIGHTS,
            COUNT,
        )
    if full < tokens:
        total, count = _reduce_step(
            per_token_ptr,
            labels_ptr,
            weights_ptr,
            ignore_index,
            full,
            tokens,
            total,
            count,
            True,
            HAS_LABELS,
            HAS_WEIGHTS,
            COUNT,
        )
    value = _sum_lanes(total)
    one = tl.arange(0, 1)
    # tl.cast: a Python float is float64 under Inductor, and a plain float in the interpreter.
    if COUNT:
        denominator = _sum_lanes(count)
    elif HAS_NORMALIZER:
        denominator = tl.load(normalizer_ptr + one).to(tl.float32)
    else:
        denominator = tl.zeros([1], tl.float32) + tl.cast(divisor, tl.float32)
    denominator = denominator * tl.cast(divisor_factor, tl.float32)
    # 0 / 0 counts as 0: with no token kept the loss is 0.
    loss = tl.where(value == 0.0, 0.0, tl.div_rn(value, denominator))
    tl.store(loss_ptr + one, loss)
    tl.store(divisor_ptr + one, denominator)


@triton.jit
def _signed(code, value):
    """value, -value, 0 or NaN as the sign code says."""
    signed = tl.where(code == 1, value, tl.where(code == 2, -value, 0.0))
    return tl.where(code == 3, float("nan"), signed)


@triton.jit(do_not_specialize=["ignore_index"])
def tvd_backward_kernel(
    codes_ptr,
    upstream_ptr,
    divisor_ptr,
    labels_ptr,
    weights_ptr,
    ignore_index,
    vocab,
    dp_ptr,
    dq_ptr,
    UPSTREAM: tl.constexpr,
    HAS_DIVISOR: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    WANT_P: tl.constexpr,
    WANT_Q: tl.constexpr,
):
    """dp = sign(p - q) * (0.5 * upstream / divisor * weight) from the codes, and dq = -dp.

    Grid: (tokens * tiles,), one tile a program: what runs at a time writes one stretch of memory.
    UPSTREAM: 0 one number, 1 one per token, 2 one per element.
    """
    tiles = tl.cdiv(vocab, TILE)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    start = tl.program_id(0) % tiles * TILE
    weight = _row_weight(
        labels_ptr, weights_ptr, ignore_index, row, row >= 0, HAS_LABELS, HAS_WEIGHTS
    )
    if UPSTREAM == 1:
        scale = tl.load(upstream_ptr + row) * 0.5
    elif UPSTREAM == 0:
        scale = tl.load(upstream_ptr) * 0.5
    else:
        scale = 0.5
    if HAS_DIVISOR:
        scale = tl.div_rn(scale, tl.load(divisor_ptr))
    if HAS_WEIGHTS and UPSTREAM != 2:
        scale = scale * weight

    lanes = tl.arange(0, LANES)
    codes = tl.load(codes_ptr + row * (tiles * LANES) + start // 4 + lanes).to(tl.int32)
    # Selected, not multiplied: an ignored row may hold NaN codes, or none at all.
    codes = tl.where(weight == 0.0, 0, codes)
    for k in tl.static_range(4):
        offsets = start + k * LANES + lanes
        mask = offsets < vocab
        at = row * vocab + offsets
        if UPSTREAM == 2:
            value = (tl.load(upstream_ptr + at, mask=mask, other=0.0) * 0.5) * weight
        else:
            value = tl.zeros([LANES], tl.float32) + scale
        code = (codes >> (2 * k)) & 3
        if WANT_P:
            dp = _signed(code, value)
            tl.store(dp_ptr + at, dp.to(dp_ptr.dtype.element_ty), mask=mask)
        if WANT_Q:
            dq = _signed(code, -value)
            tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=mask)
