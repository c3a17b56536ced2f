"""The Pallas Mosaic GPU kernels of the losses from logits (Hopper and newer).

A persistent grid of blocks of GROUPS warpgroups, which share a row. A tile of LOGITS_TILE elements
is four sub-tiles of LOGITS_LANES elements, and each warpgroup takes its LANES of every sub-tile, so
that lane ``j`` of the row is lane ``j % LANES`` of warpgroup ``j // LANES``. Each warpgroup has a
ring of shared-memory slots of its own, which TMA fills ahead; they meet where a number of the whole
row is needed, through ``_Exchange``.

A row is read twice: for the sums of both softmaxes, then for the difference. If the ring holds a
whole row, the second time reads shared memory, else L2.
"""

import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tvd_core import config
from tvd_core.contract import LANES, LOGITS_LANES, LOGITS_TILE, base_2_scale
from tvd_jax import compat, pallas_ptx

GROUPS = LOGITS_LANES // LANES
SUB_TILES = LOGITS_TILE // LOGITS_LANES
ROW_ALIGNMENT = 16  # bytes at a multiple of which rows must start for TMA
LOWEST = config.LOGITS_LOWEST
HIGHEST_SUM = config.LOGITS_HIGHEST_SUM
SAMPLE = config.LOGITS_SAMPLE
LN2 = math.log(2)
_ADD, _MAX = "add", "max"


class _Statistics(enum.Enum):
    """Where references and factors of rows come from, as for the Triton kernel; a kernel's name."""

    COMPUTED = "logits_forward"
    ALONE = "logits_statistics"  # computed, and nothing else
    GIVEN = "logits_differences"


def _i32(x: int) -> Any:
    """A 32-bit index; a Python int would be 64 bits wide under jax_enable_x64."""
    return jnp.int32(x)


def _f32(x: float) -> Any:
    return jnp.float32(x)


def _vector(x: Any) -> Any:
    """Lays LANES elements out over a warpgroup, 4 neighbours a thread."""
    return compat.layout_cast(x, plgpu.Layout.WG_STRIDED((LANES,), vec_size=4))


def _splat(scalar: Any) -> Any:
    return _vector(jnp.full((LANES,), scalar))


def _lanes() -> Any:
    return _vector(lax.broadcasted_iota(jnp.int32, (LANES,), 0))


def _padded(x: jax.Array) -> jax.Array:
    """Rows that TMA can copy: filled up with -inf, which changes nothing, if they are not."""
    multiple = ROW_ALIGNMENT // x.dtype.itemsize
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple)), constant_values=-jnp.inf)


class _Exchange:
    """Sums and maxima over all lanes of a block.

    The order within a warpgroup is that of Mosaic's reduction: 4 neighbours, then lanes by strides
    1 to 16, then warps; that reduction itself keeps its scratch in memory that the warpgroups of a
    block would share. Two exchanges in a row use different ``parts`` of the shared memory, so that
    one barrier each is enough.
    """

    WARPS = 4 * GROUPS

    def __init__(self, smem: Any, barrier: Any, group: Any) -> None:
        self.smem, self.barrier, self.group = smem, barrier, group

    @classmethod
    def scratch(cls, parts: int) -> tuple[Any, Any]:
        return (
            plgpu.SMEM((parts, cls.WARPS), jnp.float32),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=1),
        )

    def __call__(self, op: str, part: int, vectors: Sequence[Any]) -> list[Any]:
        for i, x in enumerate(vectors):
            here = self.smem.at[part + i, pl.ds(self.group * 4, 4)]
            if compat.interpreting():
                here[...] = _warp_values(op, x)
            else:
                pallas_ptx.reduce_warps(op, x, here)
        if compat.interpreting():
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)
        else:
            pallas_ptx.sync_threads(128 * GROUPS)
        combine = jnp.add if op == _ADD else jnp.maximum
        return [self._row_value(part + i, combine) for i in range(len(vectors))]

    def _row_value(self, part: int, combine: Callable[[Any, Any], Any]) -> Any:
        # The interpreter calls back to Python for each read.
        here = self.smem[part] if compat.interpreting() else self.smem.at[part]
        values = [here[w] for w in range(self.WARPS)]
        while len(values) > 1:
            values = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
        return values[0]


