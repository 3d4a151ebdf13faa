"""What is kept of measurements: whole files, of this GPU, triton and kernels only, and never a reason for a run to fail."""

import json
import logging
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark.kernels.triton.gemm_tiles import GemmTile
from dspark.kernels.triton.tiles import AttentionTile
from dspark.kernels.triton.tuning import cache as cache_module
from dspark.kernels.triton.tuning.book import TileBook
from dspark.kernels.triton.tuning.cache import TileCache, cache_directory, kernel_revision
from dspark.kernels.triton.tuning.choices import AttentionChoice, Tuned
from dspark.kernels.triton.tuning.limits import CARDS
from dspark.kernels.triton.tuning.machine import keep, known_tiles

PRODUCT = Tuned(GemmTile(16, 128, 64, 4, 6, 8, 4), 1.25e-5, 2e-5, 17, {"64 x 64": "would spill"})
ATTENTION = Tuned(AttentionChoice(AttentionTile(16, 64, 4, 3), 256), 3e-5, 3e-5, 4, {})


def cache_in(folder: Path) -> TileCache:
    return TileCache.of(CARDS["h100"], folder)


def test_entries_come_back_as_they_were(tmp_path: Path) -> None:
    cache = cache_in(tmp_path / "new" / "tiles")
    assert cache.load() == ({}, None)
    assert cache.save({"a": PRODUCT, "b": ATTENTION}) is None
    assert cache.load() == ({"a": PRODUCT, "b": ATTENTION}, None)
    assert not [path for path in cache.directory.iterdir() if path.name.startswith(".")], "nothing temporary is left"


def test_a_file_belongs_to_one_gpu_triton_and_state_of_the_kernels(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    others = [
        replace(cache, device="NVIDIA A100"),
        replace(cache, capability=(8, 0)),
        replace(cache, triton="9"),
        replace(cache, kernels="0"),
    ]
    assert len({one.path for one in (cache, *others)}) == 5 and len(kernel_revision()) == 12
    assert cache.path.name == f"NVIDIA-H100-80GB-HBM3-sm90-triton{cache.triton}-{kernel_revision()}.json"
    cache.save({"a": PRODUCT})
    for other in others:
        other.path.write_bytes(cache.path.read_bytes())
        entries, problem = other.load()
        assert entries == {} and problem is not None and "of another device, triton or state of the kernels" in problem


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"format": 99}', b"\x80\x04\x95pickle"])
def test_a_damaged_file_is_ignored_with_one_line_and_written_anew(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_in(tmp_path)
    cache.path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "dspark"):
        book = known_tiles(CARDS["h100"], tmp_path)
    assert len(caplog.records) == 1 and "is ignored" in caplog.text and book.problem in caplog.text and book.tuned == {}
    assert keep(book, {"a": PRODUCT}) is None and known_tiles(CARDS["h100"], tmp_path).tuned == {"a": PRODUCT}


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {"tile": {}},
        {"tile": {"rows": 16}, "us": 1, "untuned_us": 1},
        {"tile": {"rows": "16"}, "us": 1, "untuned_us": 1},
        {"tile": {"rows": 16, "cols": 64, "depth": 64, "warps": 4, "stages": 3, "evil": 1}, "us": 1, "untuned_us": 1},
        {"tile": {"rows": 16, "cols": 64, "depth": 64, "warps": 4, "stages": 3}, "us": "fast", "untuned_us": 1},
    ],
)
def test_odd_entries_are_left_out(tmp_path: Path, entry: Any) -> None:
    cache = cache_in(tmp_path)
    cache.save({"a": PRODUCT})
    document = json.loads(cache.path.read_text())
    document["entries"]["odd"] = entry
    cache.path.write_text(json.dumps(document))
    entries, problem = cache.load()
    assert entries == {"a": PRODUCT} and problem is not None and problem.startswith("1 entries")


def test_a_place_that_cannot_be_written_is_a_reason_and_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    book = TileBook(CARDS["h100"], cache=str(cache_in(tmp_path / "file" / "tiles").path))
    with caplog.at_level(logging.WARNING, "dspark"):
        problem = keep(book, {"a": PRODUCT})
    assert problem is not None and "is not written" in problem and len(caplog.records) == 1
    assert "cannot be read" in (known_tiles(CARDS["h100"], tmp_path / "file" / "tiles").problem or "")


def test_a_lock_that_another_run_holds_is_waited_for_and_then_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "LOCK_TIMEOUT_S", 0.1)
    cache = cache_in(tmp_path)
    with cache_module._locked(cache.path.with_suffix(".lock")):
        assert "another run is writing it" in (cache.save({"a": PRODUCT}) or "")
    assert cache.save({"a": PRODUCT}) is None


def _save_many(folder: Path, name: str) -> None:
    for number in range(20):
        assert cache_in(folder).save({f"{name}{number}": PRODUCT}) is None


def test_runs_that_write_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    workers = [multiprocessing.get_context("fork").Process(target=_save_many, args=(tmp_path, name)) for name in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0] and len(cache_in(tmp_path).load()[0]) == 40


def test_the_place_follows_the_users_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "dspark" / "tiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "dspark" / "tiles"


def test_a_machine_that_lacks_a_package_has_its_table_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU machines that reach no registry run with what is there (`make gpu-check`): no engine may fail for the place of a cache."""
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    book = known_tiles(CARDS["h100"])
    assert book.shipped is not None and book.cache is None and book.problem == "there is no tile cache: platformdirs is not installed"
    assert keep(book, {"a": PRODUCT}) == "there is no cache file"
