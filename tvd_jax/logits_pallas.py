"""The Pallas Mosaic GPU kernels of the losses from logits (Hopper and newer).

A persistent grid of blocks of GROUPS warpgroups, which share a row. A tile of LOGITS_TILE elements
is four sub-tiles of LOGITS_LANES elements, and each warpgroup takes its LANES of every sub-tile, so
that lane ``j`` of the row is lane ``j % LANES`` of warpgroup ``j // LANES``. TMA fills a ring of
shared-memory slots ahead.

A row is read twice: forward for the sums of both softmaxes, then backward for the difference, which
begins with what the sums left in shared memory, the whole row if it fits, and then finds in L2 what
they read last. The warpgroups meet once a row, after the sums: for these, for what the row before
came to, and for the reference of the next one, from a copy of its beginning.
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


class _Parts(enum.IntEnum):
    """Where the sums and maxima of ``_Exchange`` lie.

    TOTALS (2), SAMPLES (2) and DIFFERENCES (3) for even rows, then for odd ones; AGAIN once, two
    maxima and two sums.
    """

    TOTALS = 0
    SAMPLES = 4
    DIFFERENCES = 8
    AGAIN = 14
    COUNT = 18


class _Exchange:
    """Sums and maxima over all lanes of a block.

    The order within a warpgroup is that of Mosaic's reduction: 4 neighbours, then lanes by strides
    1 to 16, then warps; that reduction itself keeps its scratch in memory that the warpgroups of a
    block would share. What is deposited after a meeting goes to other ``parts`` of the shared
    memory than what is read after it, so that one barrier is enough.
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

    def deposit(self, op: str, part: Any, vectors: Sequence[Any]) -> None:
        """Combines the elements of each of this warp, for ``values`` after ``meet``."""
        for i, x in enumerate(vectors):
            here = self.smem.at[part + i, pl.ds(self.group * 4, 4)]
            if compat.interpreting():
                here[...] = _warp_values(op, x)
            else:
                pallas_ptx.reduce_warps(op, x, here)

    def arrive(self) -> None:
        plgpu.barrier_arrive(self.barrier)

    def wait(self) -> None:
        """Until all have arrived; what each has deposited before is there then."""
        plgpu.barrier_wait(self.barrier)

    def meet(self) -> None:
        self.arrive()
        self.wait()

    def values(self, op: str, part: Any, count: int) -> list[Any]:
        combine = jnp.add if op == _ADD else jnp.maximum
        return [self._row_value(part + i, combine) for i in range(count)]

    def __call__(self, op: str, part: int, vectors: Sequence[Any]) -> list[Any]:
        self.deposit(op, part, vectors)
        self.meet()
        return self.values(op, part, len(vectors))

    def _row_value(self, part: Any, combine: Callable[[Any, Any], Any]) -> Any:
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

    def over_tiles(self, step: Callable[[Any, int, Any, bool], Any], carry: Any, first: int) -> Any:
        """``step(tile, units, carry, masked)`` over the tiles, the last of which may be partial."""
        carry = lax.fori_loop(
            _i32(first), _i32(self.full), lambda tile, c: step(tile, self.in_tile, c, False), carry
        )
        rest = self.units - self.full * self.in_tile
        return step(_i32(self.full), rest, carry, True) if rest else carry

    def back_over_tiles(self, step: Callable[[Any, int, Any, bool], Any], carry: Any) -> Any:
        """As ``over_tiles``, from the last tile to the first."""
        rest = self.units - self.full * self.in_tile
        if rest:
            carry = step(_i32(self.full), rest, carry, True)
        last = self.full - 1
        return lax.fori_loop(
            _i32(0), _i32(self.full), lambda i, c: step(last - i, self.in_tile, c, False), carry
        )


