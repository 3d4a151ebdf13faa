"""Threads sleep between loops while other programs want the cores, and spin again when they do not."""

import threading
from pathlib import Path

import pytest

from dspark.kernels.cpu.threads import start_pools
from dspark.runtime.execution.spinning import CALM_S, LONGEST_CALM_S, WINDOW_S, PoolHolders, SpinGovernor, core_wait_s, governor_for


class Holders:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.held: list[bool] = []

    def hold(self) -> None:
        self.held.append(True)

    def release(self) -> None:
        self.held.append(False)


class World:
    """A clock and a scheduler's account that a test moves."""

    def __init__(self, threads: int = 2) -> None:
        self.now, self.waited, self.threads = 0.0, 0.0, threads
        self.holders = Holders()
        self.governor = SpinGovernor(self.holders, threads, lambda: self.waited, lambda: self.now)  # type: ignore[arg-type]

    def run(self, seconds: float, share: float) -> None:
        """Steps of 10 ms in which each thread waits `share` of its time."""
        for _ in range(round(seconds / 0.01)):
            self.now += 0.01
            self.waited += 0.01 * share * self.threads
            self.governor.observe()


def test_a_crowd_makes_threads_sleep_and_calm_wakes_them() -> None:
    world = World()
    world.run(3, 0.01)
    assert world.holders.held == []
    world.run(2 * WINDOW_S, 0.4)
    assert world.holders.held == [True] and world.governor.sleeping
    world.run(CALM_S - 1, 0.01)
    assert world.governor.sleeping
    world.run(3, 0.01)
    assert world.holders.held == [True, False] and not world.governor.sleeping
    assert world.governor.metrics()["core_wait_share_max"] == pytest.approx(0.4, abs=0.02)


def test_a_short_calm_is_not_believed() -> None:
    world = World()
    for _ in range(10):
        world.run(CALM_S / 2, 0.3)
        world.run(CALM_S / 2, 0.0)
    assert world.holders.held == [True]


def test_waking_too_early_makes_the_next_sleep_longer() -> None:
    """A neighbour that comes back whenever threads spin costs a window each time: ever more seldom."""
    world = World()
    calm: list[float] = []
    for _ in range(7):
        world.run(2 * WINDOW_S, 0.4)
        assert world.governor.sleeping
        began = world.now
        while world.governor.sleeping:
            world.run(WINDOW_S, 0.0)
        calm.append(world.now - began)
    rounded = [round(seconds / 4) for seconds in calm]
    assert calm[0] == pytest.approx(CALM_S, abs=2) and rounded == sorted(rounded)
    assert calm[-1] == pytest.approx(LONGEST_CALM_S, abs=2)


def test_without_the_systems_account_nothing_is_switched() -> None:
    holders = Holders()
    now = [0.0]
    governor = SpinGovernor(holders, 2, lambda: None, lambda: now[0])  # type: ignore[arg-type]
    for _ in range(100):
        now[0] += 1.0
        governor.observe()
    assert holders.held == [] and governor.metrics()["core_wait_share_max"] is None


@pytest.mark.parametrize(("threads", "cores", "count"), [(1, 2, 0), (2, 2, 1), (2, 4, 3), (4, 4, 1), (8, 16, 2), (3, 8, 3)])
def test_holders_make_threads_outnumber_cores(threads: int, cores: int, count: int) -> None:
    """GNU OpenMP compares 1 + the additional threads of every pool with the cores."""
    holders = PoolHolders(threads, cores, lambda _: None)
    assert holders.count == count
    if count:
        managed = 1 + (count + 1) * (threads - 1)
        assert managed > cores >= managed - (threads - 1)


def test_holders_start_their_pools_and_end() -> None:
    before = threading.active_count()
    holders = PoolHolders(2, 4, start_pools)
    holders.hold()
    assert threading.active_count() == before + holders.count
    holders.release()
    assert threading.active_count() == before
    holders.hold()
    holders.release()
    assert threading.active_count() == before


def test_the_systems_account_is_summed_over_threads(tmp_path: Path) -> None:
    for task, line in (("11", "5000 2000000000 7\n"), ("12", "1 500000000 1\n")):
        (tmp_path / task).mkdir()
        (tmp_path / task / "schedstat").write_text(line)
    (tmp_path / "13").mkdir()  # ended between listing and reading
    assert core_wait_s(tmp_path) == 2.5
    assert core_wait_s(tmp_path / "none") is None


def test_no_governor_where_threads_never_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert governor_for(2, 2, start_pools) is None
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    assert governor_for(2, 2, start_pools) is None
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    assert governor_for(1, 2, start_pools) is None
    governor = governor_for(2, 2, start_pools)
    assert governor is not None and not governor.sleeping
