"""The shipped tables: A100, L40S and Hopper (H100, H200), chosen by reasoning. NONE OF IT IS MEASURED; a rule that was says so.

The reasoning, at a down projection with N = 4,096 outputs and K = 14,336 inputs:

- Bytes under way. Memory with a latency of about 0.7 us is only busy while bandwidth x latency is under way: 13 KB for each multiprocessor
  of an A100 (2.0 TB/s, 108), 4 KB of an L40S (0.86 TB/s, 142), 20 KB of an H100 (3.35 TB/s, 132), 29 KB of an H200 (4.8 TB/s, 132). A
  program has a step of the weight under way in all its stages but one.
- Programs. The reasoned tiles split K up to 32 rows only. With 64 rows and tiles of 64 x 64 an A100 has 64 programs with 4 KB of 4-bit
  codes each under way: a fifth of what it needs; with 128 rows and tiles of 128 x 128 it has 32 programs on 108 multiprocessors. So K is
  split there too. Sums are read back from the L2 (40 to 96 MB).
- x from the L2. Each column of tiles reads all of x. At 32 rows and 64 outputs a tile that is twice the bytes of 4-bit codes, and the L2
  gives about twice what DRAM does: tiles of 128 outputs halve it.
- Tensor cores. Hopper's instruction takes 16 (8-bit: 32) inputs: a K step of 32 (64) is two of them between barriers, one of 64 (128) four.
  Two groups of four warps have 64 rows each. Shared memory allows more keys a step in prefill as well.
"""

from __future__ import annotations

from dspark.kernels.triton.gemm_tiles import GemmTile
from dspark.kernels.triton.tuning.limits import DeviceLimits
from dspark.kernels.triton.tuning.rules import AttentionRule, ProductRule, ShippedTable

_WIDE_X = ("wna16", "fp8 widened")
_CODES = ("int8", "fp8")
_MANY = 1 << 30

A100 = ShippedTable(
    "A100",
    (
        ProductRule(
            ("wna16",), (17, 32), GemmTile(32, 128, 64, 4, 5), 2, "x is read from the L2 half as often; 16 KB of 4-bit codes under way", 4
        ),
        ProductRule(_WIDE_X, (33, 64), GemmTile(64, 128, 64, 8, 3), 2, "K is split, or 32 programs would read the weight; x half as often"),
        ProductRule(_WIDE_X, (65, 256), GemmTile(128, 128, 64, 8, 3), 1, "K is split; 16 bytes a thread, twice as many under way"),
        ProductRule(_CODES, (33, 64), GemmTile(64, 64, 128, 4, 4), 2, "K is split, or 64 programs would read the weight"),
        ProductRule(_CODES, (65, 256), GemmTile(128, 128, 64, 8, 4), 1, "one program for each multiprocessor"),
    ),
)
L40S = ShippedTable(
    "L40S",
    (
        ProductRule(_WIDE_X, (33, 64), GemmTile(64, 128, 64, 8, 3), 2, "K is split; three stages leave room for two programs in 100 KB"),
        ProductRule(_WIDE_X, (65, 256), GemmTile(128, 128, 64, 8, 3), 1, "K is split; 16 bytes a thread, twice as many under way"),
        ProductRule(_CODES, (33, 64), GemmTile(64, 64, 128, 4, 3), 2, "K is split; 16 KB a program under way are plenty for 4 KB wanted"),
        ProductRule(
            _CODES, (65, 256), GemmTile(128, 128, 64, 8, 3), 1, "one program for each multiprocessor; three stages are 72 KB at most"
        ),
    ),
)
HOPPER = ShippedTable(
    "H100, H200",
    (
        ProductRule(("wna16",), (1, 16), GemmTile(16, 128, 64, 4, 6), 2, "40 KB of 4-bit codes under way on each multiprocessor", 4),
        ProductRule(_WIDE_X, (17, 32), GemmTile(32, 128, 64, 4, 5), 2, "x is read from the L2 half as often; 32 KB under way"),
        ProductRule(
            _WIDE_X, (33, 64), GemmTile(64, 128, 64, 8, 4), 2, "K is split; 24 KB of codes under way; eight warps share the widening"
        ),
        ProductRule(_WIDE_X, (65, 256), GemmTile(128, 128, 64, 8, 3), 1, "K is split; four instructions between barriers"),
        ProductRule(_WIDE_X, (257, _MANY), GemmTile(128, 128, 64, 8, 3), 0, "four instructions between barriers instead of two"),
        ProductRule(_CODES, (33, 64), GemmTile(64, 128, 128, 4, 4), 2, "K is split; x half as often; two programs in 227 KB"),
        ProductRule(_CODES, (65, 256), GemmTile(128, 128, 128, 8, 3), 1, "K is split; whole lines of 128 bytes"),
        ProductRule(_CODES, (257, _MANY), GemmTile(128, 128, 128, 8, 3), 0, "whole lines of 128 bytes, four instructions between barriers"),
    ),
    (
        AttentionRule(
            (64, 128), (64, _MANY), ("number",), "half as many rounds of maxima and rescaling; 160 KB of 227 at D = 128", keys=128
        ),
    ),
)
_BY_CAPABILITY = {(8, 0): A100, (8, 9): L40S, (9, 0): HOPPER}
TABLES = (A100, L40S, HOPPER)


def table_for(limits: DeviceLimits) -> ShippedTable | None:
    """The table of a GPU's kind, None where none is shipped. Cards of one capability share it: programs are counted by multiprocessor."""
    return _BY_CAPABILITY.get(limits.capability)
