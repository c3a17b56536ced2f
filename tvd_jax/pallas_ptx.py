"""What the kernels do in PTX, because Pallas has no primitive for it.

Byte permutations, stores and loads that say what is to leave L2 first, and prefetches. Pallas's
interpreter knows no assembly: there the kernels take their other ways, which do the same.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from tvd_core.contract import LANES

_SHARED = 3  # NVPTX's address space of shared memory
PREFETCHED = 32  # blocks whose codes one block prefetches: 16 KiB, 128 bytes a thread


def importable() -> bool:
    """Whether this version of JAX has what ``_run`` takes from inside of it."""
    try:
        from jax.experimental.mosaic.gpu.utils import memref_ptr  # noqa: F401
        from jax.extend.mlir import ir  # noqa: F401
        from jaxlib.mlir.dialects import llvm  # noqa: F401
    except ImportError:
        return False
    return hasattr(plgpu, "inline_mgpu")


def _run(asm: str, refs: Sequence[Any], scalars: Sequence[Any]) -> None:
    """Runs PTX in every thread; ``$0, $1, ...`` are the addresses of the refs, then the scalars."""
    from jax.extend.mlir import ir
    from jaxlib.mlir.dialects import llvm

    assert all(np.dtype(x.dtype).itemsize == 4 for x in scalars)
    letters = ["f" if jnp.issubdtype(x.dtype, jnp.floating) else "r" for x in scalars]

    def inline(_: Any, *values: Any) -> None:
        addresses = [_address(x) for x in values[: len(refs)]]
        numbers = [x.registers.item() for x in values[len(refs) :]]
        constraints = ",".join([letter for letter, _ in addresses] + letters + ["~{memory}"])
        arguments, void = [x for _, x in addresses] + numbers, ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, arguments, asm, constraints, has_side_effects=True)

    types = (*[plgpu.RefType()] * len(refs), *[plgpu.Layout.WG_SPLAT] * len(scalars))
    plgpu.inline_mgpu(arg_types=types)(inline)(*refs, *scalars)


def _address(ref: Any) -> tuple[str, Any]:
    """64 bits of global memory, 32 bits of shared memory, and their constraint."""
    from jax.experimental.mosaic.gpu.utils import memref_ptr
    from jax.extend.mlir import ir
    from jaxlib.mlir.dialects import llvm

    pointer = memref_ptr(ref)
    shared = llvm.PointerType(pointer.type).address_space == _SHARED
    integer = ir.IntegerType.get_signless(32 if shared else 64)
    return "r" if shared else "l", llvm.ptrtoint(integer, pointer)


_FIRST_THREAD = """
        .reg .pred first_thread;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first_thread, thread, 0;
"""


# Barriers of a ring of copies that leave L2 first: two words of shared memory each, at a multiple
# of 8 bytes, because inline code takes no barrier of Pallas's.
BARRIER_WORDS = 2


def init_barriers(barriers_smem: Any, arrivals: int) -> None:
    """Makes the words barriers, whose phases end after ``arrivals`` copies each."""
    count = barriers_smem.size // BARRIER_WORDS
    inits = "\n".join(
        f"@first_thread mbarrier.init.shared::cta.b64 [$0 + {8 * i}], {arrivals};"
        for i in range(count)
    )
    asm = f"""{{
        {_FIRST_THREAD}
        {inits}
        fence.proxy.async.shared::cta;
        bar.sync 0;
    }}"""
    _run(asm, [barriers_smem], [])


def wait(barrier_smem: Any, parity: Any) -> None:
    """Waits for the end of the phase of this parity: 0 in a barrier's first use, then 1, 0, ..."""
    asm = """{
        .reg .pred arrived;
        again:
        mbarrier.try_wait.parity.shared::cta.b64 arrived, [$0], $1;
        @!arrived bra again;
    }"""
    _run(asm, [barrier_smem], [parity])


def copy_streamed(x_gmem: Any, x_smem: Any, barrier_smem: Any) -> None:
    """``plgpu.copy_gmem_to_smem`` of what is to leave L2 first; a multiple of 16 bytes."""
    size = x_gmem.size * np.dtype(x_gmem.dtype).itemsize
    assert size % 16 == 0
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    asm = f"""{{
        {_FIRST_THREAD}
        .reg .b64 first_out;
        createpolicy.fractional.L2::evict_first.b64 first_out, 1.0;
        @first_thread mbarrier.arrive.expect_tx.shared::cta.b64 _, [$2], {size};
        @first_thread {copy} [$1], [$0], {size}, [$2], first_out;
    }}"""
    _run(asm, [x_gmem, x_smem, barrier_smem], [])