class _Ring:
    """The order in which units of rows come through the slots of shared memory.

    A row's units are used forward, then backward, in one of the two directions only where the
    kernel has one pass. What the first pass leaves in shared memory, ``held`` units, is given free
    in the second. A slot that is given free takes the unit that comes next. So the slots of a
    row's units differ from row to row: ``order`` names them, 4 bits each, the first one lowest. A
    ``number`` counts through them, forward and back.
    """

    MOST = 8  # slots, of 4 bits in an int32

    def __init__(self, units: int, slots: int, forward: bool, backward: bool) -> None:
        assert slots <= self.MOST
        self.units, self.slots, self.forward, self.backward = units, slots, forward, backward
        self.held = min(units, slots) if forward and backward else 0
        self.copies = units * (forward + backward) - self.held  # a row

    def start(self) -> tuple[Any, Any]:
        """The first row's order, and the number of its first slot."""
        return _i32(sum(i << (4 * i) for i in range(self.slots))), _i32(0)

    def unit(self, copy: Any) -> Any:
        """The unit that a copy of a row brings."""
        if not self.backward:
            return copy
        back = self.copies - 1 - copy
        return jnp.where(copy < self.units, copy, back) if self.forward else back

    def slot(self, order: Any, number: Any) -> Any:
        return (order >> (number * 4)) & 15

    def next(self, number: Any) -> Any:
        return jnp.where(number == self.slots - 1, _i32(0), number + 1)

    def back(self, number: Any) -> Any:
        """The next number where units are used backward."""
        if not self.forward:
            return self.next(number)
        return jnp.where(number == 0, _i32(self.slots - 1), number - 1)

    def next_row(self, order: Any, number: Any) -> tuple[Any, Any]:
        """The next row's order: slots in which it has begun to arrive, then those given free."""
        if not self.held:
            return order, number
        slots = [self.slot(order, _i32(i)) for i in range(self.slots)]
        slots = slots[self.held :] + slots[: self.held][::-1]
        order = functools.reduce(jnp.bitwise_or, [x << (4 * i) for i, x in enumerate(slots)])
        return order, _i32(0)


class _Plan:
    """The sizes of a forward call."""

    def __init__(
        self,
        student: jax.Array,
        teacher: jax.Array,
        vocab: int,
        temperature: float,
        want_kl: bool,
        keep_codes: bool,
        statistics: _Statistics,
    ) -> None:
        self.tokens, self.vocab = student.shape[0], vocab
        self.scale = base_2_scale(temperature)
        self.unit_of_reference = config.logits_reference_unit(self.scale)
        self.want_kl, self.keep_codes = want_kl, keep_codes
        self.wanted = [True, keep_codes, want_kl]  # of what the differences add up to
        self.computed = statistics is _Statistics.COMPUTED
        self.alone = statistics is _Statistics.ALONE
        self.blocks = min(self.tokens, compat.sm_count())  # one takes an SM's shared memory whole
        self.dtypes = {"s": student.dtype, "t": teacher.dtype}
        pair_bytes = student.dtype.itemsize + teacher.dtype.itemsize
        self.unit = SUB_TILES if pair_bytes <= 4 else SUB_TILES // 2
        self.elements = self.unit * LOGITS_LANES
        self.units = -(-vocab // self.elements)
        fit = config.logits_pallas_slots(self.elements * pair_bytes, LOGITS_LANES * pair_bytes)
        self.slots = min(fit, self.units + 4, _Ring.MOST)
        self.ring = _Ring(
            self.units,
            self.slots,
            forward=statistics is not _Statistics.GIVEN,
            backward=not self.alone,
        )
        ahead = self.slots - self.units >= SUB_TILES // self.unit
        # Whether the first tile of the next row is there before the sums of a row are known.
        self.begun_early = self.computed and vocab >= LOGITS_TILE and ahead

    def scratch(self) -> dict[str, Any]:
        exchange, exchange_barrier = _Exchange.scratch(parts=_Parts.COUNT)
        slots = (self.slots, self.elements)
        scratch = {name: plgpu.SMEM(slots, dtype) for name, dtype in self.dtypes.items()}
        scratch |= {
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=self.slots),
            "empty": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=self.slots),
            "exchange": exchange,
            "exchange_barrier": exchange_barrier,
        }
        if not self.ring.forward:
            return scratch
        sample = {
            f"{name}_sample": plgpu.SMEM((LOGITS_LANES,), dtype)
            for name, dtype in self.dtypes.items()
        }
        barriers = {
            "sample_full": plgpu.Barrier(num_arrivals=2, num_barriers=1),
            "sample_empty": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=1),
            "again_full": plgpu.Barrier(num_arrivals=2, num_barriers=1),
        }
        return scratch | sample | barriers | {"again": plgpu.SMEM((GROUPS, 4), jnp.float32)}


