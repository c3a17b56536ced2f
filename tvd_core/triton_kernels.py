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
def _shift(row, vocab, ALIGNED: tl.constexpr):
    """Elements between the start of a row's windows and the row: 0 if every row is aligned.

    A row is read in windows that start at a multiple of 16 elements, so that loads are 16 bytes
    wide whatever the vocabulary: with loads of single elements vocab 50257 took 25 % longer in
    bfloat16. Lane ``l`` then adds the elements of lane ``l - shift``, in the same order.
    """
    return 0 if ALIGNED else (row * vocab % 16).to(tl.int32)


@triton.jit
def _load(x_base, position, first, last, MASKED: tl.constexpr):
    """Elements of a window as float32, 0 outside of the row."""
    # Upcast at the load: bf16 arithmetic would lose bits, and is garbage in the interpreter.
    if MASKED:
        mask = (position >= first) & (position < last)
        return tl.load(x_base + position, mask=mask, other=0.0).to(tl.float32)
    return tl.load(x_base + position).to(tl.float32)


@triton.jit
def _forward_tile(
    p_base,
    q_base,
    codes_row,
    codes_bytes,
    elementwise_base,
    start,
    shift,
    vocab,
    weight,
    acc,
    before,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    KEEP_CODES: tl.constexpr,
    ELEMENTWISE: tl.constexpr,
):
    """Adds |p - q| of one window to the lanes; stores its codes or its elementwise values."""
    lanes = tl.arange(0, LANES)
    codes = tl.zeros([LANES], tl.int32)
    for k in tl.static_range(4):
        position = start + k * LANES + lanes
        p = _load(p_base, position, shift, shift + vocab, MASKED)
        q = _load(q_base, position, shift, shift + vocab, MASKED)
        d = p - q
        acc += tl.abs(d)
        if KEEP_CODES:
            sign = tl.where(d > 0, 1, tl.where(d < 0, 2, tl.where(d == 0, 0, 3)))
            codes |= sign << (2 * k)
        if ELEMENTWISE:
            value = tl.where(weight == 0.0, 0.0, (0.5 * tl.abs(d)) * weight)
            mask = (position >= shift) & (position < shift + vocab)
            tl.store(elementwise_base + position, value, mask=mask)
    if KEEP_CODES:
        if ALIGNED:
            tl.store(codes_row + start // 4 + lanes, codes.to(tl.uint8))
        else:
            _store_shifted(codes_row, codes_bytes, start, shift, before, codes)
    return acc, codes


@triton.jit
def _store_shifted(codes_row, codes_bytes, start, shift, before, codes):
    """Stores the codes of a window where they belong in the row's tiles, shift bytes lower.

    The first lanes of a window end up in the last bytes of the tile before, one sub-tile lower:
    their first code is the fourth there, and the other three come from the window before.
    """
    lanes = tl.arange(0, LANES)
    value = tl.where(lanes >= shift, codes, (before >> 2) | ((codes & 3) << 6))
    at = start // 4 + lanes - shift
    tl.store(codes_row + at, value.to(tl.uint8), mask=(at >= 0) & (at < codes_bytes))


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
    ALIGNED: tl.constexpr,
):
    """per_token[row] = weight * 0.5 * sum_v |p - q|, with the sign codes if they are kept.

    Grid: (tokens,). An ignored row is not read, and its codes are not written. ALIGNED says that
    vocab is a multiple of 16.
    """
    row = tl.program_id(0).to(tl.int64)
    weight = _row_weight(
        labels_ptr, weights_ptr, ignore_index, row, row >= 0, HAS_LABELS, HAS_WEIGHTS
    )
    kept = weight != 0.0
    shift = _shift(row, vocab, ALIGNED)
    # A product, so that the compiler sees that the windows are aligned; jax-triton does not tell it
    # that vocab is a multiple of 16.
    base = row * vocab // 16 * 16
    # Elementwise values of an ignored row have to be written too (as 0).
    end = vocab + shift if ELEMENTWISE else tl.where(kept, vocab + shift, 0)
    full = end // TILE * TILE

    p_base = p_ptr + base
    q_base = q_ptr + base
    elementwise_base = elementwise_ptr + base
    codes_bytes = tl.cdiv(vocab, TILE) * LANES
    codes_row = codes_ptr + row * codes_bytes
    acc = tl.zeros([LANES], tl.float32)
    codes = tl.zeros([LANES], tl.int32)
    first = 0
    if not ALIGNED:
        # The first window holds elements of the row before.
        if full > 0:
            acc, codes = _forward_tile(
                p_base,
                q_base,
                codes_row,
                codes_bytes,
                elementwise_base,
                0,
                shift,
                vocab,
                weight,
                acc,
                codes,
                True,
                ALIGNED,
                KEEP_CODES,
                ELEMENTWISE,
            )
        first = TILE
    for start in range(first, full, TILE):
        acc, codes = _forward_tile(
            p_base,
            q_base,
            codes_row,
            codes_bytes,
            elementwise_base,
            start,
            shift,
            vocab,
            weight,
            acc,
            codes,
            False,
            ALIGNED,
            KEEP_CODES,
            ELEMENTWISE,
        )
    if full < end:
        acc, codes = _forward_tile(
            p_base,
            q_base,
            codes_row,
            codes_bytes,
            elementwise_base,
            full,
            shift,
            vocab,
            weight,
            acc,
            codes,
            True,
            ALIGNED,
            KEEP_CODES,
            ELEMENTWISE,
        )
        full += TILE
    if not ALIGNED:
        if KEEP_CODES and kept:
            _store_shifted(codes_row, codes_bytes, full, shift, codes, tl.zeros_like(codes))
        acc = tl.gather(acc, (tl.arange(0, LANES) + shift) % LANES, 0)
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
    ALIGNED: tl.constexpr,
):
    """dp = sign(p - q) * (0.5 * upstream / divisor * weight) from the codes, and dq = -dp.

    Grid: (tokens * windows,), one window a program: what runs at a time writes one stretch of
    memory. windows = ceil((vocab + (0 if ALIGNED else 15)) / TILE).
    UPSTREAM: 0 one number, 1 one per token, 2 one per element.
    """
    windows = tl.cdiv(vocab + (0 if ALIGNED else 15), TILE)
    row = (tl.program_id(0) // windows).to(tl.int64)
    start = tl.program_id(0) % windows * TILE
    shift = _shift(row, vocab, ALIGNED)
    base = row * vocab // 16 * 16
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
    codes_bytes = tl.cdiv(vocab, TILE) * LANES
    codes_row = codes_ptr + row * codes_bytes
    if ALIGNED:
        codes = tl.load(codes_row + start // 4 + lanes).to(tl.int32)
    else:
        codes = _load_shifted(codes_row, codes_bytes, start, shift)
    # Selected, not multiplied: an ignored row may hold NaN codes, or none at all.
    codes = tl.where(weight == 0.0, 0, codes)
    # Inner windows are stored without a mask: only so do stores of an odd vocabulary stay wide.
    inner = (start > 0) & (start + TILE <= vocab + shift)
    for k in tl.static_range(4):
        position = start + k * LANES + lanes
        mask = (position >= shift) & (position < shift + vocab)
        at = base + position
        if UPSTREAM == 2:
            value = (tl.load(upstream_ptr + at, mask=mask, other=0.0) * 0.5) * weight
        else:
            value = tl.zeros([LANES], tl.float32) + scale
        code = (codes >> (2 * k)) & 3
        if WANT_P:
            _store(dp_ptr + at, _signed(code, value), mask, inner, ALIGNED)
        if WANT_Q:
            _store(dq_ptr + at, _signed(code, -value), mask, inner, ALIGNED)


@triton.jit
def _store(pointers, value, mask, inner, ALIGNED: tl.constexpr):
    value = value.to(pointers.dtype.element_ty)
    if ALIGNED:
        tl.store(pointers, value, mask=mask)
    elif inner:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=mask)


@triton.jit
def _load_shifted(codes_row, codes_bytes, start, shift):
    """Codes of a window from the row's tiles: what ``_store_shifted`` stored."""
    lanes = tl.arange(0, LANES)
    at = start // 4 + lanes - shift
    inside = (at >= 0) & (at < codes_bytes)
    own = tl.load(codes_row + at, mask=inside & (lanes >= shift), other=0).to(tl.int32)
    low = lanes < shift
    above = tl.load(codes_row + at, mask=inside & low, other=0).to(tl.int32)
    at += LANES
    below = tl.load(codes_row + at, mask=(at < codes_bytes) & low, other=0).to(tl.int32)
    return own | (above >> 6) | ((below & 63) << 2)