def prefetch(codes_gmem: Any, first: Any) -> None:
    """Asks for the codes of the PREFETCHED blocks from ``first`` on, to stay in L2 until read."""
    asm = f"""{{
        .reg .b32 thread;
        .reg .b64 address, offset;
        mov.u32 thread, %tid.x;
        mul.wide.u32 offset, $1, {LANES};
        add.u64 address, $0, offset;
        mul.wide.u32 offset, thread, 128;
        add.u64 address, address, offset;
        prefetch.global.L2::evict_last [address];
    }}"""
    _run(asm, [codes_gmem], [first])


def store_signed(codes_gmem: Any, outputs: Sequence[Any], value: Any, keep: Any) -> None:
    """Writes sign * value for a whole tile to each output, negated where its sign is -1.

    The 4 gradients that a code can stand for are made once, and byte permutations look them up, 2
    at a time: 1.5 instructions an element of 2 bytes and 3 of 4 bytes instead of 9.

    Args:
        codes_gmem: the tile's codes; a thread takes the 4 of each of 4 neighbouring lanes.
        outputs: pairs of a tile in global memory, 16-byte aligned, and a sign.
        value: float32.
        keep: int32; 0 makes every code a tie, -1 leaves them.
    """
    value_at, keep_at = f"${len(outputs) + 1}", f"${len(outputs) + 2}"
    lines = [
        ".reg .b32 thread, words, selectors, x<4>, high<2>;",
        ".reg .f32 zero, tie, nan;",
        ".reg .b64 address, offset, first_out;",
        "createpolicy.fractional.L2::evict_first.b64 first_out, 1.0;",
        "mov.u32 thread, %tid.x;",
        "mul.wide.u32 offset, thread, 4;",
        "add.u64 address, $0, offset;",
        "ld.global.L1::evict_first.L2::cache_hint.b32 words, [address], first_out;",
        f"and.b32 words, words, {keep_at};",
        "mov.f32 zero, 0f00000000;",
        f"mul.rn.f32 tie, {value_at}, zero;",  # not finite: NaN
        "mov.b32 nan, 0x7FC00000;",
    ]
    for i, (x_gmem, sign) in enumerate(outputs):
        lines += _one_output(i, np.dtype(x_gmem.dtype), sign, value_at)
    _run("{" + "\n".join(lines) + "}", [codes_gmem, *(x for x, _ in outputs)], [value, keep])


def _one_output(i: int, dtype: np.dtype, sign: int, value_at: str) -> list[str]:
    lines = [
        f".reg .f32 tie{i}, plus{i}, minus{i};",
        f".reg .b32 table{i}_<4>;",
        f".reg .b64 out{i};",
        f"neg.f32 minus{i}, {value_at};",
        f"neg.f32 tie{i}, tie;",
        f"mov.f32 plus{i}, {value_at};",
    ]
    tie, plus, minus = f"tie{i}", f"plus{i}", f"minus{i}"
    tie, plus, minus = ("tie", plus, minus) if sign > 0 else (tie, minus, plus)
    wide = dtype.itemsize == 4
    if wide:
        for half, selector in (("0", "0x5410"), ("2", "0x7632")):
            lines += [
                f"prmt.b32 table{i}_{half}, {tie}, {plus}, {selector};",
                f"prmt.b32 table{i}_{int(half) + 1}, {minus}, nan, {selector};",
            ]
    else:
        kind, nan = ("bf16x2", 0x7FC0) if dtype == jnp.bfloat16 else ("f16x2", 0x7E00)
        lines += [
            f"cvt.rn.{kind}.f32 table{i}_0, {plus}, {tie};",
            f"cvt.rn.{kind}.f32 table{i}_1, nan, {minus};",
            # The NaN that a compiler makes of the constant, not the conversion's.
            f"prmt.b32 table{i}_1, table{i}_1, {nan}, 0x5410;",
        ]
    lines += [
        f"mul.wide.u32 offset, thread, {4 * dtype.itemsize};",
        f"add.u64 out{i}, ${i + 1}, offset;",
    ]
    for k in range(4):
        # Code c stands for the bytes 2 c and 2 c + 1 of a table.
        lines += [
            f"shr.u32 selectors, words, {2 * k};",
            "and.b32 selectors, selectors, 0x03030303;",
            "mad.lo.u32 selectors, selectors, 0x22, 0x10101010;",
            f"prmt.b32 x0, table{i}_0, table{i}_1, selectors;",
        ]
        if wide:
            lines += [f"prmt.b32 high0, table{i}_2, table{i}_3, selectors;"]
        lines += [
            "shr.u32 selectors, selectors, 16;",
            f"prmt.b32 x2, table{i}_0, table{i}_1, selectors;",
        ]
        if wide:
            lines += [
                f"prmt.b32 high1, table{i}_2, table{i}_3, selectors;",
                "prmt.b32 x1, x0, high0, 0x7632;",
                "prmt.b32 x0, x0, high0, 0x5410;",
                "prmt.b32 x3, x2, high1, 0x7632;",
                "prmt.b32 x2, x2, high1, 0x5410;",
            ]
        values = "v4.b32 [{}], {{x0, x1, x2, x3}}" if wide else "v2.b32 [{}], {{x0, x2}}"
        at = f"out{i} + {k * LANES * dtype.itemsize}"
        store = "st.global.L1::evict_first.L2::cache_hint." + values.format(at)
        lines += [f"{store}, first_out;"]
    return lines