class _Block:
    """What the warpgroups of a block share; row ``r`` of the block is ``row_of(r)`` of all."""

    def __init__(
        self, plan: _Plan, in_gmem: Any, gmem: Any, smem: Any, block: Any, group: Any
    ) -> None:
        self.plan, self.in_gmem, self.gmem, self.smem = plan, in_gmem, gmem, smem
        self.ring = plan.ring
        self.block, self.group = block, group
        self.row_tiles = _Rows(plan.vocab, self.group, plan.unit)
        self.rows = lax.div(
            _i32(plan.tokens) - self.block + _i32(plan.blocks - 1), _i32(plan.blocks)
        )

    def row_of(self, r: Any) -> Any:
        return self.block + r * self.plan.blocks

    def slot(self, s: Any) -> tuple[Any, Any, Any]:
        return self.smem["s"].at[s], self.smem["t"].at[s], self.smem["full"].at[s]

    def copy_sub_tile(self, row: Any, start: Any, left: int, barrier: Any) -> None:
        """The sub-tile from ``start`` on, where the vocab has ``left`` more, to the sample's place.

        With what fills a row up for TMA: rows of two dtypes are not of one width.
        """
        for name in "st":
            filled = self.in_gmem[name].shape[1] - self.plan.vocab
            size = min(LOGITS_LANES, left + filled)
            plgpu.copy_gmem_to_smem(
                self.in_gmem[name].at[row, pl.ds(start, size)],
                self.smem[f"{name}_sample"].at[pl.ds(0, size)],
                barrier,
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )


class _Copies(_Block):
    """The warpgroup that starts the copies, each when its slot has been given free."""

    def fetch(self, copy: Any, s: Any) -> None:
        r = lax.div(copy, _i32(self.ring.copies))
        unit_number = self.ring.unit(copy - r * self.ring.copies)
        s_smem, t_smem, barrier = self.slot(s)
        self.row_tiles.fetch(self.in_gmem["s"], s_smem, self.row_of(r), unit_number, barrier)
        self.row_tiles.fetch(self.in_gmem["t"], t_smem, self.row_of(r), unit_number, barrier)

    def refill(self, order: Any, number: Any, copy: Any) -> Any:
        s = self.ring.slot(order, number)
        plgpu.barrier_wait(self.smem["empty"].at[s])
        pl.when(copy < self.rows * self.ring.copies)(lambda: self.fetch(copy, s))
        return copy + 1

    def fetch_sample(self, r: Any) -> None:
        @pl.when(r < self.rows)
        def _() -> None:
            pl.when(r > 0)(lambda: plgpu.barrier_wait(self.smem["sample_empty"].at[0]))
            self.copy_sub_tile(self.row_of(r), 0, self.plan.vocab, self.smem["sample_full"].at[0])

    def of_row(self, r: Any, carry: Any) -> Any:
        order, number, copy = carry

        def forward(_: Any, c: Any) -> Any:
            number, copy = c
            return self.ring.next(number), self.refill(order, number, copy)

        def back(_: Any, c: Any) -> Any:
            number, copy = c
            return self.ring.back(number), self.refill(order, number, copy)

        if self.ring.forward:
            let_go = self.plan.units - self.ring.held
            number, copy = lax.fori_loop(_i32(0), _i32(let_go), forward, (number, copy))
            self.fetch_sample(r + 3)
        if self.ring.backward:
            if self.ring.forward:
                number = _i32((self.plan.units - 1) % self.plan.slots)
            number, copy = lax.fori_loop(_i32(0), _i32(self.plan.units), back, (number, copy))
        return *self.ring.next_row(order, number), copy

    def produce(self) -> None:
        """Starts all copies, each when the slot that it goes to has been given free."""
        if self.ring.forward:
            self.fetch_sample(_i32(0))
        for i in range(self.plan.slots):
            pl.when(i < self.rows * self.ring.copies)(lambda i=i: self.fetch(_i32(i), _i32(i)))
        if self.ring.forward:
            self.fetch_sample(_i32(1))
            self.fetch_sample(_i32(2))
        lax.fori_loop(_i32(0), self.rows, self.of_row, (*self.ring.start(), _i32(self.plan.slots)))


