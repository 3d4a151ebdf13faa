"""Where a tile comes from: measured here, else shipped for the kind of GPU, else by shape alone; and what measurements never touch."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark.kernels.dispatch import select
from dspark.kernels.facts import KernelFacts
from dspark.kernels.fp8 import Fp8Weight
from dspark.kernels.int8 import Int8Weight
from dspark.kernels.triton import attention, attention_plan, fp8, gemm_tiles, int8, wna16
from dspark.kernels.triton import launch as launcher
from dspark.kernels.triton.gemm_tiles import GemmTile
from dspark.kernels.triton.int8 import int8_kind
from dspark.kernels.triton.tiles import AttentionTile
from dspark.kernels.triton.tuning.book import TileBook, book_of
from dspark.kernels.triton.tuning.choices import AttentionChoice, Tuned
from dspark.kernels.triton.tuning.keys import ProductKind, attention_kind, bucket, product_key
from dspark.kernels.triton.tuning.limits import CARDS
from dspark.kernels.triton.tuning.tables import table_for
from dspark.kernels.wna16 import Wna16Weight

H100 = CARDS["h100"]
WNA16 = ProductKind("wna16", "4 bits, groups of 128", 4096, 14336, "bfloat16", 2, 4, 64, 128)
TILE = GemmTile(16, 128, 128, 4, 4, splits=4)


def entry(choice: Any) -> Tuned:
    return Tuned(choice, 1e-5, 2e-5, 10, {})


def shape(**changes: Any) -> attention_plan.AttentionShape:
    base: dict[str, Any] = {"num_sequences": 64, "max_query_len": 1, "max_context_len": 2000, "num_kv_heads": 8, "group": 4, "block_d": 128}
    base |= {"itemsize": 2, "cache": "number", "window": None, "has_tree": False, "multiprocessors": 132} | changes
    return attention_plan.AttentionShape(**{"num_tokens": base["num_sequences"] * base["max_query_len"], **base})


def book_with(*entries: tuple[str, Any]) -> TileBook:
    return TileBook(H100, table_for(H100), {key: entry(choice) for key, choice in entries})


def test_measured_before_shipped_before_reasoned() -> None:
    book = book_with((product_key(WNA16, 8), TILE))
    tiles = book.products(WNA16)
    assert tiles[8] == tiles[5] == TILE
    assert tiles[16] == gemm_tiles.spread(GemmTile(16, 128, 64, 4, 6), 16, 4096, 14336, 2 * 132)
    small = replace(WNA16, storage="4 bits, groups of 32", depth=32, step=32)  # no rule speaks of such groups
    assert book.products(small)[16] == gemm_tiles.wna16_tile(16, 4096, 14336, 32, 2, False)
    assert book.counts() == {"wna16": {"tuned": 1, "shipped": 1, "reasoned": 1}}


def test_a_launch_pays_for_one_look_into_a_dictionary() -> None:
    book, asked = TileBook(H100), []
    tiles = book.products(WNA16)
    tiles._choose = lambda kind, rows: asked.append(rows) or TILE  # type: ignore[assignment,func-returns-value]
    assert [tiles[7] for _ in range(5)] == [TILE] * 5 and asked == [7]
    step = shape()
    assert book.attention(step) is book.attention(shape())


def test_without_a_device_tiles_are_those_of_the_shape_alone() -> None:
    book = TileBook(tuned={product_key(WNA16, 1): entry(TILE)})
    for rows in (0, 1, 16, 33, 64, 100, 2048, 5000):
        assert book.products(WNA16)[rows] == gemm_tiles.wna16_tile(rows, 4096, 14336, 64, 2, False)
    assert book.attention(shape()) == attention_plan.plan(shape())


def test_deterministic_runs_keep_their_tile_but_for_exact_sums() -> None:
    """Else a row's bits would depend on what a tuner has found."""
    fixed, int8 = replace(WNA16, fixed=True), int8_kind(4096, 14336, torch.bfloat16)
    entries = [(product_key(kind, rows), TILE) for kind in (fixed, int8) for rows in (1, 64, 2048)]
    book = book_with(*entries)
    assert {book.products(fixed)[rows] for rows in (1, 64, 2000)} == {gemm_tiles.wna16_tile(64, 4096, 14336, 64, 2, True)}
    assert book.products(int8)[1] == TILE
    facts = KernelFacts("cuda", torch.bfloat16, 128, 32, 8, 16, deterministic=True, tiles=book)
    assert attention.form("paged_attention", facts) is attention.deterministic_paged_attention


def test_attention_takes_what_was_measured() -> None:
    tile = AttentionTile(16, 128, 8, 2)
    book = book_with((str(attention_kind(shape())), AttentionChoice(tile, 512)))
    plan = book.attention(shape())
    assert plan.tile == tile and plan.split_keys == 512 and plan.num_splits == 4
    assert book.attention(shape(max_context_len=1500)).num_splits == 3, "the same bucket of contexts"
    assert book.attention(shape(has_tree=True)).tile != tile, "trees are not measured"
    assert book.counts()["paged_attention"] == {"tuned": 1, "shipped": 0, "reasoned": 1}