_COMBINE = {"add": "add.rn.f32", "max": "max.f32"}


def reduce_warps(op: str, x: Any, out_smem: Any) -> None:
    """Each warp's 128 elements of ``x``, 4 neighbours a thread, to its place in ``out_smem [4]``.

    The 4 neighbours in sequence, then lanes by strides 1, 2, 4, 8, 16.
    """
    combine = _COMBINE[op]
    strides = "\n".join(
        f"shfl.sync.bfly.b32 other, value, {stride}, 31, -1; {combine} value, value, other;"
        for stride in (1, 2, 4, 8, 16)
    )
    asm = f"""{{
        .reg .f32 value, other;
        .reg .b32 thread, lane, at;
        .reg .pred first_lane;
        {combine} value, $1, $2;
        {combine} value, value, $3;
        {combine} value, value, $4;
        {strides}
        mov.u32 thread, %tid.x;
        and.b32 lane, thread, 31;
        setp.eq.u32 first_lane, lane, 0;
        shr.u32 at, thread, 3;
        and.b32 at, at, 12;
        add.u32 at, at, $0;
        @first_lane st.shared.f32 [at], value;
    }}"""

    _run_on_vector(asm, out_smem, x)


def store_low_bytes(x: Any, out_gmem: Any) -> None:
    """Writes the lowest byte of each element of ``x``, 4 neighbours a thread, to ``out_gmem``.

    Without the two barriers of the warpgroup that a store of Pallas's has.
    """
    asm = """{
        .reg .b32 thread, low, high, word;
        .reg .b64 address, offset;
        prmt.b32 low, $1, $2, 0x0040;
        prmt.b32 high, $3, $4, 0x0040;
        prmt.b32 word, low, high, 0x5410;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        mul.wide.u32 offset, thread, 4;
        add.u64 address, $0, offset;
        st.global.b32 [address], word;
    }"""
    _run_on_vector(asm, out_gmem, x)


def store_scalar(out_gmem: Any, value: Any) -> None:
    """Writes a float32 from the first thread of the warpgroup, without a barrier of it."""
    asm = """{
        .reg .b32 thread;
        .reg .pred first_thread;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 first_thread, thread, 0;
        @first_thread st.global.f32 [$0], $1;
    }"""
    _run(asm, [out_gmem], [value])


def _run_on_vector(asm: str, ref: Any, x: Any) -> None:
    """Runs PTX in every thread; ``$0`` is the address, ``$1`` to ``$4`` its float32 elements."""
    from jax.extend.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    def inline(_: Any, ref: Any, x: Any) -> None:
        letter, pointer = _address(ref)
        (register,) = x.registers.flat
        elements = [vector.extract(register, [], [i]) for i in range(4)]
        void = ir.Type.parse("!llvm.void")
        constraints = f"{letter},f,f,f,f,~{{memory}}"
        llvm.inline_asm(void, [pointer, *elements], asm, constraints, has_side_effects=True)

    layout = plgpu.Layout.WG_STRIDED(x.shape, vec_size=4)
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))(inline)(ref, x)


