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
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))

# As in tvd_core.contract and tvd_core.config, which a kernel cannot read.
LANES = tl.constexpr(512)
TILE = tl.constexpr(2048)  # 4 sub-tiles of LANES elements, whose codes share LANES bytes
WORDS = tl.constexpr(128)  # of 4 bytes of codes each in a tile
WINDOW_ALIGNMENT = tl.constexpr(64)
PREFETCHED = tl.constexpr(32)  # programs whose codes one of them prefetches: 16 KiB
STEP = tl.constexpr(4096)  # tokens that a step of the sum over tokens takes


@triton.jit
def _sum_lanes(acc):
    """Adds LANES lanes: ((a0 + a1) + a2) + a3 in groups of 4, then adjacent pairs; shape [1]."""
    even, odd = tl.split(tl.reshape(acc, [128, 2, 2]))
    a0, a2 = tl.split(even)
    a1, a3 = tl.split(odd)
    s = ((a0 + a1) + a2) + a3
    # A sum of one element each, which changes nothing but stops the compiler from computing all of
    # the above in every thread, as it does below: after a gather that is 512 loads a thread.
    s = tl.sum(tl.reshape(s, [128, 1]), 1)
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
        weight = tl.load(weights_ptr + offsets, mask=mask).to(tl.float32)
    else:
        weight = offsets * 0.0 + 1.0
    if HAS_LABELS:
        label = tl.load(labels_ptr + offsets, mask=mask).to(tl.int64)
        weight = tl.where(label == ignore_index, 0.0, weight)
    if mask is not None:
        weight = tl.where(mask, weight, 0.0)
    return weight


@triton.jit
def _shift(row, vocab, ALIGNED: tl.constexpr):
    """Elements between the start of a row's windows and the row: 0 if every row is aligned.

    A row is read in windows that start at a multiple of WINDOW_ALIGNMENT elements, so that loads
    are 16 bytes wide whatever the vocabulary: with loads of single elements vocab 50257 took 25 %
    longer in bfloat16. Lane ``l`` then adds the elements of lane ``l - shift``, in the same order.
    """
    return 0 if ALIGNED else (row * vocab % WINDOW_ALIGNMENT).to(tl.int32)


@triton.jit
def _known_multiple(vocab, ALIGNED: tl.constexpr):
    """The vocab itself, as a product that the compiler can see to be a multiple of 16.

    PyTorch's launcher tells it, jax-triton does not, and the loads and stores that end at vocab
    would be of single elements: the backward took 89 us at 16384 x 4096, not 73.
    """
    return vocab // 16 * 16 if ALIGNED else vocab


@triton.jit
def _base(row, vocab, ALIGNED: tl.constexpr):
    """First element of a row's windows."""
    if ALIGNED:
        return row * vocab
    return row * vocab // WINDOW_ALIGNMENT * WINDOW_ALIGNMENT


@triton.jit
def _readable(base, end, vocab):
    """Where a masked window's loads stop: at a multiple of 16, so that they stay 16 bytes wide.

    The loads of a row go on into the next row, and what is not the row's is selected away. Only in
    the array's last row must they stop before its end, and up to 15 elements are left for loads of
    single elements.
    """
    limit = tl.num_programs(0).to(tl.int64) * vocab - base
    return tl.minimum((end + 15).to(tl.int64), limit).to(tl.int32) // 16 * 16


