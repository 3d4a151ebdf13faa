"""How OpenMP's threads wait, by whether another job wants the cores.

A thread that spins between two loops is awake for the next one: on idle cores a step is up to a third faster. Where another program
shares the cores, spinning spends the share that the scheduler grants, and the loops then wait for a descheduled thread: a job runs at a
third of its speed or much less. GNU OpenMP reads its settings once, but it spins next to nothing while more of its threads exist than the
process has cores (`gomp_managed_threads` in libgomp's config/linux/wait.h). So a few threads that hold sleeping pools of their own switch
spinning off, and their end switches it on again. What says that the cores are shared is the time for which this process's runnable threads
waited for one (/proc/PID/schedstat, Linux: Documentation/scheduler/sched-stats.rst).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from dspark.runtime.spec.openmp import threads_spin

WINDOW_S = 0.5
"""Time over which waiting is looked at."""
CROWDED = 0.2
"""Threads that waited so much of their time for a core have company: a third is what one other busy thread on two cores takes, a half means
that two threads stand on one core."""
CALM = 0.05
"""Below this share they have none. Sleeping threads wait a little for a core on an idle machine too."""
CALM_S, LONGEST_CALM_S = 5.0, 60.0
"""How long it must be calm before threads spin again; doubled each time when that was too early."""
MOST_HOLDERS = 16


def core_wait_s(task_dir: Path = Path("/proc/self/task")) -> float | None:
    """Seconds that this process's runnable threads have waited for a core since they began; None where the system does not tell."""
    total = 0
    try:
        for task in task_dir.iterdir():
            try:
                total += int((task / "schedstat").read_text().split()[1])
            except (ProcessLookupError, FileNotFoundError):  # the thread has ended meanwhile
                continue
    except (OSError, ValueError, IndexError):
        return None
    return total / 1e9


class PoolHolders:
    """Threads that do nothing but hold OpenMP pools of `threads` threads each, as many as make OpenMP's threads outnumber the cores."""

    def __init__(self, threads: int, cores: int, start_pools: Callable[[int], None]) -> None:
        self._threads, self._start_pools = threads, start_pools
        # the engine's own pool counts threads - 1 beside the process's first thread, and so does each holder's
        self.count = -(-(cores + 1 - threads) // (threads - 1)) if threads > 1 else 0
        self._let_go = threading.Event()
        self._holders: list[threading.Thread] = []

    @property
    def possible(self) -> bool:
        """Whether holding can change anything: a single thread waits for nobody."""
        return 0 < self.count <= MOST_HOLDERS

    def hold(self) -> None:
        self._let_go = threading.Event()
        for _ in range(self.count):
            ready = threading.Event()
            holder = threading.Thread(target=self._run, args=(ready, self._let_go), name="openmp-holder", daemon=True)
            holder.start()
            ready.wait()
            self._holders.append(holder)

    def release(self) -> None:
        self._let_go.set()
        for holder in self._holders:
            holder.join()
        self._holders.clear()

    def _run(self, ready: threading.Event, let_go: threading.Event) -> None:
        try:
            self._start_pools(self._threads)
        finally:
            ready.set()
        let_go.wait()


class SpinGovernor:
    """Switches spinning off while the cores are crowded. observe() is called once a step and looks twice a second."""

    def __init__(
        self,
        holders: PoolHolders,
        threads: int,
        read_wait_s: Callable[[], float | None] = core_wait_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holders, self._threads, self._read, self._clock = holders, threads, read_wait_s, clock
        self._since = clock()
        self._waited = read_wait_s()
        self._calm_since: float | None = None
        self._calm_s = CALM_S
        self._spun_since = self._since
        self.sleeping = False
        self.switches = 0
        self.sleeping_s = 0.0
        self.longest_wait_share: float | None = None

    def observe(self) -> None:
        """Look at the time since the last look, if that is long enough ago, and switch."""
        now = self._clock()
        elapsed = now - self._since
        if self._waited is None or elapsed < WINDOW_S:
            return
        waited = self._read()
        if waited is None:
            self._waited = None
            return
        share = max(0.0, waited - self._waited) / (elapsed * self._threads)
        self.longest_wait_share = max(self.longest_wait_share or 0.0, share)
        if self.sleeping:
            self.sleeping_s += elapsed
            self._sleep_on(share, now)
        elif share > CROWDED:
            self._calm_s = min(2 * self._calm_s, LONGEST_CALM_S) if self.switches and now - self._spun_since < self._calm_s else CALM_S
            self._switch(True)
        self._since, self._waited = now, waited

    def close(self) -> None:
        """Let the holders end."""
        if self.sleeping:
            self._switch(False)

    def metrics(self) -> dict[str, float | int | None]:
        """core_wait_share_max: of a thread's time, the most that it waited for a core in half a second; None where nobody knows."""
        return {"core_wait_share_max": self.longest_wait_share, "sleeping_threads_s": self.sleeping_s, "wait_switches": self.switches}

    def _sleep_on(self, share: float, now: float) -> None:
        if share > CALM:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        elif now - self._calm_since >= self._calm_s:
            self._switch(False)
            self._spun_since = now

    def _switch(self, sleep: bool) -> None:
        (self._holders.hold if sleep else self._holders.release)()
        self.sleeping, self._calm_since = sleep, None
        self.switches += 1


def governor_for(threads: int, cores: int, start_pools: Callable[[int], None]) -> SpinGovernor | None:
    """The governor of this process's threads; None where they never spin, or a single one waits for nobody."""
    holders = PoolHolders(threads, cores, start_pools)
    return SpinGovernor(holders, threads) if holders.possible and threads_spin() else None