def layout_of(x: Any) -> Any:
    """The layout of a vector over a warpgroup, x.size / 128 neighbours a thread."""
    return plgpu.Layout.WG_STRIDED(x.shape, vec_size=x.size // 128)


def widen_bfloat16(x: Any) -> Any:
    """bfloat16 as float32, one instruction an element."""
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu.utils import c
    from jax.extend.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    layout = layout_of(x)
    count = x.size // 128
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout)

    def widened(pairs: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        words = vector.bitcast(ir.VectorType.get((count // 2,), i32), pairs)
        sixteen, high = c(16, i32), c(-65536, i32)
        elements = []
        for i in range(count // 2):
            word = vector.extract(words, [], [i])
            elements.append(arith.bitcast(f32, arith.shli(word, sixteen)))
            elements.append(arith.bitcast(f32, arith.andi(word, high)))
        return vector.from_elements(ir.VectorType.get((count,), f32), elements)

    def inline(_: Any, x: Any) -> Any:
        registers = np.empty_like(x.registers)
        for at, register in np.ndenumerate(x.registers):
            registers[at] = widened(register)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(inline)(x)


def below(d: Any) -> Any:
    """(1 - sign(d)) / 2 by one saturating instruction; subnormal differences count as 0."""
    return _elementwise("fma.rn.ftz.sat.f32 $0, $1, 0fFF000000, 0f3F000000;", d)


def fma(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of vectors, rounded once."""
    from jaxlib.mlir.dialects import math

    layout = layout_of(a)
    result = plgpu.ShapeDtypeStruct(a.shape, a.dtype, layout=layout)

    def inline(_: Any, a: Any, b: Any, c: Any) -> Any:
        return a._pointwise(math.fma, b, c)

    return plgpu.inline_mgpu(arg_types=(layout,) * 3, return_type=result)(inline)(a, b, c)


def mul(a: Any, b: Any) -> Any:
    """``a * b`` of vectors, which no compiler contracts with what is added to it."""
    return _elementwise("mul.rn.f32 $0, $1, $2;", a, b)


def _elementwise(asm: str, *vectors: Any) -> Any:
    """One instruction of float32 elements each."""
    from jax.extend.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    layout = layout_of(vectors[0])
    result = plgpu.ShapeDtypeStruct(vectors[0].shape, jnp.float32, layout=layout)

    def of_registers(*registers: Any) -> Any:
        constraints = ",".join(["=f"] + ["f"] * len(registers))
        f32 = ir.F32Type.get()
        elements: list[Any] = [
            llvm.inline_asm(
                f32,
                [vector.extract(x, [], [i]) for x in registers],
                asm,
                constraints,
                has_side_effects=False,
            )
            for i in range(registers[0].type.shape[0])
        ]
        return vector.from_elements(registers[0].type, elements)

    def inline(_: Any, first: Any, *others: Any) -> Any:
        return first._pointwise(of_registers, *others)

    return plgpu.inline_mgpu(arg_types=(layout,) * len(vectors), return_type=result)(inline)(
        *vectors
    )


def divide(a: Any, b: Any) -> Any:
    """``a / b`` of float32 scalars, rounded to nearest.

    ``pallas_kernels.divide`` rounds right as well, unless ``a`` is 1: LLVM makes that a reciprocal.
    """
    return _scalar("div.rn.f32 $0, $1, $2;", a, b)


def fma_scalar(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of float32 scalars, rounded once."""
    return _scalar("fma.rn.f32 $0, $1, $2, $3;", a, b, c)


def mul_scalar(a: Any, b: Any) -> Any:
    """``a * b`` of float32 scalars, which no compiler contracts with what is added to it."""
    return _scalar("mul.rn.f32 $0, $1, $2;", a, b)


def log2(x: Any) -> Any:
    """The logarithm of a float32 scalar by the instruction that Triton uses too."""
    return _scalar("lg2.approx.ftz.f32 $0, $1;", x)


def _scalar(asm: str, *scalars: Any) -> Any:
    from jax.experimental.mosaic import gpu as mgpu
    from jax.extend.mlir import ir
    from jaxlib.mlir.dialects import llvm

    def inline(_: Any, *scalars: Any) -> Any:
        operands = [x.registers.item() for x in scalars]
        constraints = ",".join(["=f"] + ["f"] * len(operands))
        f32 = ir.F32Type.get()
        result = llvm.inline_asm(f32, operands, asm, constraints, has_side_effects=False)
        return mgpu.FragmentedArray.splat(result, ())

    splat = plgpu.Layout.WG_SPLAT
    result = plgpu.ShapeDtypeStruct((), jnp.float32, layout=splat)
    return plgpu.inline_mgpu(arg_types=(splat,) * len(scalars), return_type=result)(inline)(
        *scalars
    )
