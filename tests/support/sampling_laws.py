"""Speculative decoding of a stand-in model at a scale where laws show: tables in place of networks, arrays in place of sequences.

The model: logits of the next token by the one before it, V tokens. The texts of all chains grow side by side, in rounds of a draft and its
verification by the production loops, until each has `TEXT` tokens; then their joint law is compared with the exact one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch

from dspark.runtime.sampling.draw import draw_rows
from dspark.runtime.sampling.filters import probabilities
from dspark.runtime.sampling.reject import DraftRows, reject_rows
from dspark.runtime.sampling.sampler import DrawOptions
from dspark.runtime.speculation.draft import Draft
from dspark.runtime.speculation.verify import accepted_rows

VOCAB, TEXT, LONGEST = 5, 3, 3
"""Tokens of the vocabulary, of a text, of a draft."""


@dataclass(frozen=True)
class Options:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def table(self, logits: np.ndarray) -> np.ndarray:
        """float64 [V, V]: row by row the probabilities that are to be drawn from."""
        wide = torch.from_numpy(logits)
        return np.stack([probabilities(row, self.temperature, self.top_k, self.top_p, self.min_p).double().numpy() for row in wide])


@dataclass(frozen=True)
class Proposer:
    """A draft model: logits by the token before, and their options. certain: it takes its best token and brings no distributions."""

    logits: np.ndarray
    options: Options
    certain: bool = False


def model_logits() -> np.ndarray:
    return np.random.default_rng(11).normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32)


def proposer(kind: str, options: Options) -> Proposer:
    """perfect: the model itself; near: a little beside it; random: any token; point: the best of another model, without distributions;
    adversarial: likely where the model is unlikely, and on tokens that its cuts drop."""
    logits, other = model_logits(), np.random.default_rng(12).normal(0, 1, (VOCAB, VOCAB)).astype(np.float32)
    return {
        "perfect": Proposer(logits, options),
        "near": Proposer(logits + 0.4 * other, options),
        "random": Proposer(np.zeros_like(logits), Options()),
        "point": Proposer(other, Options(), certain=True),
        "adversarial": Proposer(-2 * logits, Options()),
    }[kind]


Lengths = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""Drafts int64 [n, LONGEST] -> how much of each is verified"""


def draw(table: np.ndarray, before: np.ndarray, dice: np.random.Generator) -> np.ndarray:
    """A token for each chain, from the row of the token before it."""
    return (dice.random((len(before), 1)) > np.cumsum(table[before], 1)[:, :-1]).sum(1)


