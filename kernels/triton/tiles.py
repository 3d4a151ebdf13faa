"""Tile sizes, warps and pipeline stages of attention and elementwise kernels (products: `gemm_tiles`), functions of shapes, by reasoning.

None of these has been measured on a GPU so far. What bounds them: `tl.dot` wants at least 16 rows; registers (255 a thread, 65,536 a
multiprocessor); shared memory of a block (99 KiB on capability 8.6 and 8.9, 163 KiB on 8.0, 227 KiB on 9.0).
"""

from dataclasses import dataclass


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def row_warps(block: int) -> int:
    """Warps for a program that holds one row of `block` float32 values: 8 to 32 values a thread."""
    return min(max(next_power_of_two(block // 512), 1), 16)


ACTIVATION_BLOCK = 1024
COPY_BLOCK = 4096
COPY_SLOTS, COPY_SLOT_DIMS = 64, 64
"""Pairs and dimensions that one program of copy_slots holds in registers, keys and values both."""


def rope_heads(head_block: int, total_heads: int) -> int:
    """Heads that one program of rope_store_kv holds: 2048 values, 16 a thread with 4 warps."""
    return max(1, min(next_power_of_two(total_heads), 2048 // head_block))


@dataclass(frozen=True)
class AttentionTile:
    """rows: query rows (query tokens x query heads of one KV head). keys: keys a loop step takes."""

    rows: int
    keys: int
    warps: int
    stages: int


def _float32_tile(rows: int, head_block: int) -> AttentionTile:
    """float32 has no tensor cores here (full precision is asked for): small tiles, or the plain multiply-adds spill."""
    return AttentionTile(rows, 32 if head_block <= 128 else 16, 8, 1)


def decode_tile(group: int, head_block: int, itemsize: int) -> AttentionTile:
    """One query token a sequence: bound by reading K and V, so many keys in flight and few rows."""
    rows = max(16, next_power_of_two(group))
    if itemsize == 4:
        return _float32_tile(rows, head_block)
    return AttentionTile(rows, 64, 4, 3) if head_block <= 128 else AttentionTile(rows, 32, 4, 2)


def prefill_tile(max_query_len: int, group: int, head_block: int, itemsize: int, coded: bool = False) -> AttentionTile:
    """Several query tokens: rows are query tokens times group, no more than the longest sequence can fill.

    8 warps where the float32 accumulator of 4 would fill the registers (sm_80 spilled at 64 rows x head_dim 128). coded: of an 8-bit cache,
    whose keys are widened in registers on their way: half as many at a time where the accumulator is large (sm_80 spilled at 128 x 128).
    """
    least = max(16, next_power_of_two(group))
    if itemsize == 4:
        return _float32_tile(least, head_block)
    most = 128 if head_block <= 128 else 64
    rows = max(least, min(most, next_power_of_two(max_query_len * group)))
    warps = 8 if rows * head_block >= 64 * 128 else 4
    return AttentionTile(rows, 64 if head_block <= (64 if coded else 128) else 32, warps, 2)
