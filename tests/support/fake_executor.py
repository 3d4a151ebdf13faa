"""An executor without a model: block contents are numbers that name a token and everything before it, and every read is checked.

Keys and values of a position depend on all the tokens up to it, so what a slot holds is a digest of that whole beginning: a block that is
shared wrongly, copied too early, written twice or handed out while in use shows as a wrong digest at the first step that reads it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from dspark.runtime.kv.manager import KVCacheManager
from dspark.runtime.scheduling.plan import ScheduledSequence, SchedulerOutput, StepOutput
from dspark.runtime.scheduling.scheduler import Scheduler
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.speculation.draft import ROOT, Draft, Verified
from dspark.runtime.speculation.verify import accepted_rows, rows_of

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

    def run(self, plan: SchedulerOutput) -> StepOutput:
        """Copies, then all writes, then all reads, as a layer of the model does. Raises AssertionError at a wrong read."""
        self.copy(plan.copies)
        written: dict[int, int] = {}
        for item in plan.scheduled:
            seq = item.seq
            values = digests(seq.token_ids, seq.cache_salt)
            for position in range(seq.num_computed, seq.num_computed + item.num_tokens):
                self.write(written, self.slot(seq, position), values[position])
            for node in range(len(item.draft or ())):
                tokens = seq.token_ids + [item.draft.token_ids[n] for n in item.draft.path(node)]
                self.write(written, self.slot(seq, seq.num_computed + item.num_tokens + node), digests(tokens, seq.cache_salt)[-1])
        for item in plan.scheduled:
            self.check_reads(item.seq, item.seq.num_computed + item.num_tokens)
        self.num_computed_tokens += plan.num_tokens
        return StepOutput([self.verify(item) for item in plan.sampling])

    def write(self, written: dict[int, int], slot: int, value: int) -> None:
        assert written.setdefault(slot, value) == value, "two sequences write one slot"
        self.slots[slot] = value

    def verify(self, item: ScheduledSequence) -> Verified:
        """The tokens that the coupled rule gives, the accepted ones' digests moved to their positions."""
        drawn = [next_token(row.token_ids, row.request.draw_key, row.index) for row in rows_of(item)]
        rows = accepted_rows(item.draft, drawn) if item.draft else [0]
        end = item.seq.num_computed + item.num_tokens
        for depth, row in enumerate(rows[1:]):
            self.slots[self.slot(item.seq, end + depth)] = self.slots[self.slot(item.seq, end + row - 1)]
        return Verified([drawn[row] for row in rows], None, tuple(row - 1 for row in rows[1:]))

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


class FakeSpeculator:
    """Drafts of every kind, by a hash of the sequence: none, short and long chains, trees; right, wrong, and right up to a point.

    learned: (nodes drafted, nodes accepted) of each draft. held: sequences it has offered drafts for and not been told to forget.
    resting: the steps of every eight that go without drafts.
    """

    def __init__(self, max_draft: int = 6, resting: tuple[int, ...] = ()) -> None:
        self.max_draft = max_draft
        self.resting = resting
        self.num_looks = 0
        self.max_tokens = 2 * max_draft + 1
        self.learned: list[tuple[int, int]] = []
        self.held: set[int] = set()

    def propose(self, sequences: list[Sequence], rooms: list[int], num_planned: int, num_rows: int) -> list[Draft | None]:
        assert num_planned >= len(sequences) and all(seq.num_uncomputed == 1 for seq in sequences)
        self.held |= {id(seq) for seq in sequences}
        assert not any(seq.num_pending for seq in sequences), "a draft is asked for a text that is not known"
        rests = self.rests
        self.num_looks += 1
        if rests:
            return [None] * len(sequences)
        return [self.draft(seq, room) for seq, room in zip(sequences, rooms, strict=True)]

    def draft(self, seq: Sequence, room: int) -> Draft | None:
        assert room > 0
        dice = zlib.crc32(repr((seq.token_ids, seq.index, seq.num_preemptions)).encode())
        length = min(dice % (self.max_draft + 1), room // 2)
        if length == 0:
            return None
        right, wrong_from = list(seq.token_ids), (dice >> 8) % (length + 2)
        for depth in range(length):
            token = next_token(right, seq.request.draw_key, seq.index)
            right.append(token if depth < wrong_from else (token + 1) % VOCAB_SIZE)
        chain = right[len(seq.token_ids) :]
        kind = (dice >> 16) % 4
        if kind == 3:
            return self.random_tree(seq, min(2 * length, room), random.Random(dice))
        if kind % 2 or length < 2:
            return Draft(tuple(chain), (0.5,) * length, "fake")
        tokens, parents = [(chain[0] + 1) % VOCAB_SIZE], [ROOT]  # a wrong branch first, then the chain with a wrong sibling at each depth
        last = ROOT
        for token in chain:
            tokens += [(token + 2) % VOCAB_SIZE, token]
            parents += [last, last]
            last = len(tokens) - 1
        return Draft(tuple(tokens), (0.5,) * len(tokens), "fake", tuple(parents))

    def random_tree(self, seq: Sequence, num_nodes: int, dice: random.Random) -> Draft:
        """Any shape; each node is right behind its own path or not, and siblings may be equal."""
        tokens: list[int] = []
        parents: list[int] = []
        paths: list[list[int]] = [[]]  # behind the newest token, then of each node
        for _ in range(num_nodes):
            parent = dice.randint(max(ROOT, len(tokens) - 4), len(tokens) - 1)
            right = next_token(seq.token_ids + paths[parent + 1], seq.request.draw_key, seq.index)
            tokens.append(right if dice.random() < 0.6 else dice.randrange(VOCAB_SIZE))
            parents.append(parent)
            paths.append([*paths[parent + 1], tokens[-1]])
        return Draft(tuple(tokens), (0.5,) * num_nodes, "fake", tuple(parents))

    @property
    def rests(self) -> bool:
        return self.num_looks % 8 in self.resting

    def rest(self) -> None:
        assert self.rests
        self.num_looks += 1

    def learn(self, seq: Sequence, draft: Draft, verified: Verified) -> None:
        assert id(seq) in self.held and verified.num_accepted <= draft.longest()
        self.learned.append((len(draft), verified.num_accepted))

    def forget(self, seq: Sequence) -> None:
        self.held.discard(id(seq))


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
    speculator: FakeSpeculator | None = None
    num_added: int = 0
    num_steps: int = 0
    answers: dict[tuple[int, int], tuple[list[int], str]] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kv = KVCacheManager(self.num_blocks, self.block_size, self.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.kv,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.max_model_len,
            frozenset({EOS}),
            self.recompute_at,
            self.speculator,
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
        result = self.executor.run(plan)
        scheduler.advance(plan)
        finished = scheduler.commit(plan, result)
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
