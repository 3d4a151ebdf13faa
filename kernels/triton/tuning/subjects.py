"""What of a loaded model is tuned: its products by rows, and its attention by sequences, queries and contexts, what matters most first.

Products run on the model's own weights, those of one layer after the other, so that none is found in the cache. Attention runs on random
pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dspark.kernels.batch import AttentionBatch
from dspark.kernels.facts import KernelFacts
from dspark.kernels.kv_cache import KVScales
from dspark.kernels.triton import attention, attention_plan
from dspark.kernels.triton.tuning.book import TileBook
from dspark.kernels.triton.tuning.candidates import attention_candidates, product_candidates
from dspark.kernels.triton.tuning.choices import AttentionChoice
from dspark.kernels.triton.tuning.clock import COLD_CACHES
from dspark.kernels.triton.tuning.keys import (
    CONTEXT_BUCKETS,
    QUERY_BUCKETS,
    ROW_BUCKETS,
    SEQUENCE_BUCKETS,
    ProductKind,
    attention_kind,
    bucket,
    product_key,
)
from dspark.kernels.triton.tuning.limits import DeviceLimits
from dspark.kernels.triton.tuning.tuner import Bench, Subject

MOST_SETS = 64
MOST_PAGE_BYTES = 4 << 30
_VERIFY_QUERIES = 8


@dataclass(frozen=True)
class Load:
    """What a run does: most sequences of a step, most tokens of a step, longest sequence."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True)
class AttentionUse:
    """What layers of a model ask of attention besides their heads."""

    scale: float
    window: int | None
    softcap: float


def subjects_of(book: TileBook, facts: KernelFacts, uses: Sequence[AttentionUse], load: Load, device: str) -> list[Subject]:
    """All that a run of such a load would look up, in the order in which it is worth measuring: steps of all sequences, then of whole
    prompts, then of one sequence, then what is between. Products of each kind take turns with attention. Empty without a device to tune
    for. Deterministic runs have only products whose sums are exact."""
    if book.limits is None:
        return []
    products = [
        [product_subject(book, kind, owners, rows) for kind, owners in _heaviest_first(book.owners()) if not kind.fixed]
        for rows in rows_by_value(load)
    ]
    steps: list[list[Subject]] = [[] for _ in products]
    if not facts.deterministic:
        found = [[attention_subject(book, facts, use, *step, load, device) for use in uses] for step in steps_by_value(load)]
        steps = found + [[] for _ in products[len(found) :]]
        products += [[] for _ in found[len(products) :]]
    ordered = [subject for pair in zip(products, steps, strict=True) for subjects in pair for subject in subjects]
    return list({subject.key: subject for subject in reversed(ordered)}.values())[::-1]


def rows_by_value(load: Load) -> list[int]:
    """Rows to measure products at."""
    most = max(load.max_num_seqs, load.max_num_batched_tokens)
    wanted = [load.max_num_seqs, load.max_num_batched_tokens, 1]
    return list(dict.fromkeys(bucket(rows, ROW_BUCKETS) for rows in (*wanted, *reversed(ROW_BUCKETS)) if rows <= most))


def steps_by_value(load: Load) -> list[tuple[int, int, int]]:
    """(sequences, queries of the longest, context of the longest) to measure attention at."""
    most = load.max_num_seqs
    prefill = min(load.max_num_batched_tokens, load.max_model_len, QUERY_BUCKETS[-1])
    contexts = [context for context in CONTEXT_BUCKETS if context < load.max_model_len] + [load.max_model_len]
    usual = contexts[min(1, len(contexts) - 1)]
    found = [(most, 1, usual), (most, prefill, usual), (1, 1, usual), (1, prefill, usual)]
    found += [(sequences, 1, context) for context in contexts for sequences in (*SEQUENCE_BUCKETS, most) if sequences <= most]
    found += [(sequences, _VERIFY_QUERIES, context) for context in contexts for sequences in (1, most)]
    found += [(sequences, prefill, context) for context in contexts for sequences in (1, most)]
    return list(dict.fromkeys(step for step in found if step[1] <= step[2]))


def _heaviest_first(owners: dict[ProductKind, list[Any]]) -> Iterator[tuple[ProductKind, list[Any]]]:
    return iter(sorted(owners.items(), key=lambda item: -sum(owner.weight_bytes for owner in item[1])))


def product_subject(book: TileBook, kind: ProductKind, owners: Sequence[Any], num_rows: int) -> Subject:
    """A kind of product at a number of rows, on weights that are there."""
    limits = book.limits
    assert limits is not None

    def prepare() -> Bench:
        inputs, own = owners[0].sample(num_rows), owners[:MOST_SETS]
        return Bench(lambda tile, turn: own[turn % len(own)].multiply(inputs, tile), len(own), sum(owner.weight_bytes for owner in own))

    candidates = partial(product_candidates, kind, num_rows, limits)
    return Subject(product_key(kind, num_rows), book.untuned_product(kind, num_rows)[0], candidates, prepare, kind.exact)


