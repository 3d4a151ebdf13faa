"""Decides what each step computes. Continuous batching: prefill and decode are one thing, a sequence simply has n tokens to compute.

Order and progress: sequences run in the order of their rank (priority, then arrival). When blocks run out, the lowest-ranked running
sequence is preempted (its blocks are freed, it is recomputed later), and nothing is admitted in that step. The highest-ranked one can
always take everybody else's blocks, and a request that would not fit alone is refused by `add`: so every step makes progress and every
request ends.

One step ahead: a step may be planned (`schedule(Ahead.ALL)`) while the one before it runs, whose tokens are taken for granted (`advance`)
and known later (`commit`). Till then a drawn token is a placeholder: the row that draws it. An answer that turns out to have ended has one
token too many in the step that was planned by then: it is dropped. Such a plan drives nobody from their blocks: what it lacks may be
free when the results are known, and a sequence without blocks never waits for a token.

In halves: drafts need the text, and how many of them are kept is not known beforehand. So with drafts the step ahead is that of the other
sequences (`Ahead.OTHERS`): while one half is verified, the host has the other half drafted. The first step then takes half of them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Protocol

from dspark.runtime.kv.manager import KVCacheManager
from dspark.runtime.scheduling.plan import Ahead, ScheduledSequence, SchedulerOutput, StepOutput
from dspark.runtime.scheduling.sequence import Sequence, SequenceStatus
from dspark.runtime.scheduling.stopping import check_stop
from dspark.runtime.speculation.draft import Draft, Verified

UNEVEN = 3
"""Two halves of which one has fewer than one in so many sequences are not worth two steps."""


class Speculates(Protocol):
    """Who offers drafts; see `speculation.speculator`. max_tokens: most nodes of a draft."""

    max_tokens: int

    def propose(self, sequences: list[Sequence], rooms: list[int], num_planned: int, num_rows: int) -> list[Draft | None]:
        """A draft, or none, for each sequence, which is about to compute its newest token.

        rooms: most nodes that each draft may have; so many positions past the newest token are writable. num_planned: tokens that the
        step computes without drafts. num_rows: sequences that gain a token from it in any case.
        """

    @property
    def rests(self) -> bool:
        """Whether the next step goes without drafts, whatever the texts are. `rest` is told of it when it was planned without asking."""

    def rest(self) -> None:
        """A step was planned without drafts."""

    def learn(self, seq: Sequence, draft: Draft, verified: Verified) -> None:
        """What came of a draft."""

    def forget(self, seq: Sequence) -> None:
        """The sequence ended, or lost its blocks."""


class Scheduler:
    """Running and waiting sequences over one block pool.

    max_num_batched_tokens bounds a step's tokens, and so the memory of activations. max_model_len ends a sequence with "length".
    recompute_at: length at which a sequence is computed anew with that length as its salt, since all its keys change (longrope).
    speculator: offers drafts for sequences that compute one token; None for plain decoding.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        recompute_at: int | None = None,
        speculator: Speculates | None = None,
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.recompute_at = recompute_at
        self.speculator = speculator
        self.running: list[Sequence] = []  # by rank
        self.waiting: list[Sequence] = []  # by rank
        self.num_preemptions = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. It must fit the pool alone (the engine refuses it otherwise)."""
        insort(self.waiting, seq, key=lambda s: s.rank)

    def schedule(self, ahead: Ahead = Ahead.NO, halved: bool = False) -> SchedulerOutput:
        """Plan one step: first the running sequences, then as many waiting ones as there is room for.

        ahead: the step before is not committed yet. The plan may then be empty. halved: take one half of the running ones, so that the next
        step can be that of the others.
        """
        plan = SchedulerOutput()
        num_preempted = self._schedule_running(plan, ahead, halved)
        for item in plan.scheduled:
            self._register(item)
        plan.num_resident = len(plan.scheduled)
        if num_preempted == 0 and not plan.is_short:
            self._admit_waiting(plan)
        if self.speculator is not None:
            if ahead is Ahead.ALL:
                self.speculator.rest()
            else:
                self._add_drafts(plan, plan.scheduled[: plan.num_resident], self.speculator)
        plan.copies = self.kv.take_copies()
        assert plan.scheduled or ahead is not Ahead.NO or not self.num_unfinished, "no sequence can make progress"
        return plan

    def advance(self, plan: SchedulerOutput) -> None:
        """Take for granted that the plan, which is under way now, is computed. Each sampling sequence has one more pending token."""
        row = 0
        for item in plan.scheduled:
            seq = item.seq
            seq.num_computed += item.num_tokens
            if item.samples:
                seq.num_pending += 1
                seq.pending_row = row
                row += 1

    def withdraw(self, plan: SchedulerOutput, max_num_tokens: int) -> None:
        """Take back a plan that was not computed, before `advance`, and keep steps to max_num_tokens from now on.

        Sequences that it admitted wait again, and so do those with blocks that it had entered in the prefix index (they would be missed
        there), and all of them where a drafter may have read the step; the others keep what they hold.
        """
        self.max_num_batched_tokens = max_num_tokens
        targets = {target for _, target in plan.copies}
        broken = [self.kv.forget_unwritten(item.seq, item.start) for item in plan.scheduled]
        for number, item in enumerate(plan.scheduled):
            if number >= plan.num_resident or broken[number] or (self.speculator is not None and not item.seq.num_pending):
                self._preempt(item.seq)
            else:
                assert targets.isdisjoint(item.seq.table.blocks), "only what newcomers share is copied"

    def ahead_of(self, plan: SchedulerOutput, draws_alone: Callable[[Sequence], bool], in_halves: bool) -> Ahead:
        """Whom the step behind `plan`, which is under way, can take before its tokens are known.

        draws_alone: whether a sequence's next token can be drawn while the host does not know its newest one. One that cannot makes the
        step wait: left out of every other step, it would decode at half the pace. in_halves: whether a step of the others pays. Where
        the two halves have become uneven it does not, and the step that waits is divided anew.
        """
        if plan.is_short:
            return Ahead.NO
        if self.speculator is not None and (not self.speculator.rests or any(item.draft for item in plan.scheduled)):
            num_others = sum(not seq.num_pending for seq in self.running)
            even = UNEVEN * min(num_others, len(self.running) - num_others) >= len(self.running)
            return Ahead.OTHERS if in_halves and num_others and even else Ahead.NO
        sequences = [item.seq for item in plan.scheduled if item.samples and item.seq.finish_reason is None]
        follows = all(self._is_full(seq) or (seq.num_tokens != self.recompute_at and draws_alone(seq)) for seq in sequences)
        return Ahead.ALL if follows else Ahead.NO

    def commit(self, plan: SchedulerOutput, result: StepOutput) -> list[Sequence]:
        """Put the new tokens in the place of the pending ones and return the sequences that ended, their blocks released."""
        finished: list[Sequence] = []
        for item, verified in zip(plan.sampling, result.gained, strict=True):
            seq = item.seq
            seq.num_pending -= 1
            if seq.finish_reason is not None:
                continue  # it ended in the step before: this one was planned by then
            if self.speculator is not None and item.draft:
                self.speculator.learn(seq, item.draft, verified)
            if item.source_row >= 0 and seq.status is SequenceStatus.RUNNING:
                self._register(item)  # the token that it computed is known by now
            self._append(seq, verified)
            if seq.finish_reason is not None:
                finished.append(seq)
            elif len(seq.token_ids) == self.recompute_at:
                seq.cache_salt = seq.rope_len = self.recompute_at
                self._requeue(seq)
            elif item.draft:
                self.kv.rewind(seq, seq.num_computed)
        for seq in finished:
            self._finish(seq)
        return finished

    def _register(self, item: ScheduledSequence) -> None:
        """Enter the blocks that an item fills in the prefix index, as far as their tokens are known."""
        self.kv.register_full_blocks(item.seq, min(item.start + item.num_tokens, len(item.seq.token_ids)))

    def _is_full(self, seq: Sequence) -> bool:
        """Whether the answer ends with its pending token at the latest: it has its length."""
        most = seq.request.params.max_tokens
        return seq.num_tokens >= self.max_model_len or (most is not None and seq.num_output_tokens >= most)

    def _append(self, seq: Sequence, verified: Verified) -> None:
        """Take over what was gained, up to the token that ends the answer. The keys of accepted tokens are stored already."""
        seq.num_computed += verified.num_accepted
        for index, token in enumerate(verified.token_ids):
            seq.token_ids.append(token)
            if verified.top2_gaps is not None:
                gap = verified.top2_gaps[index]
                seq.min_top2_gap = gap if seq.min_top2_gap is None else min(seq.min_top2_gap, gap)
            check_stop(seq, self.eos_token_ids, self.max_model_len)
            if seq.finish_reason is not None:
                return

    def _add_drafts(self, plan: SchedulerOutput, resident: list[ScheduledSequence], speculator: Speculates) -> None:
        """Give sequences that compute one token a draft, as far as the step's budget and the free blocks reach; nobody is preempted.

        resident: those that ran before this step. A sequence that is only just admitted may share blocks that this very step writes or
        copies: there is nothing in them yet for a drafter to read.
        """
        budget = self.max_num_batched_tokens - plan.num_tokens
        items = [item for item in resident if item.samples and item.num_tokens == 1 and self._draft_room(item.seq) > 0]
        rooms = [self._reserve(item.seq, min(self._draft_room(item.seq), speculator.max_tokens, budget)) for item in items]
        offered = [(item, room) for item, room in zip(items, rooms, strict=True) if room > 0]
        if not offered:
            return
        sequences, rooms = [item.seq for item, _ in offered], [room for _, room in offered]
        drafts = speculator.propose(sequences, rooms, plan.num_tokens, len(plan.sampling))
        for (item, room), draft in zip(offered, drafts, strict=True):
            fitted = draft.cut(min(room, budget)) if draft is not None else None
            if fitted is not None and len(fitted):
                item.draft = fitted
                budget -= len(fitted)
            else:
                self.kv.rewind(item.seq, item.seq.num_tokens)

    def _reserve(self, seq: Sequence, wanted: int) -> int:
        """Make positions past the newest token writable: as many as wanted, or as the sequence's blocks have left. Returns how many."""
        if wanted > 0 and not self.kv.extend(seq, seq.num_tokens, seq.num_tokens + wanted):
            return min(wanted, len(seq.table.blocks) * self.kv.block_size - seq.num_tokens)
        return wanted

    def _draft_room(self, seq: Sequence) -> int:
        """Most tokens of a draft that a sequence can use: one more is gained with them, and none may pass where answer or keys end."""
        ends = [self.max_model_len]
        if self.recompute_at is not None and seq.num_tokens < self.recompute_at:
            ends.append(self.recompute_at)
        if seq.request.params.max_tokens is not None:
            ends.append(seq.prompt_len + seq.request.params.max_tokens)
        return min(ends) - seq.num_tokens - 1

    def _schedule_running(self, plan: SchedulerOutput, ahead: Ahead, halved: bool) -> int:
        """Give each running sequence its tokens; decodes (one token) first, so that a long prefill cannot starve them.

        Returns how many were preempted: none ahead, where those that lack blocks are left out instead.
        """
        budget = self.max_num_batched_tokens
        num_preempted = 0
        order = sorted(self.running, key=lambda s: s.num_uncomputed > 1)  # stable: by rank within each kind
        for seq in order[: -(-len(order) // 2)] if halved else order:
            if seq.status is not SequenceStatus.RUNNING or budget == 0:
                continue
            if seq.num_pending and (ahead is Ahead.OTHERS or self._is_full(seq)):
                continue
            num_tokens = min(seq.num_uncomputed, budget)
            while not self.kv.extend(seq, seq.num_computed, seq.num_computed + num_tokens):
                if ahead is not Ahead.NO:
                    plan.is_short = True
                    break
                victim = self.running[-1]
                budget += self._unschedule(plan, victim)
                self._preempt(victim)
                num_preempted += 1
                if victim is seq:
                    break
            else:
                plan.scheduled.append(ScheduledSequence(seq, num_tokens))
                budget -= num_tokens
        return num_preempted

    def _admit_waiting(self, plan: SchedulerOutput) -> None:
        budget = self.max_num_batched_tokens - plan.num_tokens
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if not self._take_blocks(seq):
                return
            num_tokens = min(seq.num_uncomputed, budget)
            extended = self.kv.extend(seq, seq.num_computed, seq.num_computed + num_tokens)
            assert extended, "room was checked"
            self.waiting.pop(0)
            seq.status = SequenceStatus.RUNNING
            insort(self.running, seq, key=lambda s: s.rank)
            item = ScheduledSequence(seq, num_tokens)
            plan.scheduled.append(item)
            self._register(item)
            budget -= num_tokens

    def _take_blocks(self, seq: Sequence) -> bool:
        """Share what is there already (a sibling's prompt, or the prefix cache); False when the rest does not fit now.

        All of the sequence's present tokens must fit, with one more block for each running sequence's next tokens: a sequence that is
        admitted only to be preempted costs its prefill twice.
        """
        assert not seq.num_pending, "the newest token of a sequence that is computed again is known"
        reserve = len(self.running)
        sibling = next((s for s in self.running if s.request is seq.request and _can_share(s, seq)), None)
        if sibling is not None and seq.num_output_tokens == 0:
            if self.kv.allocator.num_available < 1 + reserve:
                return False
            num_shared = seq.prompt_len - 1  # the last prompt token is computed again: its logits are this sequence's own
            self.kv.fork(sibling, seq, num_shared)
        else:
            most = seq.num_tokens - 1  # the last token is always computed: its logits are wanted
            num_found, num_idle = self.kv.num_cached_blocks(seq, most)
            needed = self.kv.blocks_for(seq.num_tokens + 1) - num_found + num_idle
            if needed + reserve > self.kv.allocator.num_available and self.running:
                return False
            num_shared = self.kv.match_prefix(seq, most)
        seq.num_computed = num_shared
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_shared
        return True

    def _preempt(self, seq: Sequence) -> None:
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it will be computed from its first token again."""
        self.running.remove(seq)
        self._forget(seq)
        seq.num_computed = seq.drafter_len = 0
        seq.status = SequenceStatus.WAITING
        insort(self.waiting, seq, key=lambda s: s.rank)

    def _finish(self, seq: Sequence) -> None:
        (self.running if seq.status is SequenceStatus.RUNNING else self.waiting).remove(seq)
        self._forget(seq)
        seq.status = SequenceStatus.FINISHED

    def _forget(self, seq: Sequence) -> None:
        """Give back what a sequence holds."""
        self.kv.release(seq)
        if self.speculator is not None:
            self.speculator.forget(seq)

    def _unschedule(self, plan: SchedulerOutput, seq: Sequence) -> int:
        """Take a sequence out of the plan; returns the tokens that are free again."""
        for i, item in enumerate(plan.scheduled):
            if item.seq is seq:
                del plan.scheduled[i]
                return item.num_tokens
        return 0


def _can_share(sibling: Sequence, seq: Sequence) -> bool:
    """Whether the prompt of an answer of the same request is stored, with the keys that `seq` would have."""
    return sibling.num_computed >= sibling.prompt_len and sibling.cache_salt == seq.cache_salt
