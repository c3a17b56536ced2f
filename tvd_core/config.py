"""Frozen launch configurations. No autotuning at run time: the reason stands beside each number.

Measured on one H200 (132 SMs), 16384 tokens, CUPTI kernel time in us, unless said otherwise.
"""

from tvd_core.contract import code_tiles

TRITON_REDUCE_WARPS = 4
# One tile a program, programs in the order of memory: float32 73 at vocab 4096 and 573 at 32768,
# against 78 and 650 with a row a program. 1, 2 and 4 warps: 574, 576, 581; at 50257 919, 947, 915.
TRITON_BACKWARD_WARPS = 1


# 512 lanes on 4 warps are a 16-byte float32 load a thread and sub-tile. With codes, at vocab 4096:
# 129, against 378 with 1 warp, 224 with 2 and 403 with 8; at 50257: 1573 (2 warps 1589, 1 4651).
TRITON_FORWARD_WARPS = 4


def triton_backward_grid(tokens: int, vocab: int) -> int:
    """Programs of the backward: one for each tile of TILE elements of a row."""
    return tokens * code_tiles(vocab + (15 if vocab % 16 else 0))


# Pallas: slots of the shared-memory ring, and the shared memory that the blocks of one SM take
# together. One slot of a float32 pair of tiles is 16 KiB. Between 2 and 6 slots and 70 and 200 KiB
# the forward moves by less than 1 %: 117-118 at vocab 4096, 913-920 at 32768. Rows that are not
# aligned need the warps: at 50257 4 slots take 1473 (bfloat16 761), 2 slots 1505 (836).
PALLAS_STAGES = 4
PALLAS_SMEM_PER_SM = 200 * 1024
PALLAS_MAX_BLOCKS_PER_SM = 8