@triton.jit
def _load(pointers, inside, MASKED: tl.constexpr, STREAM: tl.constexpr):
    # Upcast at the load: bf16 arithmetic would lose bits, and is garbage in the interpreter.
    POLICY: tl.constexpr = "evict_first" if STREAM else ""
    if MASKED:
        return tl.load(pointers, mask=inside, other=0.0, eviction_policy=POLICY).to(tl.float32)
    return tl.load(pointers, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def _code(d):
    """The sign code of a difference."""
    return tl.where(d > 0, 1, tl.where(d < 0, 2, tl.where(d == 0, 0, 3)))


@triton.jit
def _store_elementwise(pointers, d, weight, inside):
    value = tl.where(weight == 0.0, 0.0, (0.5 * tl.abs(d)) * weight)
    tl.store(pointers, value, mask=inside)


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
    readable,
    weight,
    acc,
    before,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    KEEP_CODES: tl.constexpr,
    ELEMENTWISE: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Adds |p - q| of one window to the lanes; stores its codes or its elementwise values."""
    lanes = tl.arange(0, LANES)
    codes = tl.zeros([LANES], tl.int32)
    end = shift + vocab
    for k in tl.static_range(4):
        position = start + k * LANES + lanes
        p = _load(p_base + position, position < readable, MASKED, STREAM)
        q = _load(q_base + position, position < readable, MASKED, STREAM)
        d = p - q
        inside = (position >= shift) & (position < end)
        if MASKED and not ALIGNED:
            d = tl.where(inside, d, 0.0)
        acc += tl.abs(d)
        if KEEP_CODES:
            codes |= _code(d) << (2 * k)
        if ELEMENTWISE:
            stored = inside & (position < readable) if MASKED and not ALIGNED else inside
            _store_elementwise(elementwise_base + position, d, weight, stored)
    if MASKED and not ALIGNED:  # noqa: SIM102 (known when compiling)
        if (readable < end) & (readable >= start) & (readable < start + TILE):
            position = readable // LANES * LANES + lanes
            inside = (position >= readable) & (position >= shift) & (position < end)
            p = _load(p_base + position, inside, True, STREAM)
            q = _load(q_base + position, inside, True, STREAM)
            d = p - q
            acc += tl.abs(d)
            if KEEP_CODES:
                codes |= _code(d) << (2 * ((readable - start) // LANES))
            if ELEMENTWISE:
                _store_elementwise(elementwise_base + position, d, weight, inside)
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


# Numbers are not specialized, so that none of them compiles a new kernel: ALIGNED says what there
# is to know of vocab. ignore_index is annotated, or its type would follow its value.
@triton.jit(do_not_specialize=["ignore_index", "vocab"])
def tvd_forward_kernel(
    p_ptr,
    q_ptr,
    labels_ptr,
    weights_ptr,
    ignore_index: tl.int64,
    vocab,
    per_token_ptr,
    codes_ptr,
    elementwise_ptr,
    HAS_LABELS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    KEEP_CODES: tl.constexpr,
    ELEMENTWISE: tl.constexpr,
    ALIGNED: tl.constexpr,
    STAGES: tl.constexpr,
    STREAM: tl.constexpr,
):
    """per_token[row] = weight * 0.5 * sum_v |p - q|, with the sign codes if they are kept.

    Grid: (tokens,). An ignored row is not read, and its codes are not written, unless elementwise
    values are wanted. ALIGNED says that vocab is a multiple of 16. STAGES windows are in flight, as
    asynchronous copies if more than 1. STREAM: p and q leave L2 first, so that the codes stay.
    """
    row = tl.program_id(0).to(tl.int64)
    vocab = _known_multiple(vocab, ALIGNED)
    weight = _row_weight(labels_ptr, weights_ptr, ignore_index, row, None, HAS_LABELS, HAS_WEIGHTS)
    kept = weight != 0.0
    shift = _shift(row, vocab, ALIGNED)
    base = _base(row, vocab, ALIGNED)
    # Elementwise values of an ignored row have to be written too (as 0).
    end = vocab + shift if ELEMENTWISE else tl.where(kept, vocab + shift, 0)
    full = end // TILE * TILE
    readable = _readable(base, shift + vocab, vocab)

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
                readable,
                weight,
                acc,
                codes,
                True,
                ALIGNED,
                KEEP_CODES,
                ELEMENTWISE,
                STREAM,
            )
        first = TILE
    for start in tl.range(first, full, TILE, num_stages=STAGES):
        acc, codes = _forward_tile(
            p_base,
            q_base,
            codes_row,
            codes_bytes,
            elementwise_base,
            start,
            shift,
            vocab,
            readable,
            weight,
            acc,
            codes,
            False,
            ALIGNED,
            KEEP_CODES,
            ELEMENTWISE,
            STREAM,
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
            readable,
            weight,
            acc,
            codes,
            True,
            ALIGNED,
            KEEP_CODES,
            ELEMENTWISE,
            STREAM,
        )
        full += TILE
    if not ALIGNED:
        if KEEP_CODES and kept:
            _store_shifted(codes_row, codes_bytes, full, shift, codes, tl.zeros_like(codes))
        acc = tl.gather(acc, (tl.arange(0, LANES) + shift) % LANES, 0)
    value = _sum_lanes(acc) * 0.5
    tl.store(per_token_ptr + row + tl.arange(0, 1), tl.where(kept, value * weight, 0.0))


@triton.jit
def _sum_tokens(per_token_ptr, tokens):
    """Sum of the tokens' values in the contract's order; shape [1]."""
    pointers = per_token_ptr + tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float32)
    # Whole steps have no mask: tokens are not specialized, so a mask would split the loads.
    full = tokens // STEP * STEP
    if full > 0:  # else the copies' set-up would cost 0.4 us
        # num_stages: asynchronous copies of the next steps. ptxas puts no load before the sums of
        # the step before, so each step would wait for memory anew (16384 tokens: 3.8 us, not 2.5).
        for start in tl.range(0, full, STEP, num_stages=4):
            for k in tl.static_range(STEP // LANES):
                total += tl.load(pointers + start + k * LANES)
    if full < tokens:
        for k in tl.static_range(STEP // LANES):
            mask = full + k * LANES + tl.arange(0, LANES) < tokens
            total += tl.load(pointers + full + k * LANES, mask=mask, other=0.0)
    return _sum_lanes(total)


@triton.jit
def _sum_weights(
    labels_ptr,
    weights_ptr,
    ignore_index,
    tokens,
    HAS_LABELS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):
    """Sum of the kept tokens' weights in the contract's order; shape [1]."""
    count = tl.zeros([LANES], tl.float32)
    full = tokens // STEP * STEP
    for start in range(0, full, STEP):
        for k in tl.static_range(STEP // LANES):
            offsets = start + k * LANES + tl.arange(0, LANES)
            count += _row_weight(
                labels_ptr, weights_ptr, ignore_index, offsets, None, HAS_LABELS, HAS_WEIGHTS
            )
    if full < tokens:
        for k in tl.static_range(STEP // LANES):
            offsets = full + k * LANES + tl.arange(0, LANES)
            mask = offsets < tokens
            count += _row_weight(
                labels_ptr, weights_ptr, ignore_index, offsets, mask, HAS_LABELS, HAS_WEIGHTS
            )
    return _sum_lanes(count)


@triton.jit(do_not_specialize=["ignore_index", "tokens"])
def tvd_reduce_kernel(
    per_token_ptr,
    labels_ptr,
    weights_ptr,
    normalizer_ptr,
    ignore_index: tl.int64,
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
    value = _sum_tokens(per_token_ptr, tokens)
    one = tl.arange(0, 1)
    # tl.cast: a Python float is float64 under Inductor, and a plain float in the interpreter.
    if COUNT:
        denominator = _sum_weights(
            labels_ptr, weights_ptr, ignore_index, tokens, HAS_LABELS, HAS_WEIGHTS
        )
    elif HAS_NORMALIZER:
        denominator = tl.load(normalizer_ptr + one).to(tl.float32)
    else:
        denominator = tl.zeros([1], tl.float32) + tl.cast(divisor, tl.float32)
    denominator = denominator * tl.cast(divisor_factor, tl.float32)
    # 0 / 0 counts as 0: with no token kept the loss is 0.
    nothing = (value == 0.0) & (denominator == 0.0)
    loss = tl.where(nothing, 0.0, tl.div_rn(value, denominator))
    tl.store(divisor_ptr + one, denominator)
    tl.store(loss_ptr + one, loss)  # last: a launcher that wants no divisor points both there


@triton.jit
def _signed(code, value):
    """sign * value: at a tie 0, or NaN where the value is not finite, as 0 * value is."""
    signed = tl.where(code == 1, value, tl.where(code == 2, -value, value * 0.0))
    return tl.where(code == 3, float("nan"), signed)


@triton.jit
def _byte_permute(low, high, selectors):
    """The 4 of 8 bytes that the lowest 4 hexadecimal digits (0 to 7) choose: one instruction."""
    if not INTERPRETED:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [low, high, selectors],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    # Triton's interpreter knows no assembly, and takes 0.1 ms for an operation of any size.
    zeros = (low & 0) | (selectors & 0)  # either may be a scalar
    table = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF) | zeros
    i = tl.arange(0, 4)
    chosen = (((selectors | zeros)[:, None] >> (i << 2)) & 7) << 3
    chosen = ((table[:, None] >> chosen.to(tl.int64)) & 0xFF).to(tl.int32)
    return tl.sum(chosen << (i << 3), axis=1)


@triton.jit
def _prefetch_codes(codes_ptr, codes_bytes, windows, PREFETCH: tl.constexpr):
    """Asks for the codes that the next PREFETCH programs will load, to stay in L2 until then.

    The first programs of each PREFETCH of them ask for 16 KiB each. DRAM loses time in every turn
    between reads and writes: reading 4 MiB at a time costs less than reading the same bytes bit by
    bit among the stores of the gradients (65 us and not 73 at 16384 x 4096).
    """
    part = tl.program_id(0) % PREFETCH
    if part < PREFETCH // PREFETCHED:
        first = tl.program_id(0).to(tl.int64) - part + part * PREFETCHED
        _prefetch(codes_ptr, codes_bytes, windows, first + PREFETCH)
        if tl.program_id(0) == part:  # nobody asked for the first ones
            _prefetch(codes_ptr, codes_bytes, windows, first)


@triton.jit
def _prefetch(codes_ptr, codes_bytes, windows, first):
    """Asks for the codes of PREFETCHED programs from ``first`` on, if they all exist."""
    tiles = codes_bytes // LANES  # of codes in a row, which may have one window more
    tile = first * tiles // windows
    if tile + PREFETCHED <= tl.num_programs(0) // windows * tiles:
        addresses = codes_ptr + tile * LANES + tl.arange(0, PREFETCHED * LANES // 128) * 128
        if INTERPRETED:
            tl.load(addresses + 127)  # so that tests see what is touched
        else:
            tl.inline_asm_elementwise(
                "prefetch.global.L2::evict_last [$1]; mov.b32 $0, 0;",
                "=r,l",
                [addresses.to(tl.int64)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def _load_words(codes_row, codes_bytes, first):
    """128 words of 4 lanes' codes from byte ``first`` of a row on; garbage outside the row.

    The byte need not be a multiple of 4, as a load has to be.
    """
    offset = (first % 4 + 4) % 4  # not negative, as C's remainder can be
    at = (first - offset) // 4 + tl.arange(0, WORDS)
    words = codes_row.to(tl.pointer_type(tl.int32), bitcast=True)
    low = tl.load(words + at, mask=(at >= 0) & (at < codes_bytes // 4), other=0)
    at += 1
    high = tl.load(words + at, mask=(at >= 0) & (at < codes_bytes // 4), other=0)
    return _byte_permute(low, high, 0x3210 + offset * 0x1111)


@triton.jit
def _load_shifted(codes_row, codes_bytes, start, shift):
    """Codes of a window from the row's tiles, 4 lanes a word: what ``_store_shifted`` stored."""
    first = start // 4 - shift
    own = _load_words(codes_row, codes_bytes, first)
    below = _load_words(codes_row, codes_bytes, first + LANES)
    # The first lanes of a window are the last of the tile before, one sub-tile lower.
    moved = ((own >> 6) & 0x03030303) | ((below & 0x3F3F3F3F) << 2)
    lanes = tl.minimum(tl.maximum(shift - 4 * tl.arange(0, WORDS), 0), 4)
    mask = ((tl.full([WORDS], 1, tl.int64) << (8 * lanes).to(tl.int64)) - 1).to(tl.int32)
    return (own & ~mask) | (moved & mask)


@triton.jit
def _unpack(words):
    """The codes of LANES lanes, one of them in each element."""
    even = tl.join(words & 0xFF, (words >> 16) & 0xFF)
    odd = tl.join((words >> 8) & 0xFF, (words >> 24) & 0xFF)
    return tl.reshape(tl.join(even, odd), [LANES])


@triton.constexpr_function
def _nan_bits(dtype):
    """The quiet NaN. Written out: what a conversion makes of a NaN differs between compilers."""
    return {"fp32": 0x7FC00000, "bf16": 0x7FC0, "fp16": 0x7E00}[dtype.name]


@triton.jit
def _bits(value, pointer):
    """A float32 scalar as bits of what ``pointer`` points to, in the low end of an int32."""
    value = value.to(pointer.dtype.element_ty)
    if pointer.dtype.element_ty.primitive_bitwidth == 32:
        return value.to(tl.int32, bitcast=True)
    else:  # not after the if, where it would be compiled for 32 bits too
        return value.to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def _pair(low, high):
    """Two words' low halves in one word."""
    return (low & 0xFFFF) | (high << 16)


@triton.jit
def _store_signed(x_ptr, base, start, shift, vocab, words, value, inner, ALIGNED: tl.constexpr):
    """Stores sign * value for a window, where the value is one number.

    It makes the 4 gradients that a code can stand for once and has byte permutations look them up,
    2 at a time: 1.5 instructions an element of 2 bytes and 3 of 4 bytes. Selected by comparisons,
    9 instructions an element, bfloat16 took 396 us at 16384 x 32768, and this way 302.
    """
    tie, plus, minus = _bits(value * 0.0, x_ptr), _bits(value, x_ptr), _bits(-value, x_ptr)
    nan = tl.full([], _nan_bits(x_ptr.dtype.element_ty), tl.int32)
    table_low, table_high = _pair(tie, plus), _pair(minus, nan)
    for k in tl.static_range(4):
        # Code c stands for the bytes 2 c and 2 c + 1 of a table.
        selectors = ((words >> (2 * k)) & 0x03030303) * 0x22 + 0x10101010
        x01 = _byte_permute(table_low, table_high, selectors)
        x23 = _byte_permute(table_low, table_high, selectors >> 16)
        if x_ptr.dtype.element_ty.primitive_bitwidth == 32:
            upper_low, upper_high = _pair(tie >> 16, plus >> 16), _pair(minus >> 16, nan >> 16)
            upper01 = _byte_permute(upper_low, upper_high, selectors)
            upper23 = _byte_permute(upper_low, upper_high, selectors >> 16)
            x0 = _byte_permute(x01, upper01, 0x5410)
            x1 = _byte_permute(x01, upper01, 0x7632)
            x2 = _byte_permute(x23, upper23, 0x5410)
            x3 = _byte_permute(x23, upper23, 0x7632)
            bits = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [LANES])
        else:
            bits = tl.reshape(tl.join(x01, x23), [LANES // 2])
        _store_bits(x_ptr + base, start + k * LANES, shift, vocab, bits, inner, ALIGNED)


@triton.jit
def _store_bits(x_row, first, shift, vocab, bits, inner, ALIGNED: tl.constexpr):
    """Stores words of one or two elements each, and nothing that is not the row's."""
    COUNT: tl.constexpr = bits.shape[0]
    words = tl.arange(0, COUNT)
    pointers = (x_row + first).to(tl.pointer_type(tl.int32), bitcast=True) + words
    if ALIGNED:
        # Words before the row's end: what the compiler needs for stores of more than one.
        mask = words < (vocab - first) // (LANES // COUNT)
        tl.store(pointers, bits, mask=mask, eviction_policy="evict_first")
    elif inner:
        tl.store(pointers, bits, eviction_policy="evict_first")
    elif COUNT == LANES:
        _store_edge(x_row, first, shift, vocab, bits)
    else:
        halves = tl.reshape(tl.join(bits, bits >> 16), [LANES]).to(tl.int16)
        _store_edge(x_row, first, shift, vocab, halves)


@triton.jit
def _store_edge(x_row, first, shift, vocab, bits):
    """Stores the row's elements of a window that has others too."""
    position = first + tl.arange(0, LANES)
    inside = (position >= shift) & (position < shift + vocab)
    pointers = x_row.to(tl.pointer_type(bits.dtype), bitcast=True) + position
    tl.store(pointers, bits, mask=inside, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["ignore_index", "vocab"])
def tvd_backward_kernel(
    codes_ptr,
    upstream_ptr,
    divisor_ptr,
    labels_ptr,
    weights_ptr,
    ignore_index: tl.int64,
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
    PREFETCH: tl.constexpr,
):
    """dp = sign(p - q) * (0.5 * upstream / divisor * weight) from the codes, and dq = -dp.

    Grid: (tokens * windows,), one window a program: what runs at a time writes one stretch of
    memory. windows = ceil((vocab + (0 if ALIGNED else WINDOW_ALIGNMENT - 1)) / TILE).
    UPSTREAM: 0 one number, 1 one per token, 2 one per element. PREFETCH: programs whose codes are
    read into L2 at a time.
    """
    vocab = _known_multiple(vocab, ALIGNED)
    windows = tl.cdiv(vocab + (0 if ALIGNED else WINDOW_ALIGNMENT - 1), TILE)
    codes_bytes = tl.cdiv(vocab, TILE) * LANES
    _prefetch_codes(codes_ptr, codes_bytes, windows, PREFETCH)
    row = (tl.program_id(0) // windows).to(tl.int64)
    start = tl.program_id(0) % windows * TILE
    shift = _shift(row, vocab, ALIGNED)
    base = _base(row, vocab, ALIGNED)
    weight = _row_weight(labels_ptr, weights_ptr, ignore_index, row, None, HAS_LABELS, HAS_WEIGHTS)
    # Selected, not multiplied: the upstream gradient of an ignored row may be NaN, and its codes
    # may say NaN or not have been written.
    ignored = weight == 0.0

    codes_row = codes_ptr + row * codes_bytes
    if ALIGNED:
        words_row = (codes_row + start // 4).to(tl.pointer_type(tl.int32), bitcast=True)
        words = tl.load(words_row + tl.arange(0, WORDS), eviction_policy="evict_first")
    else:
        words = _load_shifted(codes_row, codes_bytes, start, shift)
    words = tl.where(ignored, 0, words)
    # Inner windows are stored without a mask: only so do stores of an odd vocabulary stay wide.
    inner = (start > 0) & (start + TILE <= vocab + shift)
    if UPSTREAM == 2:
        codes = _unpack(words)
        for k in tl.static_range(4):
            position = start + k * LANES + tl.arange(0, LANES)
            mask = (position >= shift) & (position < shift + vocab)
            at = base + position
            value = (tl.load(upstream_ptr + at, mask=mask, other=0.0) * 0.5) * weight
            value = tl.where(ignored, 0.0, value)
            code = (codes >> (2 * k)) & 3
            if WANT_P:
                _store(dp_ptr + at, _signed(code, value), mask, inner, ALIGNED)
            if WANT_Q:
                _store(dq_ptr + at, _signed(code, -value), mask, inner, ALIGNED)
    else:
        scale = tl.load(upstream_ptr + (row if UPSTREAM == 1 else 0)) * 0.5
        if HAS_DIVISOR:
            scale = tl.div_rn(scale, tl.load(divisor_ptr))
        if HAS_WEIGHTS:
            scale = scale * weight
        scale = tl.where(ignored, 0.0, scale)
        if WANT_P:
            _store_signed(dp_ptr, base, start, shift, vocab, words, scale, inner, ALIGNED)
        if WANT_Q:
            _store_signed(dq_ptr, base, start, shift, vocab, words, -scale, inner, ALIGNED)


@triton.jit
def _store(pointers, value, mask, inner, ALIGNED: tl.constexpr):
    value = value.to(pointers.dtype.element_ty)
    if ALIGNED:
        tl.store(pointers, value, mask=mask)
    elif inner:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=mask)
