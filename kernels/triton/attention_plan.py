"""How one attention step is launched: which kernel, which tile, and whether contexts are shared among programs.

Everything here follows from integers that the host knows (shapes, the longest query and context, the number of multiprocessors): choosing
waits for no device. Chosen by reasoning, not measured on a GPU so far.
"""

from dataclasses import dataclass

from dspark.kernels.batch import MAX_TREE_NODES
from dspark.kernels.triton import tiles

PROGRAMS_PER_MULTIPROCESSOR = 2
"""How many programs should be there before a context is worth sharing: two of 128 threads hide each other's waits."""
LEAST_SPLIT_KEYS = 256
"""Fewer keys for a program would not pay for writing and reading its part."""
MOST_SPLIT_KEYS = 4096
"""No program reads more keys, lest one long sequence among many short ones be waited for."""
MOST_PART_BYTES = 64 << 20
"""Parts of one launch; they are float32 and live until the merge."""
DETERMINISTIC_CHUNK = 512
"""Keys of a part in deterministic runs, whatever the batch."""


@dataclass(frozen=True)
class AttentionShape:
    """What a plan follows from. max_query_len, max_context_len: of the batch's sequences; block_d: head_dim as a power of two; cache: what
    the pages hold ("number", "int8" or "fp8")."""

    num_tokens: int
    num_sequences: int
    max_query_len: int
    max_context_len: int
    num_kv_heads: int
    group: int
    block_d: int
    itemsize: int
    cache: str
    window: int | None
    has_tree: bool
    multiprocessors: int

    @property
    def coded(self) -> bool:
        """Whether the cache is an 8-bit one."""
        return self.cache != "number"


@dataclass(frozen=True)
class AttentionPlan:
    """decode: the decode kernel, else the prefill kernel. query_tiles: of the longest sequence. split_keys: keys for a program, 0 for all.
    num_splits: programs that share the longest context. chunk, path, fused: see `attention_kernels`; fused is whether the compiler may fuse
    additions with multiplications as it likes."""

    decode: bool
    tile: tiles.AttentionTile
    query_tiles: int
    split_keys: int = 0
    num_splits: int = 1
    chunk: int = 0
    path: bool = False
    fused: bool = True


def plan(shape: AttentionShape, split_keys: int | None = None, tile: tiles.AttentionTile | None = None) -> AttentionPlan:
    """The fastest form. tile, split_keys: instead of the reasoned tile and of what `choose_split` says (a multiple of the key tile)."""
    decode = shape.max_query_len <= 1
    tile = reasoned_tile(shape) if tile is None else tile
    queries = 1 if decode else tile.rows // shape.group
    query_tiles = -(-shape.max_query_len // queries)
    keys = _most_keys(shape, queries, tile.keys)
    chosen = choose_split(shape, query_tiles, keys, tile.keys) if split_keys is None else split_keys
    return AttentionPlan(decode, tile, query_tiles, chosen, _num_splits(shape, keys, chosen))


def reasoned_tile(shape: AttentionShape) -> tiles.AttentionTile:
    """The tile of a step's kernel, by its shape alone."""
    if shape.max_query_len <= 1:
        return tiles.decode_tile(shape.group, shape.block_d, shape.itemsize)
    return tiles.prefill_tile(shape.max_query_len, shape.group, shape.block_d, shape.itemsize, shape.coded)


def can_split(shape: AttentionShape, tile: tiles.AttentionTile, split_keys: int) -> bool:
    """Whether a step may share its contexts so (0: not at all): no program reads too much, and parts have a bounded size."""
    if shape.max_query_len > 1 and tile.rows < shape.group:
        return False
    keys = _most_keys(shape, 1 if shape.max_query_len <= 1 else tile.rows // shape.group, tile.keys)
    if not split_keys:
        return keys <= MOST_SPLIT_KEYS
    return split_keys % tile.keys == 0 and _part_bytes(shape, _num_splits(shape, keys, split_keys)) <= MOST_PART_BYTES


def deterministic_plan(shape: AttentionShape, share: bool | None = None, chunk: int = DETERMINISTIC_CHUNK) -> AttentionPlan:
    """The form in which a row's bits depend on its own keys alone: one tile for every step, parts of a fixed size.

    Whether programs share a context (share: None leaves it to `choose_split`) changes no bit, so that may depend on the batch.
    A step with draft trees does not share. chunk: keys of a part, a multiple of the key tile; one for all steps (tests take short ones).
    """
    tile = deterministic_tile(shape.group, shape.block_d, shape.itemsize, shape.coded)
    queries = tile.rows // shape.group
    query_tiles = -(-shape.max_query_len // queries)
    form = AttentionPlan(False, tile, query_tiles, chunk=chunk, fused=False)
    if shape.has_tree:
        nodes = min(shape.max_query_len, MAX_TREE_NODES)
        return AttentionPlan(False, tile, query_tiles + nodes, chunk=chunk, path=True, fused=False)
    keys = _most_keys(shape, queries, tile.keys)
    if share is None:
        share = choose_split(shape, query_tiles, keys, tile.keys) > 0
    num_splits = _num_splits(shape, keys, chunk)
    if not share or num_splits < 2 or _part_bytes(shape, num_splits) > MOST_PART_BYTES:
        return form
    return AttentionPlan(False, tile, query_tiles, chunk, num_splits, fused=False)


def deterministic_tile(group: int, block_d: int, itemsize: int, coded: bool) -> tiles.AttentionTile:
    """The one tile of deterministic runs: enough rows for prefill, not too many for decode, which stays bound by reading K and V."""
    if itemsize == 4:
        return tiles.decode_tile(group, block_d, itemsize)
    rows = max(64 if block_d <= 128 else 32, tiles.next_power_of_two(group))
    keys = 64 if block_d <= (64 if coded else 128) else 32
    return tiles.AttentionTile(rows, keys, 8, 2)  # 4 warps would spill: they hold two sums of all rows


def choose_split(shape: AttentionShape, query_tiles: int, keys: int, key_tile: int) -> int:
    """Keys for a program, a multiple of key_tile; 0 where sharing a context of up to `keys` keys brings nothing."""
    programs = query_tiles * shape.num_kv_heads * shape.num_sequences
    wanted = PROGRAMS_PER_MULTIPROCESSOR * shape.multiprocessors // max(programs, 1)
    wanted = max(min(wanted, keys // LEAST_SPLIT_KEYS), -(-keys // MOST_SPLIT_KEYS))
    wanted = min(wanted, MOST_PART_BYTES // max(_part_bytes(shape, 1), 1))
    if wanted < 2:
        return 0
    return -(-keys // (wanted * key_tile)) * key_tile


def _most_keys(shape: AttentionShape, queries: int, key_tile: int) -> int:
    """Most keys that one tile of queries reads."""
    if not shape.window:
        return shape.max_context_len
    return min(shape.max_context_len, shape.window + queries + key_tile + (MAX_TREE_NODES if shape.has_tree else 0))


def _num_splits(shape: AttentionShape, keys: int, split_keys: int) -> int:
    """Programs that share one tile's keys; those of a window may begin anywhere in their first split."""
    if not split_keys:
        return 1
    return min(-(-keys // split_keys) + (1 if shape.window else 0), -(-shape.max_context_len // split_keys))


def _part_bytes(shape: AttentionShape, num_splits: int) -> int:
    return num_splits * shape.num_tokens * shape.num_kv_heads * shape.group * (shape.block_d + 2) * 4