def _warp_values(op: str, x: Any) -> Any:
    """What ``pallas_ptx.reduce_warps`` computes, for the interpreter."""
    x = x.reshape(LANES // 4, 4)
    combine = jnp.add if op == _ADD else jnp.maximum
    x = functools.reduce(combine, [x[:, i] for i in range(4)])
    while x.size > 4:
        x = combine(x.reshape(-1, 2)[:, 0], x.reshape(-1, 2)[:, 1])
    return x


def _widened(x: Any) -> Any:
    """A vector as float32."""
    if compat.interpreting() or x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)
    return pallas_ptx.widen_bfloat16(x)


def _add_below(d: Any, exponential: Any, total: Any, codes: Any) -> tuple[Any, Any]:
    """Adds (1 - sign(d)) / 2 * exponential to the total, and half of d's code below those before.

    The Triton kernel's ``_below`` and ``_difference_tile`` say how.
    """
    if not compat.interpreting():
        half_code = pallas_ptx.below(d)
        four = _splat(_f32(4))
        return pallas_ptx.fma(exponential, half_code, total), pallas_ptx.fma(codes, four, half_code)
    half_code = jnp.where(d >= 2.0**-126, 0.0, jnp.where(d <= -(2.0**-126), 1.0, 0.5))
    half_code = half_code.astype(jnp.float32)
    return total + exponential * half_code, codes * 4 + half_code


def _exponent(x: Any, scale: float, reference: Any) -> Any:
    """``x * scale - reference``, rounded once; if cold, the reference is a logit."""
    if scale > config.LOGITS_COLD_SCALE:
        if compat.interpreting():
            return (x - reference) * _f32(scale)
        return _product(x - _splat(reference), _f32(scale))
    if compat.interpreting():
        return x * _f32(scale) - reference
    return pallas_ptx.fma(x, _splat(_f32(scale)), _splat(-reference))


def _divide(a: Any, b: Any) -> Any:
    return a / b if compat.interpreting() else pallas_ptx.divide(a, b)


def _product(x: Any, factor: Any) -> Any:
    """``x * factor``, rounded before anything is added to it: p - p has to be 0.

    And so that gradients have Triton's bits, which are compiled without contraction to an FMA.
    """
    if compat.interpreting():
        return x * factor
    if x.ndim == 0:
        return pallas_ptx.mul_scalar(x, factor)
    return pallas_ptx.mul(x, factor if factor.ndim else _splat(factor))