def test_a_split_that_does_not_fit_a_step_is_chosen_by_its_shape() -> None:
    """Measured in a bucket without a longest context: no program is to read a hundred thousand keys, and parts have a bounded size."""
    long, tile = shape(num_sequences=1, max_context_len=1_000_000), AttentionTile(16, 64, 4, 3)
    for split_keys in (0, 64):
        book = book_with((str(attention_kind(long)), AttentionChoice(tile, split_keys)))
        assert book.attention(long).split_keys not in (0, 64) and book.counts()["paged_attention"]["tuned"] == 1


@pytest.mark.parametrize(
    "choice",
    [
        replace(TILE, rows=24),
        replace(TILE, depth=256),
        replace(TILE, splits=0),
        replace(TILE, splits=64),
        replace(TILE, stages=0),
        GemmTile(128, 256, 128, 4, 4),
        AttentionChoice(AttentionTile(16, 64, 4, 3)),
    ],
    ids=str,
)
def test_a_tile_that_cannot_be_launched_is_refused(choice: Any) -> None:
    """A cache file may be edited or be wrong: its tiles are held against the rules before they are launched."""
    key = product_key(WNA16, 1)
    book = book_with((key, choice))
    assert book.products(WNA16)[1] == book.untuned_product(WNA16, 1)[0] and book.refused[key]
    assert book.metrics()["refused"].keys() == {key}


@pytest.mark.parametrize(
    "choice",
    [
        TILE,
        AttentionChoice(AttentionTile(2, 64, 4, 3)),
        AttentionChoice(AttentionTile(16, 64, 4, 3), 100),
        AttentionChoice(AttentionTile(128, 256, 4, 4)),
    ],
    ids=str,
)
def test_attention_refuses_too(choice: Any) -> None:
    key = str(attention_kind(shape()))
    book = book_with((key, choice))
    plan = book.attention(shape())
    assert plan.tile != getattr(choice, "tile", None) or plan.split_keys != choice.split_keys
    assert not isinstance(choice, GemmTile) or book.refused


def test_what_is_learnt_is_taken_from_then_on() -> None:
    book = TileBook(H100)
    tiles, step = book.products(WNA16), shape()
    before = tiles[1], book.attention(step)
    attend = AttentionChoice(AttentionTile(16, 32, 4, 3))
    book.learn({product_key(WNA16, 1): entry(TILE), str(attention_kind(step)): entry(attend)})
    assert before[0] != tiles[1] == TILE and before[1].tile != book.attention(step).tile == attend.tile


def test_a_linear_is_not_kept_alive_by_its_book() -> None:
    """Calibration builds and drops one layer after the other."""

    class Linear:
        weight_bytes = 1

    book, linear = TileBook(H100), Linear()
    book.products(WNA16, linear)  # type: ignore[arg-type]
    assert book.owners() == {WNA16: [linear]}
    del linear
    gc.collect()
    assert book.owners() == {}


def test_linears_and_attention_ask_the_book_of_their_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the launcher: the tile that is launched is the book's."""
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(launcher, "launch", lambda kernel, grid, *args, **config: launched.append(config))
    monkeypatch.setattr(launcher, "decline", lambda facts: None)
    monkeypatch.setattr(launcher, "capability", lambda facts: (9, 0))
    pytest.importorskip("triton")

    def meta(*shape: int, of: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    book = TileBook(H100)
    facts = KernelFacts("cuda", torch.bfloat16, 64, 4, 2, 16, tiles=book)
    codes, scales = meta(256, 512, of=torch.float8_e4m3fn), meta(256, 1, of=torch.float32)
    linears = [
        wna16.make_wna16_linear(Wna16Weight(meta(64, 256, of=torch.int32), meta(4, 256, of=torch.float16), None, 4, 512), None, facts),
        int8.make_int8_linear(Int8Weight(meta(256, 512, of=torch.int8), meta(256, of=torch.float32)), None, facts),
        *(fp8.make_fp8_linear(Fp8Weight(codes, scales, (1, -1), inputs), None, facts) for inputs in (None, "dynamic")),
    ]
    book.learn({product_key(own, 3): entry(GemmTile(32, 32, 32, 2, 2)) for own in book.owners()})
    for linear in linears:
        launched.clear()
        linear(meta(3, 512, of=torch.bfloat16))
        config = next(config for config in launched if "BLOCK_M" in config)
        assert (config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"], config["num_warps"]) == (32, 32, 32, 2), linear
    assert {own.kernel for own in book.owners()} == {"wna16", "int8", "fp8", "fp8 widened"}
    selected = select("paged_attention", facts, "triton").function
    assert selected.keywords == {"tiles_of_run": book}  # type: ignore[attr-defined]
    assert book_of(replace(facts, tiles=None)).limits is None


def test_buckets_cover_every_count() -> None:
    assert [bucket(count, (1, 8, 64)) for count in (0, 1, 2, 8, 9, 64, 65, 1000)] == [1, 1, 8, 8, 64, 64, 64, 64]