class _Forward(_Block):
    """The warpgroups that compute. A state of the ring is the order of its slots and a number."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        barrier = self.smem["exchange_barrier"]
        self.exchange = _Exchange(self.smem["exchange"], barrier, self.group)
        self.zero = _splat(_f32(0))

    def is_kept(self, row: Any) -> Any:
        if "weights" not in self.in_gmem:
            return jnp.bool_(True)
        return self.in_gmem["weights"][row] != 0

    def reference_of(self, highest: Any) -> Any:
        return lax.max(highest * _f32(self.plan.scale / self.plan.unit_of_reference), _f32(LOWEST))

    def deposit_sample(self, r: Any, part: Any) -> None:
        """The maxima that the exponents of row ``r``, if there is one, are relative to."""
        pl.when(r < self.rows)(lambda: plgpu.barrier_wait(self.smem["sample_full"].at[0]))
        inside = _lanes() + self.group * LANES < min(self.plan.vocab, SAMPLE)
        nothing = _splat(_f32(-jnp.inf))
        here = pl.ds(self.group * LANES, LANES)
        samples = [_widened(_vector(self.smem[f"{name}_sample"][here])) for name in "st"]
        self.exchange.deposit(_MAX, part, [jnp.where(inside, x, nothing) for x in samples])

    def add_exponentials(
        self, at: Any, tile: Any, h: int, masked: bool, references: Any, totals: Any
    ) -> tuple[Any, ...]:
        for k in range(h * self.plan.unit, (h + 1) * self.plan.unit):
            pair = [self.row_tiles.logits(at[i], tile, k, masked) for i in range(2)]
            totals = self.add_exponentials_of(pair, references, totals)
        return totals

    def add_exponentials_of(self, pair: Any, references: Any, totals: Any) -> tuple[Any, ...]:
        of = zip(totals, pair, references, strict=True)
        return tuple(total + jnp.exp2(_exponent(x, self.plan.scale, r)) for total, x, r in of)

    def sums_of(self, order: Any, number: Any, references: Any, begun: Any) -> tuple[Any, ...]:
        """Where the ring is then, and the lanes of both rows' sums of exponentials."""

        def sums(tile: Any, tile_units: int, carry: Any, masked: bool) -> Any:
            number, *totals = carry
            for h in range(tile_units):
                s = self.ring.slot(order, number)
                plgpu.barrier_wait(self.slot(s)[2])
                totals = self.add_exponentials(self.slot(s), tile, h, masked, references, totals)
                if self.ring.held < self.plan.units:
                    held = tile * self.row_tiles.in_tile + h >= self.plan.units - self.ring.held
                    pl.when(jnp.logical_not(held))(lambda s=s: self.release(s))
                number = self.ring.next(number)
            return (number, *totals)

        if self.plan.begun_early:
            number = _i32(self.row_tiles.in_tile % self.plan.slots)
        return self.row_tiles.over_tiles(sums, (number, *begun), first=int(self.plan.begun_early))

    def begin_early(self, r: Any, order: Any, references: Any) -> tuple[Any, ...]:
        """The sums over the first tile of row ``r``; of whatever lies there if there is none."""
        if not self.plan.begun_early:
            return self.zero, self.zero
        totals = (self.zero, self.zero)
        for h in range(self.row_tiles.in_tile):
            s = self.ring.slot(order, _i32(h))
            pl.when(r < self.rows)(lambda s=s: plgpu.barrier_wait(self.slot(s)[2]))
            totals = self.add_exponentials(self.slot(s), _i32(0), h, False, references, totals)
        return totals

    def release(self, s: Any) -> None:
        # Each thread's arrival comes after its own reads, so that nothing has to be committed.
        plgpu.barrier_arrive(self.smem["empty"].at[s])

    def over_sub_tiles(self, order: Any, row: Any, step: Any, carry: Any) -> Any:
        """``step(logits of both, carry)``; from the ring if it holds the row, else from L2."""
        whole = self.plan.vocab // LOGITS_LANES

        def sub_tile(number: Any, left: int, carry: Any) -> Any:
            if self.ring.held == self.plan.units:
                s = self.ring.slot(order, lax.div(number, _i32(self.plan.unit)))
                at = pl.ds(
                    (lax.rem(number, _i32(self.plan.unit)) * GROUPS + self.group) * LANES, LANES
                )
                pair = [self.smem[name][s, at] for name in "st"]
            else:
                full = self.smem["again_full"].at[0]
                start = number * LOGITS_LANES
                pl.when(self.group == 0)(lambda: self.copy_sub_tile(row, start, left, full))
                plgpu.barrier_wait(full)
                pair = [
                    self.smem[f"{name}_sample"][pl.ds(self.group * LANES, LANES)] for name in "st"
                ]
            pair = [_widened(_vector(x)) for x in pair]
            if left < LOGITS_LANES:
                inside = _lanes() < self.plan.vocab - whole * LOGITS_LANES - self.group * LANES
                pair = [jnp.where(inside, x, _splat(_f32(-jnp.inf))) for x in pair]
            carry = step(pair, carry)
            if self.ring.held < self.plan.units:
                self.exchange.meet()  # all have read
            return carry

        carry = lax.fori_loop(
            _i32(0), _i32(whole), lambda i, c: sub_tile(i, LOGITS_LANES, c), carry
        )
        rest = self.plan.vocab - whole * LOGITS_LANES
        return sub_tile(_i32(whole), rest, carry) if rest else carry

    def from_maxima(self, order: Any, row: Any) -> None:
        """Once more: the maximum of the sample was far below the row's, or there is a NaN."""

        def maximum(pair: Any, highest: Any) -> Any:
            return tuple(jnp.maximum(h, x) for h, x in zip(highest, pair, strict=True))

        def sums_again(pair: Any, totals: Any) -> Any:
            return self.add_exponentials_of(pair, references, totals)

        lowest = _splat(_f32(-jnp.inf))
        highest = self.over_sub_tiles(order, row, maximum, (lowest, lowest))
        references = [self.reference_of(x) for x in self.exchange(_MAX, _Parts.AGAIN, highest)]
        totals = self.over_sub_tiles(order, row, sums_again, (self.zero, self.zero))
        # In memory, because a branch of the interpreter that returns values may deadlock.
        for i, value in enumerate((*references, *self.exchange(_ADD, _Parts.AGAIN + 2, totals))):
            self.smem["again"][self.group, i] = value
        plgpu.commit_smem()

    def differences_of(
        self, row: Any, order: Any, number: Any, references: Any, factors: Any
    ) -> tuple[Any, ...]:
        """Where the ring is then, and the lanes of the sums over a row.

        These are of ``|p - q|``, ``(1 - sign(p - q)) / 2 * p / s_factor``, ``q * log2(q / p)``.
        """
        (s_reference, t_reference), (s_factor, t_factor) = references, factors

        def differences(tile: Any, tile_units: int, carry: Any, masked: bool) -> Any:
            number, *sums = carry
            # As of ties, where there are no sub-tiles; ``_difference_tile`` says what they are.
            codes = 2.0**14
            for _ in range(SUB_TILES - tile_units * self.plan.unit):
                codes = 4 * codes + 0.5
            codes = _splat(_f32(codes))
            for h in reversed(range(tile_units)):
                s = self.ring.slot(order, number)
                if self.ring.held < self.plan.units:
                    held = tile * self.row_tiles.in_tile + h >= self.plan.units - self.ring.held
                    pl.when(jnp.logical_not(held))(lambda s=s: plgpu.barrier_wait(self.slot(s)[2]))
                sums, codes = add_differences(self.slot(s), tile, h, masked, sums, codes)
                self.release(s)
                number = self.ring.back(number)
            if self.plan.keep_codes:
                at = (tile * GROUPS + self.group) * LANES
                _store_codes(self.gmem["codes"], row, at, codes)
            return (number, *sums)

        def add_differences(
            at: Any, tile: Any, h: int, masked: bool, carry: Any, codes: Any
        ) -> Any:
            distance, below, divergence = carry
            for k in reversed(range(h * self.plan.unit, (h + 1) * self.plan.unit)):
                s_x = _exponent(
                    self.row_tiles.logits(at[0], tile, k, masked), self.plan.scale, s_reference
                )
                t_x = _exponent(
                    self.row_tiles.logits(at[1], tile, k, masked), self.plan.scale, t_reference
                )
                exponential = jnp.exp2(s_x)
                q = _product(jnp.exp2(t_x), t_factor)
                d = _product(exponential, s_factor) - q
                distance = distance + jnp.abs(d)
                if self.plan.keep_codes:
                    below, codes = _add_below(d, exponential, below, codes)
                if self.plan.want_kl:
                    term = q * (t_x - s_x)
                    divergence = divergence + jnp.where(q == 0, jnp.zeros_like(q), term)
            return (distance, below, divergence), codes

        return self.row_tiles.back_over_tiles(
            differences, (number, self.zero, self.zero, self.zero)
        )

    def write(self, name: str, at: tuple[Any, ...], value: Any) -> None:
        """Without the warpgroup's barriers of a store: the others wait in the next row."""
        if compat.interpreting():
            self.gmem[name][at] = value
        else:
            pallas_ptx.store_scalar(self.gmem[name].at[at], value)

    def write_row(self, name: str, row: Any, reference: Any, last: Any) -> None:
        """``last`` is the factor, or the sum if that is what the kernel computes."""
        kept = self.is_kept(row)
        self.write(f"{name}_rows", (0, row), jnp.where(kept, reference, _f32(0)))
        self.write(f"{name}_rows", (1, row), jnp.where(kept, last, _f32(1)))
        if self.plan.computed:
            lse = (reference * _f32(self.plan.unit_of_reference) - _log2(last)) * _f32(LN2)
            self.write(f"{name}_lse", (row,), jnp.where(kept, lse, _f32(0)))

    def deposit_differences(self, part: Any, sums: Sequence[Any]) -> None:
        self.exchange.deposit(
            _ADD, part, [x for x, w in zip(sums, self.plan.wanted, strict=True) if w]
        )

    def write_differences(self, r: Any, part: Any, s_factor: Any, t_factor: Any) -> None:
        row = self.row_of(r)
        kept = self.is_kept(row)
        sums = self.exchange.values(_ADD, part, sum(self.plan.wanted))
        distance = jnp.where(kept, sums.pop(0) * _f32(0.5), _f32(0))
        self.write("tvd", (row,), distance)
        if self.plan.keep_codes:
            below = jnp.where(kept, sums.pop(0) * (_f32(2) * s_factor), _f32(1))
            if self.plan.computed:  # 1 if all are ties, for gradients of 0
                below = jnp.where(distance == 0, _f32(1), below)
            below = below + distance * _f32(0)  # NaN where that is: no comparison was true
            if self.plan.computed:
                self.write("s_rows", (2, row), below)
                self.write("t_rows", (2, row), below + _f32(2) * distance)
            else:
                self.write("below", (row,), below)
        if self.plan.want_kl:
            divergence = sums.pop(0)
            if self.plan.computed:
                divergence = divergence + (_log2(t_factor) - _log2(s_factor))
            self.write("kl", (row,), jnp.where(kept, divergence * _f32(LN2), _f32(0)))

    def statistics_of(
        self, r: Any, order: Any, number: Any, references: Any, following: Any, begun: Any
    ) -> tuple[Any, ...]:
        """Where the ring is then, references and sums of a row, and for the rows after it.

        That is the references of the row after the next and what the sums of the next begin
        with, which fills the time until all have met. The sums of the differences of the row
        before are there to be read after it.
        """
        row = self.row_of(r)
        number, *totals = self.sums_of(order, number, references, begun)
        part = 2 * lax.rem(r, _i32(2))
        self.deposit_sample(r + 2, _Parts.SAMPLES + part)
        self.exchange.deposit(_ADD, _Parts.TOTALS + part, totals)
        self.exchange.arrive()
        next_order, _ = self.ring.next_row(order, number)
        begun = self.begin_early(r + 1, next_order, following)
        self.exchange.wait()
        sums = self.exchange.values(_ADD, _Parts.TOTALS + part, 2)
        samples = self.exchange.values(_MAX, _Parts.SAMPLES + part, 2)
        within = (sums[0] < _f32(HIGHEST_SUM)) & (sums[1] < _f32(HIGHEST_SUM))
        again = self.is_kept(row) & jnp.logical_not(within)
        pl.when(again)(lambda: self.from_maxima(order, row))
        self.release_sample(r + 3)
        found = [
            jnp.where(again, self.smem["again"][self.group, i], x)
            for i, x in enumerate((*references, *sums))
        ]
        after = tuple(self.reference_of(x) for x in samples)
        return number, tuple(found[:2]), found[2:], after, begun

    def release_sample(self, r: Any) -> None:
        """Gives the place of the sample free for that of row ``r``, if there is one."""
        pl.when(r < self.rows)(lambda: plgpu.barrier_arrive(self.smem["sample_empty"].at[0]))

    def differences_part(self, r: Any) -> Any:
        return _Parts.DIFFERENCES + 3 * lax.rem(r, _i32(2))

    def of_row(self, r: Any, carry: Any) -> Any:
        """All of a row; gives on the ring, the next row's references and this row's factors."""
        order, number, references, following, begun, factors_before = carry
        row = self.row_of(r)
        number, references, sums, after, begun = self.statistics_of(
            r, order, number, references, following, begun
        )
        if self.plan.alone:
            for i, name in enumerate("st"):
                pl.when(self.group == i)(
                    lambda i=i, name=name: self.write_row(name, row, references[i], sums[i])
                )
            return *self.ring.next_row(order, number), following, after, begun, factors_before
        factors = tuple(_divide(_f32(1), x) for x in sums)
        # Each of three warpgroups writes something else.
        for i, name in enumerate("st"):
            pl.when(self.group == i)(
                lambda i=i, name=name: self.write_row(name, row, references[i], factors[i])
            )
        pl.when((self.group == 2) & (r > 0))(
            lambda: self.write_differences(r - 1, self.differences_part(r - 1), *factors_before)
        )
        number, *sums_of_differences = self.differences_of(
            row, order, self.ring.back(number), references, factors
        )
        self.deposit_differences(self.differences_part(r), sums_of_differences)
        return *self.ring.next_row(order, number), following, after, begun, factors

    def of_given_row(self, r: Any, carry: Any) -> Any:
        order, number = carry
        row = self.row_of(r)
        s_reference, s_factor, t_reference, t_factor = (
            self.in_gmem["given"][i, row] for i in range(4)
        )
        factors = (s_factor, t_factor)
        number, *sums_of_differences = self.differences_of(
            row, order, number, (s_reference, t_reference), factors
        )
        self.deposit_differences(self.differences_part(r), sums_of_differences)
        self.exchange.meet()
        pl.when(self.group == 2)(
            lambda: self.write_differences(r, self.differences_part(r), *factors)
        )
        return self.ring.next_row(order, number)

    def consume(self) -> None:
        if "given" in self.in_gmem:
            lax.fori_loop(_i32(0), self.rows, self.of_given_row, self.ring.start())
            return
        references = []
        for r in range(2):
            self.deposit_sample(_i32(r), _Parts.SAMPLES + 2 * r)
            self.exchange.meet()
            self.release_sample(_i32(r + 1))
            samples = self.exchange.values(_MAX, _Parts.SAMPLES + 2 * r, 2)
            references.append(tuple(self.reference_of(x) for x in samples))
        begun = self.begin_early(_i32(0), self.ring.start()[0], references[0])
        start = (*self.ring.start(), *references, begun, (_f32(1), _f32(1)))
        *_, factors = lax.fori_loop(_i32(0), self.rows, self.of_row, start)
        if self.plan.computed:
            self.exchange.meet()
            last = self.rows - 1
            pl.when(self.group == 2)(
                lambda: self.write_differences(last, self.differences_part(last), *factors)
            )


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
    vocab = student.shape[1]
    student, teacher = _padded(student), _padded(teacher)
    plan = _Plan(student, teacher, vocab, temperature, want_kl, keep_codes, statistics)
    out_type = _forward_outputs(student.shape[0], vocab, want_kl, keep_codes, statistics)
    scratch = plan.scratch()
    optional = {"weights": row_weights, "given": given}
    named = {"s": student, "t": teacher} | {k: x for k, x in optional.items() if x is not None}

    def body(*refs: Any) -> None:
        in_gmem = dict(zip(named, refs, strict=False))
        rest = refs[len(named) :]
        gmem = dict(zip(out_type, rest, strict=False))
        smem = dict(zip(scratch, rest[len(out_type) :], strict=True))
        block, group = lax.axis_index("block"), lax.axis_index("group")
        parts = (plan, in_gmem, gmem, smem, block, group)
        sums, copies = _Forward(*parts), _Copies(*parts)
        pl.when(group < GROUPS)(sums.consume)
        pl.when(group == GROUPS)(copies.produce)

    inputs = list(named.values())
    outputs = _call(
        body, statistics.value, out_type, plan.blocks, scratch, inputs, groups=GROUPS + 1
    )
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
    groups: int,
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
        code = (codes >> (2 * k)) & 3
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
