"""A drafter run beside answers that are known: what generation would draft and accept, without the target's passes.

The coupled rule accepts a draft token when it is the token that the target draws there, and that is the answer's. So a round needs the
answer and the target's features of its tokens, and goes as in generation: the features of accepted tokens come in after the verification,
a draft is made at its full length, and nothing tells the drafter where the answer ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dspark.runtime.execution.forward_batch import build_forward_batch
from dspark.runtime.jobs.tokenizer import TextCodec
from dspark.runtime.models.decoder import Decoder
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.plan import ScheduledSequence, SchedulerOutput
from dspark.runtime.scheduling.sequence import Sequence as TokenSequence
from dspark.runtime.spec.request import Request
from dspark.runtime.speculation.draft import Draft
from dspark.runtime.speculation.draft_model import load_draft_model
from dspark.runtime.speculation.drafter import Drafter
from dspark.runtime.speculation.heads.block import BlockDrafter
from dspark.runtime.speculation.heads.load import load_drafter

LINES_AT_ONCE = 32


@dataclass(frozen=True)
class KnownAnswer:
    """request: what was asked; tokens: its prompt and answer; features [T, taps * H]: the target's, of every token."""

    request: Request
    tokens: list[int]
    features: torch.Tensor


@dataclass(frozen=True)
class Round:
    """survival: the estimate for each draft token that the answer has a token for; accepted: how many of them are the answer's;
    committed: tokens that the round brought, the target's own one among them unless the answer ended before it."""

    survival: tuple[float, ...]
    accepted: int
    committed: int


@dataclass
class _Line:
    known: KnownAnswer
    seq: TokenSequence
    rounds: list[Round] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens of the answer behind the newest one."""
        return len(self.known.tokens) - self.seq.num_tokens

    def take(self, draft: Draft | None) -> None:
        """Note what a draft came to, and move on to the token behind what was accepted."""
        coming = self.known.tokens[self.seq.num_tokens :]
        tokens = draft.token_ids[: len(coming)] if draft is not None else ()
        survival = draft.survival[: len(tokens)] if draft is not None else ()
        accepted = next((i for i, token in enumerate(tokens) if token != coming[i]), len(tokens))
        gained = coming[: accepted + 1]
        self.rounds.append(Round(tuple(survival), accepted, len(gained)))
        self.seq.token_ids.extend(gained)


def replay_stored(directory: Path, target: Decoder, answers: Sequence[KnownAnswer]) -> list[Round]:
    """All rounds with a stored block drafter, its estimates not divided by temperatures. Raises InputError as `load_drafter` does."""
    facts = target.kernels.facts
    longest = max((len(known.tokens) for known in answers), default=1)
    drafter = load_drafter(directory, target, Sampler(frozenset(target.config.eos_token_ids)), longest, temperatures=())
    assert isinstance(drafter, BlockDrafter)
    return replay(drafter, answers, facts.block_size, facts.device)


def replay_draft_model(directory: Path, target: Decoder, codec: TextCodec, answers: Sequence[KnownAnswer], max_tokens: int) -> list[Round]:
    """All rounds with a draft model that drafts up to max_tokens, as sure of itself as it says. codec: the target's."""
    facts = target.kernels.facts
    longest = max((len(known.tokens) for known in answers), default=1)
    drafter = load_draft_model(directory, target, codec, Sampler(frozenset(target.config.eos_token_ids)), longest, max_tokens)
    return replay(drafter, answers, facts.block_size, facts.device)


@torch.inference_mode()
def replay(drafter: Drafter, answers: Sequence[KnownAnswer], block_size: int, device: str) -> list[Round]:
    """All rounds of all answers, line after line. The drafter is not allocated yet, or is no longer needed: it gets a cache of its own.

    block_size: of its cache, as its target was loaded. An answer needs two tokens, or it has no round.
    """
    groups = [answers[start : start + LINES_AT_ONCE] for start in range(0, len(answers), LINES_AT_ONCE)]

    def blocks_of(known: KnownAnswer) -> int:
        return -(-(len(known.tokens) + drafter.max_tokens + 1) // block_size)

    drafter.allocate(max((sum(map(blocks_of, group)) for group in groups), default=1))
    rounds: list[Round] = []
    for group in groups:
        lines, first = [], 0
        for known in group:
            line = _Line(known, TokenSequence(known.request, 0, 0))
            line.seq.table.blocks.extend(range(first, first + blocks_of(known)))
            line.seq.token_ids.extend(known.tokens[line.seq.prompt_len :][:1])
            first += blocks_of(known)
            lines.append(line)
        for running in _rounds(lines):
            _absorb(drafter, running, block_size, device)
            drafts = drafter.draft([line.seq for line in running], [drafter.max_tokens] * len(running))
            for line, draft in zip(running, drafts, strict=True):
                line.take(draft)
        rounds += [entry for line in lines for entry in line.rounds]
    return rounds


def _rounds(lines: list[_Line]) -> Iterator[list[_Line]]:
    while running := [line for line in lines if line.left > 0]:
        yield running


def _absorb(drafter: Drafter, running: list[_Line], block_size: int, device: str) -> None:
    """Bring in the features of every token but the newest, which the target has not computed yet."""
    items = [ScheduledSequence(line.seq, line.seq.num_uncomputed - 1) for line in running]
    features = [line.known.features[line.seq.num_computed : line.seq.num_tokens - 1] for line in running]
    batch = build_forward_batch(SchedulerOutput(items), block_size, device)
    drafter.absorb(batch, [], torch.cat(features))
    for item in items:
        item.seq.num_computed += item.num_tokens
