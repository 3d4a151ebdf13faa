"""How OpenMP's threads wait for each other. To be said before torch is imported, which reads it once."""

import os

SPIN_COUNT = "10000"
"""Turns of a waiting loop, some 0.1 ms: longer than the gap between two operations of a step, so a thread is awake for the next one (waking
it takes 0.05 ms), and short enough that threads which wait for a descheduled one give the core back. GNU OpenMP's own default spins for
milliseconds and collapses where another job shares the cores; sleeping at once costs a fifth of the speed where none does."""


def bound_spinning() -> None:
    """Let waiting threads spin for a bounded while, unless the user has set OpenMP's own variables."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def threads_spin() -> bool:
    """Whether waiting threads spin at all, as far as OpenMP's variables say."""
    return os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE" and os.environ.get("GOMP_SPINCOUNT", "") != "0"