def rejection_texts(
    num_chains: int, maker: Proposer, options: Options, lengths: Lengths, seed: int, claimed: np.ndarray | None = None
) -> np.ndarray:
    """int64 [num_chains, TEXT]. claimed: what is told to be drawn from, in place of what is."""
    dice = np.random.default_rng(seed)
    logits, drawn_from = model_logits(), maker.options.table(maker.logits)
    told = (drawn_from if claimed is None else claimed).astype(np.float32)

    def verify(before: np.ndarray, drafts: np.ndarray, length: np.ndarray, _: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        contexts = np.concatenate([before[:, None], drafts], 1)
        used = np.arange(LONGEST + 1) <= length[:, None]
        rows, tokens = contexts[used], drafts[used[:, 1:]]
        first = np.concatenate([[0], np.cumsum(length + 1)[:-1]])
        start = np.concatenate([[0], np.cumsum(length)[:-1]])
        count = len(before)
        return reject_rows(
            logits[rows],
            logits.argmax(1)[rows],
            DraftRows(
                first=first,
                length=length,
                tokens=tokens,
                start=start,
                drawn_from=told[:0] if maker.certain else told[contexts[:, :-1][used[:, 1:]]],
                source=np.full(count, -1) if maker.certain else start,
                is_random=np.ones(count, np.bool_),
                temperature=np.full(count, options.temperature, np.float32),
                top_k=np.full(count, options.top_k),
                top_p=np.full(count, options.top_p),
                min_p=np.full(count, options.min_p),
                acceptance=dice.integers(0, 2**64, len(rows), np.uint64),
                replacement=dice.integers(0, 2**64, len(rows), np.uint64),
            ),
        )

    def propose(before: np.ndarray, _: np.ndarray) -> np.ndarray:
        return maker.logits.argmax(1)[before] if maker.certain else draw(drawn_from, before, dice)

    return _grow(num_chains, propose, verify, lengths, dice)


def coupled_texts(num_chains: int, maker: Proposer, options: Options, lengths: Lengths, seed: int) -> np.ndarray:
    """The same by the coupled rule: a draft's tokens are drawn with the noise of their positions, as the target's are."""
    dice = np.random.default_rng(seed)
    logits = model_logits()
    noise = dice.integers(0, 2**64, (num_chains, TEXT + LONGEST + 1), np.uint64)

    def drawn(table: np.ndarray, contexts: np.ndarray, places: np.ndarray, how: Options) -> np.ndarray:
        rows, count = table[contexts], len(contexts)
        shared = (np.full(count, value) for value in (how.top_k, how.top_p, how.min_p))
        settings = DrawOptions(np.arange(count), np.full(count, how.temperature, np.float32), *shared, noise.reshape(-1)[places])
        return draw_rows(rows, rows.argmax(1), settings)

    def propose(before: np.ndarray, places: np.ndarray) -> np.ndarray:
        return maker.logits.argmax(1)[before] if maker.certain else drawn(maker.logits, before, places, maker.options)

    def verify(before: np.ndarray, drafts: np.ndarray, length: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        contexts = np.concatenate([before[:, None], drafts], 1)
        where = places[:, None] + np.arange(LONGEST + 1)
        tokens = drawn(logits, contexts.reshape(-1), where.reshape(-1), options).reshape(contexts.shape)
        cases = np.concatenate([drafts, tokens, length[:, None]], 1)
        _, where, which = np.unique(cases @ 10 ** np.arange(cases.shape[1]), return_index=True, return_inverse=True)
        kept = [len(accepted_rows(_chain(case[: case[-1]]), list(case[LONGEST : LONGEST + case[-1] + 1]))) - 1 for case in cases[where]]
        accepted = np.asarray(kept)[which]
        return accepted, tokens[np.arange(len(tokens)), accepted]

    return _grow(num_chains, propose, verify, lengths, dice)


def _chain(tokens: np.ndarray) -> Draft:
    return Draft(tuple(tokens.tolist()), (1.0,) * len(tokens), "a")


def _grow(num_chains: int, propose: Callable, verify: Callable, lengths: Lengths, dice: np.random.Generator) -> np.ndarray:
    texts = np.zeros((num_chains, TEXT + LONGEST + 1), np.int64)
    done = np.zeros(num_chains, np.int64)
    while (going := np.flatnonzero(done < TEXT)).size:
        before = np.where(done[going] > 0, texts[going, done[going] - 1], 0)
        places = going * texts.shape[1] + done[going]
        drafts = np.empty((going.size, LONGEST), np.int64)
        last = before
        for depth in range(LONGEST):
            drafts[:, depth] = last = propose(last, places + depth)
        accepted, follows = verify(before, drafts, lengths(drafts, dice), places)
        flat = texts.reshape(-1)
        for depth in range(LONGEST):
            kept = accepted > depth
            flat[places[kept] + depth] = drafts[kept, depth]
        flat[places + accepted] = follows
        done[going] += accepted + 1
    return texts[:, :TEXT]


def exact_law(options: Options) -> np.ndarray:
    """Probability of each text [V ** TEXT], the first token after token 0."""
    table = options.table(model_logits())
    law = table[0]
    for _ in range(TEXT - 1):
        law = (law.reshape(-1, VOCAB)[:, :, None] * table[None]).reshape(-1)
    return law


def chi_square(texts: np.ndarray, law: np.ndarray) -> tuple[float, int]:
    """(statistic, degrees of freedom) of texts against their law; cells with fewer than 5 expected are one. Raises AssertionError for a
    text that is impossible."""
    cells = texts @ VOCAB ** np.arange(TEXT - 1, -1, -1)
    counts = np.bincount(cells, minlength=law.size)
    assert not counts[law == 0].any(), "a text that cannot be drawn"
    expected = law * len(texts)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    full = wanted > 0
    return float(((observed[full] - wanted[full]) ** 2 / wanted[full]).sum()), int(full.sum()) - 1


def limit(degrees: int, chance: float) -> float:
    """What a chi-square statistic exceeds with this probability (Wilson and Hilferty 1931)."""
    z = NormalDist().inv_cdf(1 - chance)
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3