def _fma(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of scalars, rounded once."""
    return a * b + c if compat.interpreting() else pallas_ptx.fma_scalar(a, b, c)


class _Rows:
    """A row as one warpgroup sees it: tiles of SUB_TILES sub-tiles, copied in units of some."""

    def __init__(self, vocab: int, group: Any, unit: int = SUB_TILES) -> None:
        self.vocab, self.group, self.unit = vocab, group, unit
        self.full = vocab // LOGITS_TILE
        self.in_tile = SUB_TILES // unit
        self.elements = unit * LOGITS_LANES
        self.units = -(-vocab // self.elements)

    def column(self, tile: Any, k: int) -> Any:
        """First column of a sub-tile; as a product, so that the compiler sees the alignment."""
        return (tile * (LOGITS_TILE // LANES) + (k * GROUPS + self.group)) * LANES

    def fetch(self, x_gmem: Any, x_smem: Any, row: Any, unit: Any, barrier: Any) -> None:
        """Starts the copy of a unit for all warpgroups; it arrives at ``barrier``."""

        def copy(start: Any, size: int) -> None:
            plgpu.copy_gmem_to_smem(
                x_gmem.at[row, pl.ds(start, size)],
                x_smem.at[pl.ds(0, size)],
                barrier,
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

        last = (self.units - 1) * self.elements
        size = x_gmem.shape[1] - last
        if size == self.elements:
            copy(unit * self.elements, self.elements)
            return
        if self.units > 1:
            pl.when(unit < self.units - 1)(lambda: copy(unit * self.elements, self.elements))
        pl.when(unit == self.units - 1)(lambda: copy(last, size))

    def logits(self, x_smem: Any, tile: Any, k: int, masked: bool) -> Any:
        """A sub-tile in registers as float32, -inf where it is not the row's."""
        at = pl.ds((k % self.unit * GROUPS + self.group) * LANES, LANES)
        x = _widened(_vector(x_smem[at]))
        if masked:
            inside = _lanes() < self.vocab - self.column(tile, k)
            x = jnp.where(inside, x, _splat(_f32(-jnp.inf)))
        return x

    def over_tiles(self, step: Callable[[Any, int, Any, bool], Any], carry: Any) -> Any:
        """``step(tile, units, carry, masked)`` over the tiles, the last of which may be partial."""
        carry = lax.fori_loop(
            _i32(0), _i32(self.full), lambda tile, c: step(tile, self.in_tile, c, False), carry
        )
        rest = self.units - self.full * self.in_tile
        return step(_i32(self.full), rest, carry, True) if rest else carry


def logits_forward(
    student: jax.Array,
    teacher: jax.Array,
    row_weights: jax.Array | None,
    *,
    temperature: float,
    want_kl: bool,
    keep_codes: bool,
) -> tuple[Any, ...]:
    """See :func:`tvd_jax.triton_launch.logits_forward`."""
    named = _forward(
        student, teacher, row_weights, None, temperature, want_kl, keep_codes, _Statistics.COMPUTED
    )
    first = tuple(named[name] for name in ("tvd", "s_rows", "t_rows", "s_lse", "t_lse"))
    return *first, named.get("kl"), named.get("codes")


def logits_statistics(
    student: jax.Array, teacher: jax.Array, row_weights: jax.Array | None, *, temperature: float
) -> tuple[Any, Any]:
    """See :func:`tvd_jax.triton_launch.logits_statistics`."""
    named = _forward(
        student, teacher, row_weights, None, temperature, False, False, _Statistics.ALONE
    )
    return named["s_rows"], named["t_rows"]


def logits_differences(
    student: jax.Array,
    teacher: jax.Array,
    row_weights: jax.Array | None,
    given: jax.Array,
    *,
    temperature: float,
    want_kl: bool,
    keep_codes: bool,
) -> tuple[Any, ...]:
    """See :func:`tvd_jax.triton_launch.logits_differences`."""
    named = _forward(
        student, teacher, row_weights, given, temperature, want_kl, keep_codes, _Statistics.GIVEN
    )
    return named["tvd"], named.get("below"), named.get("kl"), named.get("codes")


def _forward_outputs(
    tokens: int, vocab: int, want_kl: bool, keep_codes: bool, statistics: _Statistics
) -> dict[str, Any]:
    values = jax.ShapeDtypeStruct((tokens,), jnp.float32)
    codes = jax.ShapeDtypeStruct((tokens, config.logits_codes_bytes(vocab)), jnp.uint8)
    if statistics is _Statistics.ALONE:
        two = jax.ShapeDtypeStruct((2, tokens), jnp.float32)
        return {"s_rows": two, "t_rows": two}
    outputs = {"tvd": values}
    if statistics is _Statistics.COMPUTED:
        three = jax.ShapeDtypeStruct((3, tokens), jnp.float32)
        outputs |= {"s_rows": three, "t_rows": three, "s_lse": values, "t_lse": values}
    elif keep_codes:
        outputs["below"] = values
    outputs |= {"kl": values} if want_kl else {}
    return outputs | ({"codes": codes} if keep_codes else {})


def _forward(
    student: jax.Array,
    teacher: jax.Array,
    row_weights: jax.Array | None,
    given: jax.Array | None,
    temperature: float,
    want_kl: bool,
    keep_codes: bool,
    statistics: _Statistics,
) -> dict[str, Any]:
    tokens, vocab = student.shape
    student, teacher = _padded(student), _padded(teacher)
    scale = base_2_scale(temperature)
    unit_of_reference = config.logits_reference_unit(scale)
    pair_bytes = student.dtype.itemsize + teacher.dtype.itemsize
    unit = SUB_TILES if pair_bytes <= 4 else SUB_TILES // 2
    elements = unit * LOGITS_LANES
    units = -(-vocab // elements)
    stages = config.logits_pallas_stages(elements * pair_bytes) - 1  # one is for rows done again
    computed, alone = (statistics is x for x in (_Statistics.COMPUTED, _Statistics.ALONE))
    resident = computed and units < stages
    stages = min(stages, units + 4)
    passes = 2 if computed and not resident else 1  # in which the ring is filled
    out_type = _forward_outputs(tokens, vocab, want_kl, keep_codes, statistics)
    slots = (stages + 1, elements)
    exchange_smem, exchange_barrier = _Exchange.scratch(parts=7)
    scratch = {
        "s": plgpu.SMEM(slots, student.dtype),
        "t": plgpu.SMEM(slots, teacher.dtype),
        "exchange": exchange_smem,
        "exchange_barrier": exchange_barrier,
        "statistics": plgpu.SMEM((GROUPS, 4), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages + 1),
        "empty": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages + 1),
    }
    optional = {"weights": row_weights, "given": given}
    named = {"s": student, "t": teacher} | {k: x for k, x in optional.items() if x is not None}
    blocks = min(tokens, compat.sm_count())  # a block takes an SM's shared memory whole

    def body(*refs: Any) -> None:
        in_gmem = dict(zip(named, refs, strict=False))
        s_gmem, t_gmem = in_gmem["s"], in_gmem["t"]
        rest = refs[len(named) :]
        gmem = dict(zip(out_type, rest, strict=False))
        smem = dict(zip(scratch, rest[len(out_type) :], strict=True))
        block, group = lax.axis_index("block"), lax.axis_index("group")
        exchange = _Exchange(smem["exchange"], smem["exchange_barrier"], group)
        row_tiles = _Rows(vocab, group, unit)
        rows = lax.div(_i32(tokens) - block + _i32(blocks - 1), _i32(blocks))
        per_row = passes * units
        steps = rows * per_row

        def slot(s: Any) -> tuple[Any, Any, Any]:
            return smem["s"].at[s], smem["t"].at[s], smem["full"].at[s]

        def fetch(s: Any, row: Any, unit_number: Any) -> None:
            s_smem, t_smem, barrier = slot(s)
            row_tiles.fetch(s_gmem, s_smem, row, unit_number, barrier)
            row_tiles.fetch(t_gmem, t_smem, row, unit_number, barrier)

        def fetch_step(index: Any, s: Any) -> None:
            row = block + lax.div(index, _i32(per_row)) * blocks
            fetch(s, row, lax.rem(index, _i32(units)))

        def after(s: Any) -> Any:
            """The slot of the next step. A remainder of the step is 12 instructions a tile."""
            return jnp.where(s == stages - 1, _i32(0), s + 1)

        def release(index: Any, s: Any) -> None:
            """Gives the slot of step ``index`` free, and fills the one that was given free before.

            The first warpgroup fills it. One step later, so that it seldom waits for the others.
            Each thread's arrival comes after its own reads, so that nothing has to be committed.
            """
            plgpu.barrier_arrive(smem["empty"].at[s])
            before = index - 1

            @pl.when((group == 0) & (index > 0) & (before + stages < steps))
            def _() -> None:
                free = jnp.where(s == 0, _i32(stages - 1), s - 1)
                plgpu.barrier_wait(smem["empty"].at[free])
                fetch_step(before + stages, free)

        for i in range(stages):
            pl.when((group == 0) & (i < steps))(lambda i=i: fetch_step(_i32(i), _i32(i)))

        def reference_of(highest: Any) -> Any:
            return lax.max(highest * _f32(scale / unit_of_reference), _f32(LOWEST))

        def statistics_of(row: Any, first: Any, s0: Any, kept: Any) -> tuple[Any, ...]:
            """The reference of both rows, the sums of their exponentials relative to it, a slot."""

            def sums(tile: Any, count: int, carry: Any, masked: bool) -> Any:
                s, *totals = carry
                for h in range(count):
                    if h == 0:  # the first unit of a row was waited for, for the sample
                        pl.when(tile > 0)(lambda s=s: plgpu.barrier_wait(slot(s)[2]))
                    else:
                        plgpu.barrier_wait(slot(s)[2])
                    totals = add_exponentials(
                        slot(s), tile, h, masked, s_reference, t_reference, totals
                    )
                    if not resident:
                        release(first + tile * row_tiles.in_tile + h, s)
                    s = after(s)
                return (s, *totals)

            def add_exponentials(
                at: Any, tile: Any, h: int, masked: bool, s_reference: Any, t_reference: Any, c: Any
            ) -> Any:
                totals = list(c)
                for k in range(h * unit, (h + 1) * unit):
                    for i, reference in enumerate((s_reference, t_reference)):
                        x = row_tiles.logits(at[i], tile, k, masked)
                        totals[i] = totals[i] + jnp.exp2(_exponent(x, scale, reference))
                return tuple(totals)

            def keep_statistics(values: Sequence[Any]) -> None:
                # In memory, because a branch of the interpreter that returns values may deadlock.
                for i, value in enumerate(values):
                    smem["statistics"][group, i] = value
                plgpu.commit_smem()

            # What exponents are relative to: the maximum of a sample.
            plgpu.barrier_wait(slot(s0)[2])
            inside = _lanes() + group * LANES < min(vocab, SAMPLE)
            nothing = _splat(_f32(-jnp.inf))
            sample = [
                jnp.where(inside, row_tiles.logits(slot(s0)[i], _i32(0), 0, False), nothing)
                for i in range(2)
            ]
            references = exchange(_MAX, 0, sample)
            s_reference, t_reference = (reference_of(x) for x in references)

            zeros = (_splat(_f32(0)), _splat(_f32(0)))
            s, *totals = row_tiles.over_tiles(sums, (s0, *zeros))
            s_sum, t_sum = exchange(_ADD, 2, totals)

            keep_statistics((s_reference, t_reference, s_sum, t_sum))
            within = (s_sum < _f32(HIGHEST_SUM)) & (t_sum < _f32(HIGHEST_SUM))

            @pl.when(kept & jnp.logical_not(within))
            def _() -> None:
                """Relative to the true maximum: the sample's was far below, or there is a NaN."""

                def load(tile: Any, h: int) -> Any:
                    at = _i32(stages)
                    number = tile * row_tiles.in_tile + h
                    pl.when(group == 0)(lambda: fetch(at, row, number))
                    plgpu.barrier_wait(slot(at)[2])
                    return slot(at)

                def done() -> None:
                    """All have read the slot, so that it can be filled again."""
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(smem["empty"].at[stages])
                    plgpu.barrier_wait(smem["empty"].at[stages])

                def maximum(tile: Any, count: int, carry: Any, masked: bool) -> Any:
                    highest = list(carry)
                    for h in range(count):
                        at = load(tile, h)
                        for k in range(h * unit, (h + 1) * unit):
                            for i in range(2):
                                x = row_tiles.logits(at[i], tile, k, masked)
                                highest[i] = jnp.maximum(highest[i], x)
                        done()
                    return tuple(highest)

                def sums_again(tile: Any, count: int, carry: Any, masked: bool) -> Any:
                    for h in range(count):
                        at = load(tile, h)
                        carry = add_exponentials(at, tile, h, masked, s_highest, t_highest, carry)
                        done()
                    return carry

                lowest = (_splat(_f32(-jnp.inf)), _splat(_f32(-jnp.inf)))
                highest = exchange(_MAX, 0, row_tiles.over_tiles(maximum, lowest))
                s_highest, t_highest = (reference_of(x) for x in highest)
                sums = exchange(_ADD, 2, row_tiles.over_tiles(sums_again, zeros))
                keep_statistics((s_highest, t_highest, *sums))

            return *(smem["statistics"][group, i] for i in range(4)), s

        def differences_of(r: Any, s: Any, of_student: Any, of_teacher: Any) -> tuple[Any, ...]:
            """Distance, the sums of ``p * (1 - sign(p - q))`` and ``q * log2(q / p)``, a slot."""
            row, first = block + r * blocks, r * per_row + (passes - 1) * units
            (s_reference, s_factor), (t_reference, t_factor) = of_student, of_teacher

            def differences(tile: Any, count: int, carry: Any, masked: bool) -> Any:
                s, *sums = carry
                codes = _splat(_f32(2.0**14))
                for h in range(count):
                    if not resident:
                        plgpu.barrier_wait(slot(s)[2])
                    sums, codes = add_differences(slot(s), tile, h, masked, sums, codes)
                    release(first + tile * row_tiles.in_tile + h, s)
                    s = after(s)
                if keep_codes:
                    for _ in range(SUB_TILES - count * unit):  # as of ties
                        codes = codes * _splat(_f32(4)) + _splat(_f32(0.5))
                    _store_codes(gmem["codes"], row, (tile * GROUPS + group) * LANES, codes)
                return (s, *sums)

            def add_differences(
                at: Any, tile: Any, h: int, masked: bool, carry: Any, codes: Any
            ) -> Any:
                distance, below, divergence = carry
                for k in range(h * unit, (h + 1) * unit):
                    s_x = _exponent(row_tiles.logits(at[0], tile, k, masked), scale, s_reference)
                    t_x = _exponent(row_tiles.logits(at[1], tile, k, masked), scale, t_reference)
                    exponential = jnp.exp2(s_x)
                    q = _product(jnp.exp2(t_x), t_factor)
                    d = _product(exponential, s_factor) - q
                    distance = distance + jnp.abs(d)
                    if keep_codes:
                        below, codes = _add_below(d, exponential, below, codes)
                    if want_kl:
                        term = q * (t_x - s_x)
                        divergence = divergence + jnp.where(q == 0, jnp.zeros_like(q), term)
                return (distance, below, divergence), codes

            zero = _splat(_f32(0))
            s, *sums_of = row_tiles.over_tiles(differences, (s, zero, zero, zero))
            wanted = [True, keep_codes, want_kl]
            part = 4 if given is None else 3 * lax.rem(r, _i32(2))  # no other exchange between
            results = exchange(_ADD, part, [x for x, w in zip(sums_of, wanted, strict=True) if w])
            distance = results.pop(0) * _f32(0.5)
            below = results.pop(0) * (_f32(2) * s_factor) if keep_codes else None
            return distance, below, results.pop(0) if want_kl else None, s

        def write_rows(row: Any, select: Any, references: Any, sums: Any) -> None:
            """``sums``, or 1 / sums if those are what was computed."""
            for name, reference, last in zip("st", references, sums, strict=True):
                write(f"{name}_rows", (0, row), select(reference))
                write(f"{name}_rows", (1, row), select(last, 1.0))
                if computed:
                    lse = (reference * _f32(unit_of_reference) - _log2(last)) * _f32(LN2)
                    write(f"{name}_lse", (row,), select(lse))

        def write_sums(row: Any, select: Any, sums: Any, s_factor: Any, t_factor: Any) -> None:
            distance, below, divergence = sums
            value = select(distance)
            write("tvd", (row,), value)
            if keep_codes:
                below = select(below, 1.0)
                if computed:  # 1 if all are ties, for gradients of 0
                    below = jnp.where(value == 0, _f32(1), below)
                below = below + value * _f32(0)  # NaN where that is, as no comparison was true
                if computed:
                    write("s_rows", (2, row), below)
                    write("t_rows", (2, row), below + _f32(2) * value)
                else:
                    write("below", (row,), below)
            if want_kl:
                if computed:
                    divergence = divergence + (_log2(t_factor) - _log2(s_factor))
                write("kl", (row,), select(divergence * _f32(LN2)))

        def write(name: str, at: tuple[Any, ...], value: Any) -> None:
            """Without the warpgroup's barriers of a store: the others wait in the next row."""
            if compat.interpreting():
                gmem[name][at] = value
            else:
                pallas_ptx.store_scalar(gmem[name].at[at], value)

        def of_row(r: Any, s: Any) -> Any:
            """All of a row, from slot ``s`` on; the slot of the next row."""
            row = block + r * blocks
            first = r * per_row
            kept = jnp.bool_(True) if row_weights is None else in_gmem["weights"][row] != 0

            def select(x: Any, ignored: float = 0.0) -> Any:
                return jnp.where(kept, x, _f32(ignored))

            if given is None:
                s_reference, t_reference, *sums, next_s = statistics_of(row, first, s, kept)
                if alone:
                    pl.when(group == 0)(
                        lambda: write_rows(row, select, (s_reference, t_reference), sums)
                    )
                    return next_s
                s = s if resident else next_s
                s_factor, t_factor = (_divide(_f32(1), x) for x in sums)
            else:
                s_reference, s_factor, t_reference, t_factor = (
                    in_gmem["given"][i, row] for i in range(4)
                )
            *sums_of, s = differences_of(r, s, (s_reference, s_factor), (t_reference, t_factor))

            @pl.when(group == 0)
            def _() -> None:
                write_sums(row, select, sums_of, s_factor, t_factor)
                if computed:
                    write_rows(row, select, (s_reference, t_reference), (s_factor, t_factor))

            return s

        lax.fori_loop(_i32(0), rows, of_row, _i32(0))

    outputs = _call(body, statistics.value, out_type, blocks, scratch, list(named.values()))
    return dict(zip(out_type, outputs, strict=True))


def _store_codes(codes_gmem: Any, row: Any, start: Any, codes: Any) -> None:
    """Writes a byte of each lane, whose lowest 8 bits are the codes."""
    at = codes_gmem.at[row, pl.ds(start, LANES)]
    if compat.interpreting():
        at[...] = lax.bitcast_convert_type(codes, jnp.int32).astype(jnp.uint8)
    else:
        pallas_ptx.store_low_bytes(codes, at)


def _log2(x: Any) -> Any:
    return lax.log(x) * _f32(1 / LN2) if compat.interpreting() else pallas_ptx.log2(x)


def _call(
    body: Any,
    name: str,
    out_type: Any,
    blocks: int,
    scratch: Any,
    inputs: Sequence[Any],
    groups: int = GROUPS,
) -> Any:
    # The barrier keeps a slice apart that XLA would fuse into the call, see pallas_kernels._call.
    inputs = [x if x.size == 1 else lax.optimization_barrier(x) for x in inputs]
    outputs = plgpu.kernel(
        body,
        out_type=list(out_type.values()),
        scratch_types=list(scratch.values()),
        grid=(blocks,),
        grid_names=("block",),
        **({"num_threads": groups, "thread_name": "group"} if groups > 1 else {}),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
        ),
    )(*inputs)
    return compat.vary_like(outputs, *inputs)


