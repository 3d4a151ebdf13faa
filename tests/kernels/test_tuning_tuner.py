"""The tuner with a clock that says what a test tells it: what may win, what is declined, and that nothing it meets disturbs a run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_clock import FakeClock, fake_subject

from dspark.kernels.triton.gemm_tiles import GemmTile
from dspark.kernels.triton.tuning.book import TileBook
from dspark.kernels.triton.tuning.choices import Tuned, text
from dspark.kernels.triton.tuning.limits import CARDS
from dspark.kernels.triton.tuning.tuner import LEAST_GAIN, TOLERANCES, tune

TILE = GemmTile(16, 64, 64, 4, 6)
WIDE, DEEP = replace(TILE, cols=128), replace(TILE, stages=8)


def tuned(clock: FakeClock, *subjects: Any, budget: float = 100.0, book: TileBook | None = None, **more: Any) -> Any:
    """The report, and what was saved."""
    saved: dict[str, Tuned] = {}

    def save(entries: dict[str, Tuned]) -> None:
        saved.update(entries)

    report = tune(subjects, book or TileBook(CARDS["h100"]), clock, budget, save, **more)
    assert saved == report.finished
    return report


def test_the_fastest_right_tile_wins() -> None:
    clock = FakeClock({TILE: 1.0, WIDE: 0.8, DEEP: 0.9}.__getitem__)
    book = TileBook(CARDS["h100"])
    report = tuned(clock, fake_subject("key", clock, TILE, [WIDE, DEEP]), book=book)
    entry = report.finished["key"]
    assert (entry.choice, entry.seconds, entry.untuned_seconds, entry.tried, entry.declined) == (WIDE, 0.8, 1.0, 2, {})
    assert book.tuned["key"] == entry and report.num_faster == 1


@pytest.mark.parametrize(("gain", "wins"), [(LEAST_GAIN / 2, False), (2 * LEAST_GAIN, True)])
def test_a_gain_has_to_be_above_noise(gain: float, wins: bool) -> None:
    clock = FakeClock(lambda tile: 1.0 if tile == TILE else 1.0 - gain)
    entry = tuned(clock, fake_subject("key", clock, TILE, [WIDE])).finished["key"]
    assert (entry.choice == WIDE) is wins


def test_a_tile_that_was_lucky_once_does_not_win() -> None:
    """The least of many noisy figures is an accident: it is measured again before it wins."""
    clock = FakeClock()
    clock.cost = lambda tile: 0.5 if tile == WIDE and clock.measured.count(WIDE) == 1 else 1.0
    assert tuned(clock, fake_subject("key", clock, TILE, [WIDE])).finished["key"].choice == TILE


def test_a_wrong_result_never_wins() -> None:
    """A tile that skips work is fast."""
    clock = FakeClock(lambda tile: 1.0 if tile == TILE else 0.1)
    wrong = {WIDE: torch.full((4, 4), 1.1), DEEP: torch.full((4, 4), torch.nan)}
    subject = fake_subject("key", clock, TILE, [WIDE, DEEP], lambda tile: wrong.get(tile, torch.ones(4, 4)))
    entry = tuned(clock, subject).finished["key"]
    assert entry.choice == TILE and entry.declined.keys() == {text(WIDE), text(DEEP)}
    assert all("other results" in reason for reason in entry.declined.values()) and WIDE not in clock.measured


def test_small_results_are_held_to_their_own_size() -> None:
    clock = FakeClock(lambda tile: 1.0 if tile == TILE else 0.1)
    subject = fake_subject("key", clock, TILE, [WIDE], lambda tile: torch.ones(4, 4) * (1e-6 if tile == TILE else 2e-6))
    assert tuned(clock, subject).finished["key"].choice == TILE


def test_exact_sums_have_to_be_equal_to_the_bit() -> None:
    clock = FakeClock(lambda tile: 1.0 if tile == TILE else 0.1)
    other = torch.nextafter(torch.ones(4, 4), torch.tensor(2.0))
    for exact in (True, False):
        subject = fake_subject("key", clock, TILE, [WIDE], lambda tile: torch.ones(4, 4) if tile == TILE else other, exact)
        assert (tuned(clock, subject).finished["key"].choice == WIDE) is not exact


def test_what_cannot_be_launched_is_declined_with_its_reason() -> None:
    def result(tile: GemmTile) -> torch.Tensor:
        if tile == WIDE:
            raise RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448\nmore")
        return torch.ones(4, 4)

    clock = FakeClock(lambda tile: 1.0 if tile == TILE else 0.5)
    report = tuned(clock, fake_subject("key", clock, TILE, [WIDE, DEEP], result))
    entry = report.finished["key"]
    assert entry.choice == DEEP and report.metrics()["declined"] == 1
    assert entry.declined == {text(WIDE): "RuntimeError: out of resource: shared memory, Required: 300000, Hardware limit: 232448"}


def test_an_untuned_tile_that_fails_leaves_the_key_alone() -> None:
    """What cannot be measured for lack of memory, say; others are."""

    def result(tile: GemmTile) -> torch.Tensor:
        raise MemoryError("no room for pages")

    clock, book = FakeClock(), TileBook(CARDS["h100"])
    report = tuned(clock, fake_subject("a", clock, TILE, [WIDE], result), fake_subject("b", clock, TILE, [WIDE]), book=book)
    assert report.failed == {"a": "MemoryError: no room for pages"} and book.tuned.keys() == {"b"}


def test_a_lost_device_ends_the_tuning() -> None:
    clock = FakeClock()

    def result(tile: GemmTile) -> torch.Tensor:
        clock.lost = tile == WIDE
        return torch.ones(4, 4)

    report = tuned(clock, fake_subject("a", clock, TILE, [WIDE], result), fake_subject("b", clock, TILE, []))
    assert (
        report.finished == {} and report.left == 1 and "the device is lost: RuntimeError: an illegal memory" in report.metrics()["stopped"]
    )


def test_what_is_finished_in_time_is_kept_and_the_next_run_goes_on() -> None:
    clock, book = FakeClock(), TileBook(CARDS["h100"])
    subjects = [fake_subject(key, clock, TILE, [WIDE, DEEP]) for key in "abc"]
    first = tuned(clock, *subjects, budget=4.0, book=book)
    assert list(first.finished) == ["a"] and first.left == 2 and first.known == 0
    second = tuned(clock, *subjects, budget=100.0, book=book)
    assert list(second.finished) == ["b", "c"] and (second.left, second.known) == (0, 1)
    assert list(tuned(clock, *subjects, book=book, again=True).finished) == ["a", "b", "c"]


def test_an_interrupt_keeps_what_is_finished() -> None:
    def result(tile: GemmTile) -> torch.Tensor:
        raise KeyboardInterrupt

    clock, saved = FakeClock(), dict[str, Tuned]()
    with pytest.raises(KeyboardInterrupt):
        tune(
            [fake_subject("a", clock, TILE, []), fake_subject("b", clock, TILE, [], result)],
            TileBook(CARDS["h100"]),
            clock,
            100.0,
            lambda entries: saved.update(entries),
        )
    assert saved.keys() == {"a"}


def test_around_the_best_is_searched_once_more() -> None:
    """Two sizes that gain together only when both change."""
    both = replace(WIDE, stages=8)
    clock = FakeClock({TILE: 1.0, WIDE: 0.9, DEEP: 1.1, both: 0.5}.__getitem__)
    subject = replace(
        fake_subject("key", clock, TILE, []), candidates=lambda around: [replace(around, cols=128), replace(around, stages=8)]
    )
    assert tuned(clock, subject).finished["key"].choice == both


def test_the_tolerances_are_those_of_the_tests() -> None:
    """What the tuner lets pass, a test against the reference would."""
    from tolerances import tolerance

    ops = ("paged_attention", "make_wna16_linear", "make_fp8_linear")
    for dtype, allowed in TOLERANCES.items():
        assert all(mine <= max(tolerance(op, dtype)[i] for op in ops) for i, mine in enumerate(allowed))
