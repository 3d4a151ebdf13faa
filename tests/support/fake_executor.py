"""An executor without a model: block contents are numbers that name a token and everything before it, and every read is checked.

Keys and values of a position depend on all the tokens up to it, so what a slot holds is a digest of that whole beginning: a block that is
shared wrongly, copied too early, written twice or handed out while in use shows as a wrong digest at the first step that reads it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from dspark.runtime.kv.manager import KVCacheManager
from dspark.runtime.scheduling.plan import SchedulerOutput, StepOutput
from dspark.runtime.scheduling.scheduler import Scheduler
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request

EOS = 6
VOCAB_SIZE = 7


def digests(token_ids: Tokens[int], salt: int = 0) -> list[int]:
    """For each position a number that names the tokens up to it."""
    value = zlib.crc32(b"salt %d" % salt)
    values = []
    for token in token_ids:
        value = zlib.crc32(b"%d," % token, value)
        values.append(value)
    return values


def next_token(token_ids: Tokens[int], draw_key: int, index: int) -> int:
    """What the stand-in model answers after this history."""
    return zlib.crc32(repr((list(token_ids), draw_key, index)).encode()) % VOCAB_SIZE


def undisturbed(request: Request, index: int, max_model_len: int) -> tuple[list[int], str]:
    """The answer that a request must get, whatever else runs: its tokens and finish reason."""
    history, params = list(request.prompt_token_ids), request.params
    while True:
        token = next_token(history, request.draw_key, index)
        history.append(token)
        answer = history[len(request.prompt_token_ids) :]
        if len(answer) >= params.min_tokens and token == EOS and not params.ignore_eos:
            return answer, "stop"
        if len(answer) >= params.min_tokens and token in params.stop_token_ids:
            return answer, "stop"
        if len(answer) == params.max_tokens or len(history) == max_model_len:
            return answer, "length"


class FakeExecutor:
    """Runs plans over block contents. num_computed_tokens: all tokens of all steps."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_computed_tokens = 0
        self.slots: list[int | None] = [None] * (num_blocks * block_size)

    def execute(self, plan: SchedulerOutput) -> StepOutput:
        """Copies, then all writes, then all reads, as a layer of the model does. Raises AssertionError at a wrong read."""
        self.copy(plan.copies)
        written: dict[int, int] = {}
        for item in plan.scheduled:
            seq = item.seq
            values = digests(seq.token_ids, seq.cache_salt)
            for position in range(seq.num_computed, seq.num_computed + item.num_tokens):
                slot = self.slot(seq, position)
                assert written.setdefault(slot, values[position]) == values[position], "two sequences write one slot"
                self.slots[slot] = values[position]
        for item in plan.scheduled:
            self.check_reads(item.seq, item.seq.num_computed + item.num_tokens)
        self.num_computed_tokens += plan.num_tokens
        return StepOutput([next_token(i.seq.token_ids, i.seq.request.draw_key, i.seq.index) for i in plan.sampling])

    def check_reads(self, seq: Sequence, context_len: int) -> None:
        """Every position that attention reads holds this very sequence's beginning."""
        for position, value in enumerate(digests(seq.token_ids[:context_len], seq.cache_salt)):
            found = self.slots[self.slot(seq, position)]
            assert found == value, f"position {position} of {context_len} (computed {seq.num_computed}) reads what is not its own"

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """The step's block copies; all at once unless a source is a target as well, as the model runner does it."""
        targets = [target for _, target in copies]
        assert len(set(targets)) == len(targets), "two copies go to one block"
        for source, target in copies:
            start, size = target * self.block_size, self.block_size
            self.slots[start : start + size] = self.slots[source * size : (source + 1) * size]

    def slot(self, seq: Sequence, position: int) -> int:
        return seq.table.blocks[position // self.block_size] * self.block_size + position % self.block_size


@dataclass
class FakeRun:
    """A scheduler, a pool and the fake executor, stepped together with everything checked that must hold at every step."""

    num_blocks: int
    block_size: int
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    max_model_len: int = 64
    enable_prefix_caching: bool = True
    recompute_at: int | None = None
    num_added: int = 0
    num_steps: int = 0
    answers: dict[tuple[int, int], tuple[list[int], str]] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kv = KVCacheManager(self.num_blocks, self.block_size, self.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.kv, self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len, frozenset({EOS}), self.recompute_at
        )
        self.executor = FakeExecutor(self.num_blocks, self.block_size)

    def fits(self, request: Request) -> bool:
        """The engine's own rule for admission."""
        longest = min(len(request.prompt_token_ids) + (request.params.max_tokens or self.max_model_len), self.max_model_len)
        return len(request.prompt_token_ids) < self.max_model_len and self.kv.blocks_for(longest) <= self.num_blocks

    def add(self, request: Request, salt: int = 0) -> None:
        assert self.fits(request)
        for index in range(request.params.n):
            seq = Sequence(request, index, self.num_added, salt)
            self.sequences.append(seq)
            self.scheduler.add(seq)
        self.num_added += 1

    def step(self) -> SchedulerOutput:
        scheduler = self.scheduler
        before, num_preemptions = list(scheduler.running), scheduler.num_preemptions
        decoding = [seq for seq in before if seq.num_uncomputed == 1]
        plan = scheduler.schedule()
        planned = [item.seq for item in plan.scheduled]
        assert plan.scheduled, "a step without progress"
        assert plan.num_tokens <= self.max_num_batched_tokens
        assert all(item.num_tokens > 0 for item in plan.scheduled)
        assert len({id(seq) for seq in planned}) == len(planned) <= len(scheduler.running) <= self.max_num_seqs
        assert all(seq in scheduler.running for seq in planned)
        if scheduler.num_preemptions > num_preemptions:
            assert all(seq in before for seq in scheduler.running), "a sequence is admitted to the room that another one was driven from"
        if self.max_num_batched_tokens >= self.max_num_seqs:
            assert all(seq in planned for seq in decoding if seq in scheduler.running), "a decode is starved by a prefill"
            ranked = sorted(scheduler.running, key=lambda s: s.rank)
            assert ranked[0] in planned, "the first in rank makes no progress"
        finished = scheduler.commit(plan, self.executor.execute(plan))
        for seq in finished:
            assert seq.finish_reason is not None and (seq.request.request_id, seq.index) not in self.answers
            self.answers[seq.request.request_id, seq.index] = (seq.output_token_ids, seq.finish_reason)
        self.check_integrity()
        self.num_steps += 1
        return plan

    def check_integrity(self) -> None:
        self.kv.check_integrity(self.scheduler.running)
        assert all(not seq.table.blocks for seq in self.scheduler.waiting)

    def finish(self, max_steps: int) -> None:
        """Step to the end. Raises AssertionError after max_steps."""
        while self.scheduler.num_unfinished:
            assert max_steps > 0, "the run does not end"
            max_steps -= 1
            self.step()
        assert self.kv.allocator.num_held == 0
        for seq in self.sequences:
            expected = undisturbed(seq.request, seq.index, self.max_model_len)
            assert self.answers[seq.request.request_id, seq.index] == expected, "an answer depends on its neighbours"
