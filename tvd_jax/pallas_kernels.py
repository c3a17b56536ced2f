"""The Pallas Mosaic GPU kernels of the total variation distance (Hopper and newer).

A persistent grid of blocks of one warpgroup; block ``b`` owns rows ``b, b + blocks, ...`` and walks
their tiles of TILE elements through a ring of shared-memory slots that TMA fills ahead. Names carry
the memory space: ``p``, ``p_gmem``, ``p_smem``.

A tile is taken as four sub-tiles of LANES elements, a register vector each, so that lane ``j`` adds
elements ``j, j + LANES, ...`` of its row in order. Mosaic's reduction of such a vector with 4
elements a thread (those of a thread, then lanes by strides 1 to 16, then warps) is the contract's
tree.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tvd_core import config
from tvd_core.contract import LANES, NORMALIZED_REDUCTIONS, TILE, code_tiles
from tvd_jax import compat, pallas_ptx

WARPGROUP = 128
REDUCE_TILE = 8 * LANES
# Rows that are not 16-byte aligned are copied in windows that start at multiples of SHIFT elements.
# The copies need a multiple of 16 bytes only, which COPY_UNIT elements of 2 or 4 bytes are: that is
# how close they come to the end of the array.
SHIFT = config.WINDOW_ALIGNMENT
COPY_UNIT = 16
# Flat indices are 32 bits wide, so a longer flat array is cut into blocks of this many rows, whose
# starts are aligned whatever the vocabulary. The copies of a block's last row may reach beyond the
# block: into the next one, which follows in memory.
ROWS_OF_FLAT_BLOCK = SHIFT


def _i32(x: int) -> Any:
    """A 32-bit index; a Python int would be 64 bits wide under jax_enable_x64."""
    return jnp.int32(x)


def _vector(x: Any, vec_size: int = 4) -> Any:
    """Lays a 1-D register array out over the warpgroup, ``vec_size`` elements a thread."""
    return compat.layout_cast(x, plgpu.Layout.WG_STRIDED(x.shape, vec_size=vec_size))


def divide(a: Any, b: Any) -> Any:
    """``a / b`` of float32 scalars, rounded to nearest.

    XLA has LLVM divide float32 to within 2 units in the last place (``div.full.f32``), for Mosaic
    too, and then every few calls differ in a bit from Triton's ``div_rn``. ``a * (1 / b)`` in
    float64 is closer to the quotient than a quotient of float32 can come to the middle between two
    others. (Below the normal numbers a quotient can lie in the middle, and then goes either way.)
    LLVM would turn a plain ``a / b`` back into a division of float32.
    """
    with compat.enable_x64():
        a, b = (lax.convert_element_type(x, jnp.float64) for x in (a, b))
        quotient = lax.mul(a, lax.div(jnp.float64(1), b))
        return lax.convert_element_type(quotient, jnp.float32)


def _splat(scalar: Any) -> Any:
    """The scalar in every lane: a select between vectors wants a vector condition."""
    return jnp.full((LANES,), scalar)


def _sum_lanes(acc: Any) -> Any:
    """Adds LANES lanes in the contract's order."""
    if not compat.interpreting():
        return jnp.sum(acc)
    # The interpreter's jnp.sum is XLA's, in an order of its own.
    x = acc.reshape(LANES // 4, 4)
    return _sum_pairs(((x[:, 0] + x[:, 1]) + x[:, 2]) + x[:, 3])


def _sum_pairs(s: Any) -> Any:
    """Adds a value a thread: adjacent pairs, then pairs of those, and so on."""
    if not compat.interpreting():
        return jnp.sum(s)
    while s.size > 1:
        pairs = s.reshape(-1, 2)
        s = pairs[:, 0] + pairs[:, 1]
    return s.reshape(())


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """How ``[tokens, vocab]`` rows are cut into tiles, copied, and spread over the lanes.

    If every row starts at a multiple of 16 bytes (``aligned``), tiles are bulk copies and a thread
    holds 4 neighbouring elements. Else bulk copies start at the last multiple of SHIFT elements
    before a tile, and a thread reads single elements from shared memory, off by the shift: any
    vocabulary runs at the speed of the copies.
    """

    tokens: int
    vocab: int
    aligned: bool
    stream: bool = False  # whether what is copied is to leave L2 first, in PTX

    @classmethod
    def of(cls, tokens: int, vocab: int, dtypes: Sequence[Any], stream: bool = False) -> "_Tiling":
        sizes = [np.dtype(dtype).itemsize for dtype in dtypes]
        return cls(tokens, vocab, all(vocab * size % 16 == 0 for size in sizes), stream)

    @property
    def vec_size(self) -> int:
        """Neighbouring elements that a thread holds."""
        return LANES // WARPGROUP if self.aligned else 1

    @property
    def tiles(self) -> int:
        return code_tiles(self.vocab)

    @property
    def full_tiles(self) -> int:
        return self.vocab // TILE

    @property
    def tail(self) -> int:
        """Elements in the last, partial tile; 0 if there is none."""
        return self.vocab % TILE

    @property
    def sub_tiles(self) -> int:
        """Sub-tiles of a slot: fewer than 4 only where a row is shorter than a tile."""
        return -(-min(self.vocab, TILE) // LANES)

    @property
    def slot(self) -> int:
        """Elements of a shared-memory slot."""
        if not self.aligned:
            return self.sub_tiles * LANES + SHIFT
        # A power of two: with slots of 1536 elements LLVM no longer saw that 4 elements of 2 bytes
        # are aligned, and loaded them one by one.
        return LANES << (self.sub_tiles - 1).bit_length()

    @property
    def whole(self) -> range:
        """The tiles that hold elements of the row only; the others are masked."""
        return range(self.full_tiles)

    def blocks(self, smem_bytes: int) -> int:
        """Blocks of a persistent grid over the rows."""
        per_sm = config.PALLAS_SMEM_PER_SM // (smem_bytes + config.PALLAS_SMEM_PER_BLOCK)
        per_sm = max(1, min(per_sm, config.PALLAS_MAX_BLOCKS_PER_SM))
        return min(self.tokens, per_sm * compat.sm_count())

    def vector(self, x: Any) -> Any:
        """Lays LANES register elements out over the warpgroup."""
        return _vector(x, self.vec_size)

    @property
    def size(self) -> int:
        """Elements of the view that ``fetch`` copies from."""
        return (self.tokens + self._padding) * self.vocab

    @property
    def _in_blocks(self) -> bool:
        return self.tokens * self.vocab >= 2**31

    @property
    def _padding(self) -> int:
        """Rows to add to the array: to fill blocks, and where many rows would overhang the end."""
        fill = -self.tokens % ROWS_OF_FLAT_BLOCK if self._in_blocks else 0
        return fill + (2 * ROWS_OF_FLAT_BLOCK if self.vocab < 2 * SHIFT else 0)

    def gmem_view(self, x: jax.Array) -> jax.Array:
        """The view that ``fetch`` copies from: rows, or flat (blocks of) rows if not aligned."""
        if self.aligned:
            return x
        x = jnp.pad(x, ((0, self._padding), (0, 0)))
        return x.reshape(-1, ROWS_OF_FLAT_BLOCK * self.vocab) if self._in_blocks else x.reshape(-1)

    def full_or_tail(self, tile: Any, full: Any, tail: Any) -> None:
        """Runs ``full`` for a whole tile and ``tail`` for the last, partial one."""
        if self.full_tiles:
            if self.tail:
                pl.when(tile < self.full_tiles)(full)
            else:
                full()
        if self.tail:
            if self.full_tiles:
                pl.when(tile == self.full_tiles)(tail)
            else:
                tail()

    def shift(self, row: Any) -> Any:
        """Elements between the start of a row's windows and the row."""
        if self.aligned:
            return _i32(0)
        return lax.rem(lax.rem(row, _i32(SHIFT)) * (self.vocab % SHIFT), _i32(SHIFT))

    @property
    def copied(self) -> tuple[int, int]:
        """Elements to copy for a whole tile, and for the last one, whatever the shift."""
        if self.aligned:
            return TILE, self.tail
        return TILE + SHIFT, -(-(self.tail + SHIFT - 1) // SHIFT) * SHIFT

    @functools.cached_property
    def overhanging(self) -> list[tuple[int, int, int]]:
        """Row, tile, and the elements left, where a copy would reach beyond the array's end."""
        found = []
        for row in range(max(0, self.tokens - 2), self.tokens):
            for tile in range(self.tiles):
                start = row * self.vocab // SHIFT * SHIFT + tile * TILE
                left = self.size - start
                if left < self.copied[tile >= self.full_tiles]:
                    found.append((row, tile, left))
        return found

    def _flat(self, x_gmem: Any, row: Any) -> tuple[tuple[Any, ...], Any]:
        """Leading index into a flat view, and the row's first element in what is left."""
        if len(x_gmem.shape) == 1:
            return (), row * self.vocab
        rows = _i32(ROWS_OF_FLAT_BLOCK)
        return (lax.div(row, rows),), lax.rem(row, rows) * self.vocab

    def fetch(self, x_gmem: Any, x_smem: Any, row: Any, tile: Any, barrier: Any) -> None:
        """Starts the copy of one tile into a slot; it arrives at ``barrier``."""

        def copy(index: tuple[Any, ...], start: Any, size: int) -> None:
            source, target = x_gmem.at[(*index, pl.ds(start, size))], x_smem.at[pl.ds(0, size)]
            if self.stream:
                pallas_ptx.copy_streamed(source, target, barrier)
                return
            plgpu.copy_gmem_to_smem(
                source, target, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS
            )

        full, tail = self.copied
        if self.aligned:
            at = ((row,), tile * TILE)
            self.full_or_tail(tile, lambda: copy(*at, full), lambda: copy(*at, tail))
            return
        index, first = self._flat(x_gmem, row)
        # Written as a product, so that the compiler sees that the address is aligned.
        start = lax.div(first - self.shift(row), _i32(SHIFT)) + tile * (TILE // SHIFT)
        at = (index, start * SHIFT)
        inside = jnp.bool_(True)
        for at_row, at_tile, left in self.overhanging:
            here = (row == at_row) & (tile == at_tile)
            inside = inside & jnp.logical_not(here)
            whole = left // COPY_UNIT * COPY_UNIT
            if whole > 0:
                pl.when(here)(functools.partial(copy, *at, whole))
            else:  # nothing, but something has to arrive
                pl.when(here)(functools.partial(copy, (_i32(0),) * len(index), 0, COPY_UNIT))
        normal = functools.partial(
            self.full_or_tail, tile, lambda: copy(*at, full), lambda: copy(*at, tail)
        )
        pl.when(inside)(normal) if self.overhanging else normal()

    def complete(self, x_gmem: Any, x_smem: Any, row: Any, tile: Any) -> None:
        """Adds the array's last elements to a copy that arrived, if it had to leave them out."""
        for at_row, at_tile, left in self.overhanging:
            left = max(0, left)
            rest = range(left // COPY_UNIT * COPY_UNIT, left)
            if not rest:
                continue

            @pl.when((row == at_row) & (tile == at_tile))
            def _(rest: range = rest, left: int = left) -> None:
                index, first = self._flat(x_gmem, row)
                end = first - self.shift(row) + tile * TILE + left
                values = [x_gmem[(*index, end - left + i)] for i in rest]
                for i, value in zip(rest, values, strict=True):
                    x_smem[i] = value
                plgpu.commit_smem()

    def sub_tile(self, x_smem: Any, row: Any, k: int) -> Any:
        """Sub-tile ``k`` of a slot, in registers as float32."""
        at = pl.ds(k * LANES + (0 if self.aligned else self.shift(row)), LANES)
        return self.vector(x_smem[at]).astype(jnp.float32)

    def inside(self, row: Any, tile: Any, k: int) -> Any:
        """Which elements of sub-tile ``k`` are the row's, in a masked tile."""
        column = self.vector(lax.broadcasted_iota(jnp.int32, (LANES,), 0))
        return column < self.tail - k * LANES

    @property
    def lanes_scratch(self) -> Any:
        """Shared memory that ``sum_lanes`` needs."""
        return None if self.aligned else plgpu.SMEM((LANES,), jnp.float32)

    def sum_lanes(self, acc: Any, lanes_smem: Any, row: Any) -> Any:
        """Adds the lanes of a row in the contract's order."""
        if not self.aligned:
            # From one element a thread and step to the 4 neighbours that the sum starts with.
            lanes_smem[...] = acc
            plgpu.commit_smem()
            acc = _vector(lanes_smem[...])
        return _sum_lanes(acc)

    def store(self, values: Sequence[Any], x_gmem: Any, x_smem: Any, row: Any, tile: Any) -> None:
        """Writes the sub-tiles of one tile, and nothing beyond the end of the row.

        Args:
            values: the sub-tiles in registers.
            x_smem: scratch of ``slot`` elements for a partial tile; this call alone uses it.
        """

        def full() -> None:
            for k, value in enumerate(values):
                x_gmem[row, pl.ds(self.column(tile, k), LANES)] = value

        def tail() -> None:
            for k, value in enumerate(values):
                x_smem[pl.ds(k * LANES, LANES)] = value
            plgpu.commit_smem()
            if self.aligned:
                plgpu.copy_smem_to_gmem(
                    x_smem.at[pl.ds(0, self.tail)], x_gmem.at[row, pl.ds(tile * TILE, self.tail)]
                )
                plgpu.wait_smem_to_gmem(0)
            else:
                self._store_by_thread(x_smem, x_gmem, row, tile)
            plgpu.commit_smem()

        self.full_or_tail(tile, full, tail)

    def column(self, tile: Any, k: int) -> Any:
        """First column of a sub-tile; as a product, so that the compiler sees the alignment."""
        return (tile * (TILE // LANES) + k) * LANES

    def _store_by_thread(self, x_smem: Any, x_gmem: Any, row: Any, tile: Any) -> None:
        first = tile * TILE

        def window(i: Any, width: int) -> None:
            x_gmem[row, pl.ds(first + i, width)] = _vector(x_smem[pl.ds(i, width)], 1)

        def element(i: Any) -> None:
            x_gmem[row, first + i] = x_smem[i]

        _by_thread(self.tail, window, element)


class _Windows(_Tiling):
    """Rows that are not aligned, in tiles that are: for sums that need not know their elements.

    Tiles start at the last multiple of SHIFT elements before the row, so a thread reads 4
    neighbouring elements as in aligned rows. Lane ``j`` then adds the elements of lane
    ``j - shift``, in the same order, and the lanes are rotated once, at the end of the row. With
    single elements a thread bfloat16 rows of 50257 were bound by the reads from shared memory.
    """

    @property
    def vec_size(self) -> int:
        return LANES // WARPGROUP

    @property
    def tiles(self) -> int:
        return code_tiles(self.vocab + SHIFT - 1)

    @property
    def full_tiles(self) -> int:
        return self.tiles - 1

    @property
    def tail(self) -> int:
        """Elements that are copied for the last tile: whatever the shift, and a multiple of it."""
        return -(-(self.vocab + SHIFT - 1 - self.full_tiles * TILE) // SHIFT) * SHIFT

    @property
    def sub_tiles(self) -> int:
        return -(-(self.tail if self.tiles == 1 else TILE) // LANES)

    @property
    def slot(self) -> int:
        return LANES << (self.sub_tiles - 1).bit_length()

    @property
    def whole(self) -> range:
        return range(1, max(1, self.vocab // TILE))

    @property
    def copied(self) -> tuple[int, int]:
        return TILE, self.tail

    def sub_tile(self, x_smem: Any, row: Any, k: int) -> Any:
        return self.vector(x_smem[pl.ds(k * LANES, LANES)]).astype(jnp.float32)

    def inside(self, row: Any, tile: Any, k: int) -> Any:
        column = self.vector(lax.broadcasted_iota(jnp.int32, (LANES,), 0))
        first = self.shift(row) - tile * TILE - k * LANES
        return (column >= first) & (column < first + self.vocab)

    @property
    def lanes_scratch(self) -> Any:
        return plgpu.SMEM((2 * WARPGROUP, LANES // WARPGROUP), jnp.float32)

    def sum_lanes(self, acc: Any, lanes_smem: Any, row: Any) -> Any:
        x = _vector(acc.reshape(WARPGROUP, 4))
        lanes_smem[pl.ds(0, WARPGROUP)] = x
        lanes_smem[pl.ds(WARPGROUP, WARPGROUP)] = x  # again, where the rotation wraps around
        plgpu.commit_smem()
        x = []
        for i in range(4):
            at = self.shift(row) + i
            here = (pl.ds(lax.div(at, _i32(4)), WARPGROUP), pl.ds(lax.rem(at, _i32(4)), 1))
            x.append(_vector(lanes_smem[here], 1))
        return _sum_pairs(((x[0] + x[1]) + x[2]) + x[3])


def _by_thread(size: int, window: Any, element: Any) -> None:
    """Covers ``size`` elements by windows of a warpgroup, or one by one if they are fewer.

    The last window is moved back into the range, over elements that are done already.
    """
    if size < WARPGROUP:
        pl.loop(_i32(0), _i32(size))(element)
        return

    @pl.loop(_i32(0), _i32(-(-size // WARPGROUP)))
    def _(i: Any) -> None:
        window(lax.min(i * WARPGROUP, _i32(size - WARPGROUP)), WARPGROUP)


def _fill_ring(steps: Any, stages: int, fetch: Any) -> None:
    """Starts the copies of the first ``stages`` steps; ``fetch(slot, index)`` starts one step's."""
    for s in range(stages):
        pl.when(s < steps)(lambda s=s: fetch(_i32(s), _i32(s)))


def _refill_ring(index: Any, steps: Any, stages: int, fetch: Any) -> None:
    """Starts the copies of the step that takes the slot of step ``index`` over."""
    pl.when(index + stages < steps)(lambda: fetch(lax.rem(index, _i32(stages)), index + stages))


def _row_loop(
    tiling: _Tiling, blocks: int, stages: int, fetch: Any, tile_step: Any, finish: Any
) -> None:
    """A block's rows, one after the other: for sums over rows.

    Args:
        fetch: ``(slot, row, tile)`` starts the copies into a slot.
        tile_step: ``(slot, row, tile, index, acc, masked) -> acc`` uses a slot, and leaves it
            free; ``masked`` says that not all of the tile is the row's.
        finish: ``(row, acc)`` ends a row.
    """
    block = lax.axis_index("block")
    rows = lax.div(tiling.tokens - block + blocks - 1, _i32(blocks))
    tiles = tiling.tiles
    whole = tiling.whole

    def fetch_index(slot: Any, index: Any) -> None:
        row = block + lax.div(index, _i32(tiles)) * blocks
        fetch(slot, row, lax.rem(index, _i32(tiles)))

    _fill_ring(rows * tiles, stages, fetch_index)

    def row_step(r: Any, carry: Any) -> Any:
        row = block + r * blocks

        def step(tile: Any, acc: Any, *, masked: bool = False) -> Any:
            index = r * tiles + tile
            acc = tile_step(lax.rem(index, _i32(stages)), row, tile, index, acc, masked)
            _refill_ring(index, rows * tiles, stages, fetch_index)
            return acc

        acc = tiling.vector(_splat(jnp.float32(0)))
        for tile in range(whole.start):
            acc = step(_i32(tile), acc, masked=True)
        acc = lax.fori_loop(_i32(whole.start), _i32(whole.stop), step, acc)
        for tile in range(whole.stop, tiles):
            acc = step(_i32(tile), acc, masked=True)
        finish(row, acc)
        return carry

    lax.fori_loop(_i32(0), rows, row_step, _i32(0))


def _smem_bytes(scratch: Sequence[Any]) -> int:
    return sum(int(np.prod(s.shape)) * np.dtype(s.dtype).itemsize for s in scratch)


def _call(
    body: Any, name: str, out_type: Any, blocks: int, scratch: Sequence[Any], inputs: Sequence[Any]
) -> Any:
    # XLA may fuse a slice into the call and hand over a pointer that is only 8-byte aligned (JAX
    # 0.11); TMA needs 16. The barrier keeps the slice apart.
    inputs = [x if x.size == 1 else lax.optimization_barrier(x) for x in inputs]
    outputs = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*inputs)
    return compat.vary_like(outputs, *inputs)


def too_large(shape: tuple[int, ...], dtypes: Sequence[Any]) -> bool:
    """Whether a 32-bit index into a block of rows of a flat array would overflow."""
    vocab = shape[-1]
    tiling = _Tiling.of(math.prod(shape[:-1]), vocab, dtypes)
    in_blocks = not tiling.aligned and tiling.tokens * vocab >= 2**31
    return in_blocks and ROWS_OF_FLAT_BLOCK * vocab >= 2**31


def vmappable(shape: tuple[int, ...], dtypes: Sequence[Any]) -> bool:
    """Whether JAX may batch the kernels on inputs ``[tokens, vocab]``, or else calls them in turn.

    In a batch of flat arrays each has to start at a multiple of 16 bytes, or no copy can read it.
    Anything but two axes (upstream gradients) is not copied.
    """
    size = math.prod(shape) if len(shape) == 2 else 0
    return all(size * np.dtype(dtype).itemsize % 16 == 0 for dtype in dtypes)


def _sign_codes(d: Any) -> Any:
    one, two, three, zero = (jnp.uint32(c) for c in (1, 2, 3, 0))
    return jnp.where(d > 0, one, jnp.where(d < 0, two, jnp.where(d == 0, zero, three)))


def forward(
    p: jax.Array,
    q: jax.Array,
    row_weights: jax.Array | None,
    *,
    keep_codes: bool,
    elementwise: bool,
    summed: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """``weight * 0.5 * sum_v |p - q|`` of each row, and what else is asked for.

    Args:
        p: ``[tokens, vocab]`` float32, bfloat16 or float16; at least one token.
        q: shape of ``p``.
        row_weights: ``[tokens]`` float32, 0 for an ignored row; ``None`` if every row counts 1.
        keep_codes: whether to return the packed sign codes.
        elementwise: whether to return ``weight * 0.5 * |p - q|``.
        summed: whether the values are for ``reduce``: then they are filled up with zeros to a
            multiple of REDUCE_TILE, which costs a kernel of its own (1 us) anywhere else.

    Returns:
        ``[tokens]`` float32, or more if ``summed``; codes ``[tokens, tiles * LANES]`` uint8 or
        ``None``; ``[tokens, vocab]`` float32 or ``None``.
    """
    tokens, vocab = p.shape
    sums_only = not (keep_codes or elementwise)
    if sums_only and vocab <= config.PALLAS_SHORT_VOCAB and tokens >= WARPGROUP:
        return _forward_short(p, q, row_weights, summed), None, None
    stream = config.forward_stream(tokens, vocab, keep_codes) and not compat.interpreting()
    tiling = _Tiling.of(tokens, vocab, (p.dtype, q.dtype), stream)
    if sums_only and not tiling.aligned:
        tiling = _Windows(tokens, vocab, aligned=False)
    stages = config.PALLAS_STAGES

    padding = -tokens % REDUCE_TILE if summed else 0
    out_type = {"per_token": jax.ShapeDtypeStruct((tokens + padding,), jnp.float32)}
    scratch = {
        "p": plgpu.SMEM((stages, tiling.slot), p.dtype),
        "q": plgpu.SMEM((stages, tiling.slot), q.dtype),
    }
    if keep_codes:
        out_type["codes"] = jax.ShapeDtypeStruct((tokens, tiling.tiles * LANES), jnp.uint8)
        scratch["codes"] = plgpu.SMEM((2, LANES), jnp.uint8)
    if elementwise:
        out_type["elementwise"] = jax.ShapeDtypeStruct((tokens, vocab), jnp.float32)
        scratch["elementwise"] = plgpu.SMEM((tiling.slot,), jnp.float32)
    if not tiling.aligned:
        scratch["lanes"] = tiling.lanes_scratch
    blocks = tiling.blocks(_smem_bytes(list(scratch.values())))
    if stream:
        scratch["barrier"] = plgpu.SMEM((stages * pallas_ptx.BARRIER_WORDS,), jnp.uint32)
    else:
        scratch["barrier"] = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    inputs = [tiling.gmem_view(p), tiling.gmem_view(q)]
    inputs += [] if row_weights is None else [row_weights]

    def body(*refs: Any) -> None:
        p_gmem, q_gmem, *rest = refs
        weights_gmem = None if row_weights is None else rest.pop(0)
        gmem = dict(zip(out_type, rest, strict=False))
        smem = dict(zip(scratch, rest[len(out_type) :], strict=True))
        _fill_up(gmem["per_token"], tokens)
        if stream:
            pallas_ptx.init_barriers(smem["barrier"], arrivals=2)

        def barrier(s: Any) -> Any:
            if not stream:
                return smem["barrier"].at[s]
            words = pallas_ptx.BARRIER_WORDS
            return smem["barrier"].at[pl.ds(s * words, words)]

        def fetch(s: Any, row: Any, tile: Any) -> None:
            tiling.fetch(p_gmem, smem["p"].at[s], row, tile, barrier(s))
            tiling.fetch(q_gmem, smem["q"].at[s], row, tile, barrier(s))

        def arrive(s: Any, row: Any, tile: Any, index: Any) -> None:
            if stream:
                pallas_ptx.wait(barrier(s), lax.rem(lax.div(index, _i32(stages)), _i32(2)))
            else:
                plgpu.barrier_wait(barrier(s))
            tiling.complete(p_gmem, smem["p"].at[s], row, tile)
            tiling.complete(q_gmem, smem["q"].at[s], row, tile)

        def tile_step(s: Any, row: Any, tile: Any, index: Any, acc: Any, masked: bool) -> Any:
            arrive(s, row, tile, index)
            codes: Any = None
            values = []
            for k in range(tiling.sub_tiles):
                d = tiling.sub_tile(smem["p"].at[s], row, k)
                d -= tiling.sub_tile(smem["q"].at[s], row, k)
                if masked:
                    d = jnp.where(tiling.inside(row, tile, k), d, jnp.zeros_like(d))
                acc = acc + jnp.abs(d)
                if keep_codes:
                    code = _sign_codes(d) << (2 * k)
                    codes = code if codes is None else codes | code
                if elementwise:
                    values.append(_weighted(jnp.abs(d) * 0.5, weights_gmem, row))
            if keep_codes:
                out_slot = lax.rem(index, _i32(2))
                # The store of two steps ago has read its slot.
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                smem["codes"][out_slot] = codes.astype(jnp.uint8)
            plgpu.commit_smem()
            if keep_codes:
                plgpu.copy_smem_to_gmem(
                    smem["codes"].at[out_slot],
                    gmem["codes"].at[row, pl.ds(tile * LANES, LANES)],
                )
            if elementwise:
                tiling.store(values, gmem["elementwise"], smem["elementwise"], row, tile)
            return acc

        def finish(row: Any, acc: Any) -> None:
            value = tiling.sum_lanes(acc, smem.get("lanes"), row) * 0.5
            if weights_gmem is not None:
                w = weights_gmem[row]
                value = jnp.where(w == 0, jnp.float32(0), value * w)
            gmem["per_token"][row] = value

        _row_loop(tiling, blocks, stages, fetch, tile_step, finish)
        if keep_codes:
            plgpu.wait_smem_to_gmem(0)

    outputs = _call(
        body, "tvd_forward", list(out_type.values()), blocks, list(scratch.values()), inputs
    )
    named = dict(zip(out_type, outputs, strict=True))
    return named["per_token"], named.get("codes"), named.get("elementwise")


def _fill_up(per_token_gmem: Any, tokens: int) -> None:
    """Zeros for what lies beyond the tokens."""

    def window(i: Any, width: int) -> None:
        per_token_gmem[pl.ds(tokens + i, width)] = _vector(jnp.zeros(width, jnp.float32), 1)

    def element(i: Any) -> None:
        per_token_gmem[tokens + i] = jnp.float32(0)

    padding = per_token_gmem.shape[0] - tokens
    if padding:
        pl.when(lax.axis_index("block") == 0)(lambda: _by_thread(padding, window, element))


def _forward_short(
    p: jax.Array, q: jax.Array, row_weights: jax.Array | None, summed: bool
) -> jax.Array:
    """The per-token values of rows of a few elements: a row a thread, not a row a warpgroup."""
    tokens, vocab = p.shape
    inputs = [p, q] + ([] if row_weights is None else [row_weights.reshape(tokens, 1)])

    def body(p_gmem: Any, q_gmem: Any, *rest: Any) -> None:
        *weights_gmem, per_token_gmem = rest
        # The last block is moved back over rows that another does too: all of them whole.
        first = lax.min(lax.axis_index("block") * WARPGROUP, _i32(tokens - WARPGROUP))
        rows = pl.ds(first, WARPGROUP)

        def column(x_gmem: Any, j: int) -> Any:
            return _vector(x_gmem[rows, pl.ds(j, 1)], 1).astype(jnp.float32)

        lanes = [jnp.abs(column(p_gmem, j) - column(q_gmem, j)) for j in range(vocab)]
        value = _sum_few_lanes(lanes) * 0.5
        if weights_gmem:
            w = column(weights_gmem[0], 0)
            value = jnp.where(w == 0, jnp.zeros_like(value), value * w)
        per_token_gmem[rows] = value.reshape(WARPGROUP)
        _fill_up(per_token_gmem, tokens)

    padding = -tokens % REDUCE_TILE if summed else 0
    out_type = [jax.ShapeDtypeStruct((tokens + padding,), jnp.float32)]
    blocks = -(-tokens // WARPGROUP)
    (per_token,) = _call(body, "tvd_forward_short", out_type, blocks, [], inputs)
    return per_token


def _sum_few_lanes(lanes: list[Any]) -> Any:
    """Adds the first lanes in the contract's order; the others are 0 and change nothing."""
    sums = [functools.reduce(operator.add, lanes[i : i + 4]) for i in range(0, len(lanes), 4)]
    while len(sums) > 1:
        sums = [functools.reduce(operator.add, sums[i : i + 2]) for i in range(0, len(sums), 2)]
    return sums[0]


def _weighted(value: Any, weights_gmem: Any, row: Any) -> Any:
    """The vector times the row's weight, 0 in an ignored row whatever the vector holds."""
    if weights_gmem is None:
        return value
    w = weights_gmem[row]
    return jnp.where(_splat(w) == 0, jnp.zeros_like(value), value * w)


def fill_up(per_token: jax.Array) -> jax.Array:
    """Values as ``reduce`` takes them: zeros to a multiple of REDUCE_TILE."""
    return jnp.pad(per_token, (0, -per_token.shape[0] % REDUCE_TILE))


def reduce(
    per_token: jax.Array,
    row_weights: jax.Array | None,
    normalizer: jax.Array | float | None,
    *,
    reduction: str,
    tokens: int,
    vocab: int,
) -> tuple[jax.Array, jax.Array]:
    """``sum(per_token) / divisor`` in the contract's order, and the divisor, both 0-d float32."""
    normalized = reduction in NORMALIZED_REDUCTIONS
    counted = normalized and normalizer is None and row_weights is not None
    factor = float(vocab) if reduction == "mean" else 1.0
    inputs = [per_token]
    if counted:
        inputs.append(jnp.pad(row_weights, (0, -tokens % REDUCE_TILE)))
    else:
        # An input even where it is known: XLA, which interprets, would turn the division by a
        # constant into a product.
        number = normalizer if normalizer is not None else tokens if normalized else 1
        inputs.append(jnp.asarray(number, jnp.float32).reshape(1))

    def lane_sum(x_gmem: Any) -> Any:
        def step(i: Any, acc: Any) -> Any:
            parts = [
                _vector(x_gmem[pl.ds(i * REDUCE_TILE + k * LANES, LANES)])
                for k in range(REDUCE_TILE // LANES)
            ]
            for part in parts:
                acc = acc + part
            return acc

        steps, rest = divmod(x_gmem.shape[0], REDUCE_TILE)
        assert rest == 0, "filled up by the forward"
        zero = _vector(_splat(jnp.float32(0)))
        return _sum_lanes(lax.fori_loop(_i32(0), _i32(steps), step, zero))

    def body(per_token_gmem: Any, divisor_gmem: Any, loss_gmem: Any, out_gmem: Any) -> None:
        total = lane_sum(per_token_gmem)
        divisor = lane_sum(divisor_gmem) if counted else divisor_gmem[0]
        divisor = divisor * jnp.float32(factor)
        # 0 / 0 counts as 0: with no token kept the loss is 0.
        nothing = (total == 0) & (divisor == 0)
        loss_gmem[0] = jnp.where(nothing, jnp.float32(0), divide(total, divisor))
        out_gmem[0] = divisor

    one = jax.ShapeDtypeStruct((1,), jnp.float32)
    loss, divisor = _call(body, "tvd_reduce", [one, one], 1, [], inputs)
    return loss.reshape(()), divisor.reshape(())


def backward(
    codes: jax.Array,
    upstream: jax.Array,
    divisor: jax.Array | None,
    row_weights: jax.Array | None,
    *,
    vocab: int,
    dtypes: Sequence[Any],
) -> list[jax.Array | None]:
    """``sign(p - q) * (0.5 * upstream / divisor * weight)`` for p, and its negative for q.

    Args:
        codes: packed sign codes of the forward.
        upstream: float32, ``[]``, ``[tokens]`` or ``[tokens, vocab]``.
        divisor: float32, ``[]``, or ``None`` for 1.
        row_weights: as in the forward.
        vocab: length of a row.
        dtypes: of the gradients of p and q, ``None`` for one that is not wanted.

    Returns:
        The gradients of p and q, ``[tokens, vocab]`` each, ``None`` if not wanted.
    """
    tokens = codes.shape[0]
    wanted = [dtype for dtype in dtypes if dtype is not None]
    signs = [s for s, dtype in zip((1, -1), dtypes, strict=True) if dtype is not None]
    per_element = upstream.ndim == 2
    tiling = _Tiling.of(tokens, vocab, [*wanted, *([jnp.float32] if per_element else [])])

    blocks = tokens * tiling.tiles
    inputs = [codes, tiling.gmem_view(upstream) if per_element else upstream.reshape(-1)]
    inputs += [] if divisor is None else [divisor.reshape(1)]
    inputs += [] if row_weights is None else [row_weights]
    slot = plgpu.SMEM((tiling.slot,), jnp.float32)
    scratch = [plgpu.SMEM((tiling.slot,), dtype) for dtype in wanted] if tiling.tail else []
    scratch += [slot] if per_element else []
    scratch += [plgpu.Barrier(num_arrivals=1, num_barriers=1)] if per_element else []
    out_type = [jax.ShapeDtypeStruct((tokens, vocab), dtype) for dtype in wanted]

    def body(*refs: Any) -> None:
        codes_gmem, upstream_gmem, *rest = refs
        divisor_gmem = None if divisor is None else rest.pop(0)
        weights_gmem = None if row_weights is None else rest.pop(0)
        out_gmem, rest = rest[: len(wanted)], rest[len(wanted) :]
        out_smem, rest = (rest[: len(wanted)], rest[len(wanted) :]) if tiling.tail else (None, rest)

        block = lax.axis_index("block")
        row, tile = lax.div(block, _i32(tiling.tiles)), lax.rem(block, _i32(tiling.tiles))
        # Not where the number of a block to come would overflow.
        if not compat.interpreting() and blocks + 2 * config.BACKWARD_PREFETCH < 2**31:
            _prefetch_codes(codes_gmem, block, blocks)
        w = None if weights_gmem is None else weights_gmem[row]
        if per_element:
            upstream_smem, barrier = rest
            tiling.fetch(upstream_gmem, upstream_smem, row, tile, barrier.at[0])
            plgpu.barrier_wait(barrier.at[0])
            tiling.complete(upstream_gmem, upstream_smem, row, tile)
        else:
            scale = upstream_gmem[_i32(0) if upstream_gmem.shape[0] == 1 else row] * 0.5
            if divisor_gmem is not None:
                scale = divide(scale, divisor_gmem[0])
            if w is not None:
                scale = jnp.where(w == 0, jnp.float32(0), scale * w)

        def by_table() -> None:
            keep = _i32(-1) if w is None else jnp.where(w == 0, _i32(0), _i32(-1))
            here = pl.ds(tile * TILE, TILE)
            tiles = [(x.at[row, here], sign) for x, sign in zip(out_gmem, signs, strict=True)]
            pallas_ptx.store_signed(_codes_of(codes_gmem, row, tile), tiles, scale, keep)

        def by_select() -> None:
            codes = tiling.vector(_codes_of(codes_gmem, row, tile)[...]).astype(jnp.uint32)
            if w is not None:
                # Selected, not multiplied: the upstream gradient of an ignored row may be NaN, and
                # its codes may say NaN.
                codes = jnp.where(_splat(w) == 0, jnp.zeros_like(codes), codes)
            gradients: list[list[Any]] = [[] for _ in wanted]
            for k in range(tiling.sub_tiles):
                code = (codes >> (2 * k)) & 3
                if per_element:
                    value = tiling.sub_tile(upstream_smem, row, k) * 0.5
                    value = _weighted(value, weights_gmem, row)
                else:
                    value = tiling.vector(_splat(scale))
                for sign, dtype, gradient in zip(signs, wanted, gradients, strict=True):
                    gradient.append(_signed(code, value * sign).astype(dtype))
            for i, x_gmem in enumerate(out_gmem):
                x_smem = None if out_smem is None else out_smem[i]
                tiling.store(gradients[i], x_gmem, x_smem, row, tile)

        if per_element or not tiling.aligned or compat.interpreting():
            by_select()
        else:
            tiling.full_or_tail(tile, by_table, by_select)

    outputs = list(_call(body, "tvd_backward", out_type, blocks, scratch, inputs))
    return [None if dtype is None else outputs.pop(0) for dtype in dtypes]


def _codes_of(codes_gmem: Any, row: Any, tile: Any) -> Any:
    """The codes of one tile."""
    return codes_gmem.at[row, pl.ds(tile * LANES, LANES)]


def _prefetch_codes(codes_gmem: Any, block: Any, blocks: int) -> None:
    """Asks for the codes that blocks of the backward will load, 4 MiB at a time.

    See ``_prefetch_codes`` of the Triton kernels: fewer turns of DRAM between reads and writes.
    """
    ahead, each = _i32(config.BACKWARD_PREFETCH), _i32(pallas_ptx.PREFETCHED)
    part = lax.rem(block, ahead)
    first = block - part + ahead + part * each

    def ask(first: Any) -> None:
        pl.when(first + each <= blocks)(lambda: pallas_ptx.prefetch(codes_gmem, first))

    @pl.when(part < config.BACKWARD_PREFETCH // pallas_ptx.PREFETCHED)
    def _() -> None:
        ask(first)
        pl.when(block == part)(lambda: ask(first - ahead))  # nobody asked for the first ones


def _signed(code: Any, value: Any) -> Any:
    """sign * value: at a tie 0, or NaN where the value is not finite, as 0 * value is."""
    zero, nan = value * 0, jnp.full_like(value, jnp.nan)
    signed = jnp.where(code == 1, value, jnp.where(code == 2, -value, zero))
    return jnp.where(code == 3, nan, signed)
