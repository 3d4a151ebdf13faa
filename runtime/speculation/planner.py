"""How many draft tokens a step verifies: as many as pay at the present load.

With R sequences a step of B = R + K tokens commits R + sum of the survivals of the K nodes it verifies, and takes T(B) seconds. Survivals
never rise along a path, so of K nodes the K most likely ones are the best and keep paths whole. Source: DSpark (arXiv 2607.05147),
section 5; the rules of when a choice may look at what are in `schedule_early_stop`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Seconds = Callable[[int], float]
"""tokens of a step -> its seconds"""
MIN_GAIN = 1.05
"""A step is made longer only when it commits so many times as many tokens per second as a plain one: estimates have errors."""


def best_counts(
    survivals: Sequence[Sequence[float]],
    num_planned: int,
    seconds: Seconds,
    num_rows: int | None = None,
    extra: float = 0.0,
    most_tokens: int | None = None,
) -> list[int]:
    """Nodes to verify of each draft: the choice with the most tokens per second, all zeros unless it beats plain decoding by MIN_GAIN.

    survivals: for each sequence the probability that each node is accepted with all before it on its path; nodes in an order that keeps
    the first n of them whole. num_planned: tokens of the step without drafts. num_rows: sequences that gain a token from it in any case,
    default those with a draft. extra: seconds that drafting has taken already. most_tokens: no step is made longer than that. For drafts
    that are a function of the text before them (coupled and greedy ones) any choice is lossless.
    """
    counts = [0] * len(survivals)
    expected, tokens = float(len(survivals) if num_rows is None else num_rows), num_planned
    taken, best_rate = list(counts), MIN_GAIN * expected / seconds(num_planned)
    for _, sequence, node in candidates(survivals):
        if most_tokens is not None and tokens >= most_tokens:
            break
        counts[sequence] = node + 1
        expected += survivals[sequence][node]
        tokens += 1
        rate = expected / (seconds(tokens) + extra)
        if rate > best_rate:
            best_rate, taken = rate, list(counts)
    return taken


def schedule_early_stop(
    survivals: Sequence[Sequence[float]],
    num_planned: int,
    seconds: Seconds,
    num_rows: int | None = None,
    most_tokens: int | None = None,
) -> list[int]:
    """The paper's Algorithm 1, for drafts that are drawn at random and verified by rejection.

    Whether a token is verified must not depend on the token itself or on later ones of its draft (their confidences do). Going through the
    candidates from likely to unlikely and stopping at the first that does not pay keeps to that: a later token of a draft comes after it.
    Arguments as of `best_counts`.
    """
    counts = [0] * len(survivals)
    expected, tokens = float(len(survivals) if num_rows is None else num_rows), num_planned
    best_rate = expected / seconds(tokens)
    for _, sequence, node in candidates(survivals):
        rate = (expected + survivals[sequence][node]) / seconds(tokens + 1)
        if rate <= best_rate or (most_tokens is not None and tokens >= most_tokens):
            break
        expected, tokens, best_rate = expected + survivals[sequence][node], tokens + 1, rate
        counts[sequence] = node + 1
    return counts


def admit_most_likely(survivals: Sequence[Sequence[float]], capacity: int) -> list[int]:
    """The `capacity` most likely nodes. Lossless for random drafts when the capacity comes from older steps alone."""
    counts = [0] * len(survivals)
    for _, sequence, node in candidates(survivals)[:capacity]:
        counts[sequence] = node + 1
    return counts


def candidates(survivals: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """(survival, sequence, node) of all nodes that may survive, likely ones first; of equal ones the earlier node, then the earlier
    sequence: a tie must not bring a later node of a draft before an earlier one."""
    found = [(value, sequence, node) for sequence, row in enumerate(survivals) for node, value in enumerate(row) if value > 0]
    found.sort(key=lambda entry: (-entry[0], entry[2], entry[1]))
    return found