def attention_subject(
    book: TileBook, facts: KernelFacts, use: AttentionUse, sequences: int, queries: int, context: int, load: Load, device: str
) -> Subject:
    """A step of so many sequences with contexts of one length: as many as the step's tokens allow have so many queries, the others one."""
    limits = book.limits
    assert limits is not None
    longest = min(sequences, max(load.max_num_batched_tokens // queries, 1))
    counts = [queries] * longest + [1] * (sequences - longest)
    shape = attention_plan.AttentionShape(
        num_tokens=sum(counts),
        num_sequences=sequences,
        max_query_len=queries,
        max_context_len=context,
        num_kv_heads=facts.num_kv_heads,
        group=facts.query_group,
        block_d=attention.block_of(facts.head_dim),
        itemsize=facts.dtype.itemsize,
        cache={torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(facts.kv_dtype, "number"),
        window=use.window,
        has_tree=False,
        multiprocessors=limits.multiprocessors,
    )
    plan = book.untuned_attention(shape)[0]
    prepare = partial(_attention_bench, facts, use, shape, counts, limits, device)
    candidates: Callable[[AttentionChoice], Sequence[AttentionChoice]] = partial(attention_candidates, shape, limits)
    return Subject(str(attention_kind(shape)), AttentionChoice(plan.tile, plan.split_keys), candidates, prepare)


def _attention_bench(
    facts: KernelFacts, use: AttentionUse, shape: attention_plan.AttentionShape, counts: list[int], limits: DeviceLimits, device: str
) -> Bench:
    """Random queries and pages, the pages of a step in random order; enough of them that no turn finds its own in the cache. Raises
    MemoryError where one step has more than may be taken for it."""
    size = facts.block_size
    blocks = -(-shape.max_context_len // size) * shape.num_sequences
    block_bytes = 2 * facts.num_kv_heads * size * facts.head_dim * facts.kv_dtype.itemsize
    most = _page_bytes(device) // block_bytes
    if blocks > most:
        raise MemoryError(f"pages of {blocks * block_bytes} bytes are more than may be taken for measuring")
    sets = max(min(-(-COLD_CACHES * limits.cache_bytes // (blocks * block_bytes)), most // blocks, MOST_SETS), 1)
    pages = [_random((sets * blocks, facts.num_kv_heads, size, facts.head_dim), facts.kv_dtype, device) for _ in range(2)]
    scales = None
    if shape.coded:
        scales = KVScales(*(torch.full((facts.num_kv_heads, facts.head_dim), 0.02, device=device) for _ in range(2)))
    q = _random((sum(counts), facts.num_heads, facts.head_dim), facts.dtype, device)
    order = torch.randperm(sets * blocks, device=device).int().view(sets, shape.num_sequences, -1)
    batches = [_batch(order[turn], counts, shape.max_context_len, size) for turn in range(sets)]

    def run(choice: AttentionChoice, turn: int) -> torch.Tensor:
        plan = attention_plan.plan(shape, choice.split_keys, choice.tile)
        return attention.run(plan, q, pages[0], pages[1], batches[turn % sets], use.scale, use.window, use.softcap, scales)

    return Bench(run, sets, sets * blocks * block_bytes)


def _page_bytes(device: str) -> int:
    """Most bytes of pages: a part of what is free, since the pool of the run is not laid out yet."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else 1 << 28
    return min(free // 3, MOST_PAGE_BYTES)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.empty(shape, dtype=dtype, device=device).normal_()
    codes = torch.randint(-100, 101, shape, dtype=torch.int8, device=device)  # as float8 bits: finite numbers of all sizes
    return codes if dtype == torch.int8 else codes.view(dtype)


def _batch(tables: torch.Tensor, counts: list[int], context: int, block_size: int) -> AttentionBatch:
    """tables int32 [S, blocks]; counts: query tokens of each sequence, at the end of its context."""
    device = tables.device
    number = torch.tensor(counts, device=device)
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=device)
    starts[1:] = number.cumsum(0)
    positions = torch.cat([torch.arange(context - count, context, device=device) for count in counts])
    rows = torch.repeat_interleave(torch.arange(len(counts), device=device), number)
    slots = tables.long()[rows, positions // block_size] * block_size + positions % block_size
    lengths = torch.full((len(counts),), context, dtype=torch.int32, device=device)
    return AttentionBatch(starts, lengths, tables.contiguous(), slots, positions, max(counts), context)
