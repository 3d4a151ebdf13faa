"""Tile sizes, warps, pipeline stages and splits of every matrix product: functions of shapes, in one place, chosen by reasoning.

What holds for any GPU; `tuning` knows more of some, and may have measured. None of these has been measured so far. What bounds them:
`tl.dot` wants at least 16 rows (and a K step of 32 bytes on 8-bit numbers); registers (255 a thread, 65,536 a multiprocessor); shared
memory of a block (99 KiB on capability 8.6 and 8.9, 163 KiB on 8.0, 227 KiB on 9.0).
"""

from dataclasses import dataclass, replace

MAX_SPLIT_ROWS = 32
"""Up to so many rows a product may be split along K: they are bound by reading the weight, and few programs read slowly."""
WANTED_PROGRAMS = 256
"""Programs that keep a large GPU busy: about two for each of 108 to 142 multiprocessors."""
MAX_SPLITS = 8
MOST_SUM_BYTES = 16 << 20
"""32-bit sums that splits leave between two launches: they should be found in the L2."""
MIN_SPLIT_STEPS = 6
"""K steps that a split keeps at least: fewer than its pipeline is deep would only wait."""
DETERMINISTIC_ROWS = 64
"""Deterministic runs take the tile of this many rows whatever the batch, so that a row's arithmetic never changes."""


@dataclass(frozen=True)
class GemmTile:
    """Output tile rows x cols, reduced `depth` inputs at a time by `splits` programs. row_group: row tiles that share a column of weights
    in L2."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    row_group: int = 8
    splits: int = 1


def group_depth(group_size: int, num_groups: int) -> int:
    """The deepest K step that stays inside one group of weights, 0 when the group size allows none of at least 16."""
    if num_groups == 1:
        return 64
    return next((depth for depth in (64, 32, 16) if group_size % depth == 0), 0)


def split(tile: GemmTile, num_rows: int, out_features: int, in_features: int) -> GemmTile:
    """The tile with as many splits of K as fill the GPU. What they leave between the two launches stays below
    WANTED_PROGRAMS tiles of 32-bit sums: 2 MiB for tiles of 32 x 64."""
    if num_rows > MAX_SPLIT_ROWS:
        return tile
    return spread(tile, num_rows, out_features, in_features, WANTED_PROGRAMS)


def spread(tile: GemmTile, num_rows: int, out_features: int, in_features: int, programs: int) -> GemmTile:
    """The tile with as many splits of K as make up to so many programs, none that is too short or leaves too much between two launches."""
    tiles = -(-num_rows // tile.rows) * -(-out_features // tile.cols)
    steps = -(-in_features // tile.depth)
    most = MOST_SUM_BYTES // max(4 * num_rows * out_features, 1)
    wanted = min(programs // max(tiles, 1), MAX_SPLITS, steps // MIN_SPLIT_STEPS, most)
    return replace(tile, splits=max(wanted, 1))


def wna16_tile(num_rows: int, out_features: int, in_features: int, depth: int, itemsize: int, deterministic: bool) -> GemmTile:
    """Few rows: bound by reading the weight, so tiles that give every thread 16 bytes of 4-bit codes a step, and splits that make many
    programs. Many rows: bound by the tensor cores."""
    rows = DETERMINISTIC_ROWS if deterministic else num_rows
    if itemsize == 4:  # plain float32 multiply-adds: small tiles keep the accumulator in registers
        return split(GemmTile(16 if rows <= 16 else 32, 32, min(depth, 32), 4, 2), rows, out_features, in_features)
    if rows <= 16:
        return split(GemmTile(16, 64 if depth >= 64 else 128, depth, 4, 6), rows, out_features, in_features)
    if rows <= 32:
        return split(GemmTile(32, 64 if depth >= 64 else 128, depth, 4, 5), rows, out_features, in_features)
    if rows <= 64:
        return GemmTile(64, 64, depth, 4, 3)
    return GemmTile(128, 128, min(depth, 32), 8, 3)


def bytes_tile(num_rows: int, out_features: int, in_features: int, depth: int = 128, deterministic: bool = False) -> GemmTile:
    """8-bit numbers on both sides: a line of 128 bytes of each row a step, half of it where the tile is large. depth: the largest step.
    deterministic: for sums that are rounded; those of integers are the same in every tile."""
    rows = DETERMINISTIC_ROWS if deterministic else num_rows
    if rows <= 16:
        return split(GemmTile(16, 64, depth, 4, 4), rows, out_features, in_features)
    if rows <= 32:
        return split(GemmTile(32, 64, depth, 4, 4), rows, out_features, in_features)
    if rows <= 64:
        return GemmTile(64, 64, depth, 4, 4)
    return GemmTile(128, 128, min(depth, 64), 8, 4)
