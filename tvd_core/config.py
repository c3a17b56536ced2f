"""Frozen launch configurations. No autotuning at run time: the reason stands beside each number.

Measured on one H200 (132 SMs), 16384 tokens, CUPTI kernel time in us, unless said otherwise.
"""

from typing import NamedTuple

from tvd_core.contract import LANES, LOGITS_LANES, LOGITS_TILE, TILE, code_tiles

# Rows that do not all start at a multiple of 16 bytes are read in windows that start at a multiple
# of so many elements before them. 16-byte loads need no more than 8, but with 16 (so at 32 or 64
# bytes) the forward at vocab 50257 took 804 in bfloat16 and 1515 in float32 under Pallas, with 64
# (at 128 or 256 bytes) 710 and 1408; under Triton 738 and 1426, and 727 and 1406.
WINDOW_ALIGNMENT = 64

TRITON_REDUCE_WARPS = 4
# One tile a program, programs in the order of memory: float32 73 at vocab 4096 and 573 at 32768,
# against 78 and 650 with a row a program. With the prefetch below, 2 and 4 warps: 527 and 530 at
# 32768, 287 and 277 in bfloat16.
TRITON_BACKWARD_WARPS = 4
# Programs (of 512 bytes of codes each) whose codes are read into L2 at a time, in the backward. 0,
# 4096, 8192, 16384: 74.0, 67.4, 64.9, 65.9 at vocab 4096, 599, 553, 530, 574 at 32768, in bfloat16
# 302, 292, 277, 299. Few are asked for too late, many do not stay in L2 (50 MB).
BACKWARD_PREFETCH = 8192


# 512 lanes on 4 warps are a 16-byte float32 load a thread and sub-tile. With codes, at vocab 4096:
# 129, against 378 with 1 warp, 224 with 2 and 403 with 8; at 50257: 1573 (2 warps 1589, 1 4651).
TRITON_FORWARD_WARPS = 4


# Where the codes fit in L2 (50 MB) besides what passes through, p and q are read to leave it first:
# the codes stay there for the backward, and are not written to memory among the reads. With 134 MB
# of codes (vocab 32768) it gains nothing, 1029 and 1031, and gives up asynchronous copies, 1007.
STREAM_BYTES = 36 * 2**20
# Fewer rows need the asynchronous copies: 256 of 32768 take 17 with them and 34 without, 1024 of
# 4096 11.8 and 11.4.
STREAM_TOKENS = 1024


def forward_stream(tokens: int, vocab: int, keep_codes: bool) -> bool:
    """Whether p and q are the first to leave L2.

    With codes, Triton and Pallas: 119.6 and 123.8, not 129.2 and 133.6, at vocab 4096; 243.7 and
    253.2, not 255.6 and 259.5, at 8192.
    """
    codes_bytes = tokens * code_tiles(vocab) * LANES
    return keep_codes and tokens >= STREAM_TOKENS and codes_bytes <= STREAM_BYTES


def triton_forward_stages(tokens: int, vocab: int, keep_codes: bool, *itemsizes: int) -> int:
    """Windows that the forward has in flight as asynchronous copies; 1 for plain loads.

    float32 with 1, 4 and 6: 119.5, 118.8, 175.7 at vocab 4096, 944, 934, 931 at 32768, and with 256
    rows of 32768 22.4, 17.2, 17.6: few rows leave an SM short of loads in flight. At 1271, where no
    window is copied, the set-up alone makes 53 into 104. bfloat16, whose copies are 8 bytes a
    thread, with 1 and 4: 479 and 493 at 32768, 727 and 756 at 50257. Asynchronous copies have no
    say in what leaves L2 first.
    """
    if forward_stream(tokens, vocab, keep_codes):
        return 1
    return 4 if vocab >= 2 * TILE and min(itemsizes) == 4 else 1


def triton_backward_grid(tokens: int, vocab: int) -> int:
    """Programs of the backward: one for each tile of TILE elements of a row."""
    return tokens * code_tiles(vocab + (WINDOW_ALIGNMENT - 1 if vocab % 16 else 0))