def logits_backward(
    logits: jax.Array,
    other: jax.Array | None,
    rows: jax.Array,
    other_rows: jax.Array | None,
    kl: jax.Array | None,
    tvd_upstream: jax.Array,
    lse_upstream: jax.Array | None,
    kl_upstream: jax.Array | None,
    target_upstream: jax.Array | None,
    targets: jax.Array | None,
    codes: jax.Array,
    row_weights: jax.Array | None,
    *,
    temperature: float,
    is_student: bool,
) -> jax.Array:
    """See :func:`tvd_jax.triton_launch.logits_backward`."""
    tokens, vocab = logits.shape
    logits = _padded(logits)
    scale = base_2_scale(temperature)
    width = logits.shape[1]
    tiles = -(-vocab // LOGITS_TILE)
    optional = {
        "x": logits,
        "other": None if other is None else _padded(other),
        "codes": codes,
        "rows": rows,
        "other_rows": other_rows,
        "tvd": tvd_upstream,
        "lse": lse_upstream,
        "kl_upstream": kl_upstream,
        "kl": kl,
        "target_upstream": target_upstream,
        "targets": None if targets is None else targets.astype(jnp.int32),
        "weights": row_weights,
    }
    named = {name: x for name, x in optional.items() if x is not None}
    slot = (LOGITS_TILE,)
    scratch = {"x": plgpu.SMEM(slot, logits.dtype), "out": plgpu.SMEM((LANES,), logits.dtype)}
    if "other" in named:
        scratch["other"] = plgpu.SMEM(slot, named["other"].dtype)
    copies = 1 + ("other" in named)
    scratch["barrier"] = plgpu.Barrier(num_arrivals=copies, num_barriers=1)

    def body(*refs: Any) -> None:
        gmem = dict(zip(named, refs, strict=False))
        out_gmem, *rest = refs[len(named) :]
        smem = dict(zip(scratch, rest, strict=True))
        block = lax.axis_index("block")
        row, tile = lax.div(block, _i32(tiles)), lax.rem(block, _i32(tiles))
        for name in ("x", "other"):
            if name in gmem:
                barrier = smem["barrier"].at[0]
                _Rows(vocab, 0).fetch(gmem[name], smem[name], row, tile, barrier)
        coefficients = _coefficients(gmem, row, temperature, is_student)
        kept = None if "weights" not in gmem else gmem["weights"][row] != 0
        plgpu.barrier_wait(smem["barrier"].at[0])
        for group in range(GROUPS):
            row_tiles = _Rows(vocab, group)
            at = pl.ds((tile * GROUPS + group) * LANES, LANES)
            codes = _vector(gmem["codes"][row, at]).astype(jnp.int32)
            for k in range(SUB_TILES):
                dx = gradient_of(row_tiles, gmem, smem, row, tile, k, codes, coefficients)
                if kept is not None:
                    dx = jnp.where(_splat(kept), dx, jnp.zeros_like(dx))
                _store(out_gmem, smem["out"], row_tiles, row, tile, k, dx.astype(logits.dtype))

    def gradient_of(
        row_tiles: _Rows, gmem: Any, smem: Any, row: Any, tile: Any, k: int, codes: Any, of: Any
    ) -> Any:
        x = _exponent(row_tiles.logits(smem["x"], tile, k, True), scale, of["reference"])
        exponential = jnp.exp2(x)
        code = (codes >> (2 * (SUB_TILES - 1 - k))) & 3
        plus, minus, tie = (_splat(of[name]) for name in ("plus", "minus", "tie"))
        dx = _product(exponential, jnp.where(code >= 2, minus, jnp.where(code == 1, tie, plus)))
        if "kl_upstream" in gmem:
            y = row_tiles.logits(smem["other"], tile, k, True)
            y = _exponent(y, scale, of["other_reference"])
            if is_student:
                dx = dx - _product(jnp.exp2(y), of["kl_factor"])
            else:
                ratio = _product(x - y, _f32(LN2)) + of["kl_rest"]
                term = _product(exponential * of["kl_factor"], ratio)
                dx = dx + jnp.where(exponential == 0, jnp.zeros_like(term), term)
        if "targets" in gmem:
            here = _lanes() == gmem["targets"][row] - row_tiles.column(tile, k)
            at_target = _splat(of["at_target"])
            dx = dx + jnp.where(here, at_target, jnp.zeros_like(at_target))
        return dx

    out_type = {"gradient": jax.ShapeDtypeStruct((tokens, width), logits.dtype)}
    inputs = list(named.values())
    blocks = tokens * tiles
    (gradient,) = _call(body, "logits_backward", out_type, blocks, scratch, inputs, groups=1)
    return gradient[:, :vocab]


def _coefficients(gmem: Any, row: Any, temperature: float, is_student: bool) -> dict[str, Any]:
    """What a row's gradient is made of; the formula stands at the Triton kernel."""
    reference, factor, below = (gmem["rows"][i, row] for i in range(3))
    half = gmem["tvd"][row] * _f32(0.5 if is_student else -0.5)
    rest = gmem["lse"][row] if "lse" in gmem else _f32(0)
    temperature = _f32(temperature)
    found = {"reference": reference}
    if "kl_upstream" in gmem:
        kl_upstream = gmem["kl_upstream"][row]
        found["other_reference"], other_factor = (gmem["other_rows"][i, row] for i in range(2))
        if is_student:
            rest = rest + kl_upstream
            found["kl_factor"] = _divide(kl_upstream, temperature) * other_factor
        else:
            found["kl_factor"] = _divide(kl_upstream, temperature) * factor
            logarithm = _product(_log2(factor) - _log2(other_factor), _f32(LN2))
            found["kl_rest"] = logarithm - gmem["kl"][row]
    if "targets" in gmem:
        found["at_target"] = _divide(gmem["target_upstream"][row], temperature)
    factor = _divide(factor, temperature)
    found["tie"] = _fma(half, below - _f32(1), rest) * factor
    found["plus"] = _fma(half, below, rest) * factor
    found["minus"] = _fma(half, below - _f32(2), rest) * factor
    return found


def _store(
    out_gmem: Any, out_smem: Any, row_tiles: _Rows, row: Any, tile: Any, k: int, x: Any
) -> None:
    """Writes a sub-tile, and nothing beyond the end of the row."""
    width = out_gmem.shape[1]
    start = row_tiles.column(tile, k)

    @pl.when(start + LANES <= width)
    def _() -> None:
        out_gmem[row, pl.ds(start, LANES)] = x

    rest = width % LANES
    if rest:

        @pl.when(start == width - rest)
        def _() -> None:
            out_smem[...] = x
            plgpu.commit_smem()
            end = out_gmem.at[row, pl.ds(width - rest, rest)]
            plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, rest)], end)
            plgpu.wait_smem_to_gmem(0)