# Pallas: slots of the shared-memory ring (one of a float32 pair of tiles is 16 KiB). 2 to 12 slots
# in 1 to 5 blocks an SM move vocab 4096 and 32768 by 1 %.
PALLAS_STAGES = 4
# The shared memory of one SM, and what a block takes of it beside its scratch (barriers, alignment,
# 1 KiB for CUDA). A grid with a block more an SM than fit runs in two waves: bfloat16 at vocab 1271
# with 5 and 6 blocks 24 and 29, at 50257 710 and 790, with codes 805 and 993.
PALLAS_SMEM_PER_SM = 228 * 1024
PALLAS_SMEM_PER_BLOCK = 4096
PALLAS_MAX_BLOCKS_PER_SM = 6  # as many as the registers of any of the kernels allow
# A thread takes a whole row of so few elements: at vocab 1, 3, 16 and 32 the forward takes 1.4,
# 1.4, 2.6 and 5.8 that way; 12.2, 12.2, 10.0 and 10.0 with a warpgroup a row.
PALLAS_SHORT_VOCAB = 16


# From logits, us, 16384 x 32768 in bfloat16 and 8192 x 32768 in float32. Windows of LOGITS_TILE
# elements; each keeps LOGITS_LANES bytes of codes. 4, 8 and 16 warps of the backward: 571, 573 and
# 636, and 556 in all three.
LOGITS_BACKWARD_WARPS = 4
LOGITS_PROGRAMS_UNLIMITED = 2


class LogitsLaunch(NamedTuple):
    """How the forward of the Triton kernels from logits is launched; a program takes many rows."""

    warps: int
    registers: int | None
    programs: int
    """On an SM."""
    ahead: bool
    """Whether tiles are read one ahead."""


def logits_forward_launch(*itemsizes: int) -> LogitsLaunch:
    """By the bytes of a pair of logits.

    2-byte logits, without and with codes: 8 warps, at most 80 registers, 3 programs an SM, 807 and
    960; unlimited, 2 programs, 989 and 1115 (before codes took fewer instructions, 810 and 1097 for
    the first); reading ahead, 1227 and 1355. float32: 16 warps, 1 program, reading ahead, 695 and
    766, not ahead 859 and 768; 8 warps, 2 programs, 743 and 841, not ahead 762 and 735: few rows at
    a time stay in L2 until they are read again.
    """
    if sum(itemsizes) <= 4:
        return LogitsLaunch(8, 80, 3, False)
    return LogitsLaunch(16, None, 1, True)


# Elements at the start of a row whose maximum the exponents are relative to, unless the sums show
# that it was far too low. Not more than the first sub-tile of windows that start anywhere.
LOGITS_SAMPLE = LOGITS_LANES - WINDOW_ALIGNMENT
# They show it above this: each exponent is rounded relative to its size, up to 32 more units in the
# last place of an exponential. A row of which they are above is summed again from its maximum.
LOGITS_HIGHEST_SUM = 2.0**32
# The scale above which a launch is COLD. A reference m * scale is rounded, but not the products
# from which it is subtracted: their exponents are off by half its unit in the last place, and
# overflow where that passes 128, at logits of 1e4 from a scale of 2**19 on.
LOGITS_COLD_SCALE = 2.0**16
# Below what a lane can meet: finite, so that the exponential of a masked logit is 0, not NaN.
LOGITS_LOWEST = -3.0e38


def logits_reference_unit(scale: float) -> float:
    """What a reference, of a row from logits, is multiplied with to be an exponent of 2."""
    return scale if scale > LOGITS_COLD_SCALE else 1.0


def logits_pallas_slots(slot_bytes: int, sample_bytes: int) -> int:
    """Slots that fit, beside a sample, in the shared memory of an SM; one block takes it whole."""
    return (PALLAS_SMEM_PER_SM - 2 * PALLAS_SMEM_PER_BLOCK - sample_bytes) // slot_bytes


def logits_windows(vocab: int) -> int:
    """Windows of a row of logits, which start at a multiple of WINDOW_ALIGNMENT elements."""
    return -(-(vocab + (WINDOW_ALIGNMENT - 1 if vocab % 16 else 0)) // LOGITS_TILE)


def logits_codes_bytes(vocab: int) -> int:
    """Bytes of sign codes that a row of logits keeps."""
    return logits_windows(vocab) * LOGITS_LANES
