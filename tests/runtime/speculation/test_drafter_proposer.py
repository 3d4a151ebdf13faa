"""When drafting is worth its time, what a drafter's confidence is worth, and what its layers hold."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.runtime.kv.manager import BlockTable
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.confidence import Confidence
from dspark.runtime.speculation.cost import StepCost
from dspark.runtime.speculation.draft import Draft, Verified
from dspark.runtime.speculation.draft_pages import SlotLedger
from dspark.runtime.speculation.drafter_proposer import PROBE_EVERY, PROBE_SEQUENCES, DrafterProposer, DraftTimes
from dspark.runtime.speculation.timeline import MOST, Timeline


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def sequences(count: int) -> list[Sequence]:
    return [Sequence(Request(i, [1, 2, 3], SamplingParams()), 0, i) for i in range(count)]


def proposer(cost: StepCost, seconds_per_token: float, confidence: float) -> tuple[DrafterProposer, list[int]]:
    """One whose drafter takes so long for each token; and how many sequences each call of it had."""
    clock, calls = Clock(), []

    def ask(seqs: list[Sequence], rooms: list[int]) -> list[Draft | None]:
        calls.append(len(seqs))
        clock.now += seconds_per_token * max(rooms)
        return [Draft((7,) * room, (confidence,) * room, "draft-model") for room in rooms]

    return DrafterProposer("draft-model", 6, ask, cost, clock), calls


def steps(proposer: DrafterProposer, count: int, kept: float, num_sequences: int) -> list[int]:
    """The longest draft of each of so many steps, of which a share is accepted."""
    lengths = []
    for step in range(count):
        seqs = sequences(num_sequences)
        drafts = proposer.propose(seqs, [6] * num_sequences)
        lengths.append(max((len(draft) for draft in drafts if draft is not None), default=0))
        for i, (seq, draft) in enumerate(zip(seqs, drafts, strict=True)):
            if draft is not None:
                accepted = 0
                while accepted < len(draft) and (step * 7 + i * 3 + accepted * 5) % 10 < kept * 10:
                    accepted += 1
                proposer.learn(seq, draft, Verified([0] * (accepted + 1), None, tuple(range(accepted))))
    return lengths


def test_a_cheap_good_draft_is_asked_for_always() -> None:
    """Steps cost the same up to eight tokens, a draft token a fiftieth of it."""
    asked, _ = proposer(StepCost({1: 0.1, 8: 0.1}), 0.002, 0.9)
    assert min(steps(asked, 50, 1.0, 1)) >= 4


def test_where_nothing_pays_almost_nothing_is_drafted() -> None:
    """A step's time goes with its tokens: each token verified costs as much as one decoded plainly."""
    asked, calls = proposer(StepCost({1: 0.01, 64: 0.64, 256: 2.56}), 0.05, 0.9)
    steps(asked, 10 * PROBE_EVERY, 0.5, 32)
    assert len(calls) <= 11 and max(calls[1:]) <= PROBE_SEQUENCES
    assert asked.metrics()["declined"] > 9 * PROBE_EVERY


def test_a_first_round_that_caught_up_with_prompts_is_not_believed_for_ever() -> None:
    times = DraftTimes()
    times.observe(32, 5.0)
    times.observe(4, 0.01)
    assert times.estimate(32) == 0.08  # in proportion to the smaller round
    assert times.estimate(2) == 0.01


def test_confidence_is_what_was_seen_not_what_is_claimed() -> None:
    confidence = Confidence()
    for _ in range(200):
        confidence.learn("a", (0.95,), Draft((1,), (0.5,), "a"), Verified([2]))
    assert confidence.survival("a", (0.95,))[0] < 0.05
    assert confidence.survival("b", (0.95,))[0] == 0.95  # of another kind nothing was seen
    assert confidence.survival("a", (0.95, 0.95))[1] < 0.1  # a depth that was not seen is as its bucket


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), min_size=1, max_size=5)), max_size=12), st.data())
def test_the_ledger_never_calls_a_slot_right_that_holds_another_beginning(writes: Any, data: Any) -> None:
    """Whatever was computed in whatever order: what counts as valid is what a model of whole beginnings says."""
    ledger, blocks = SlotLedger(8, 4), [5, 2, 7, 0, 3]
    held: dict[int, tuple[int, ...] | None] = {}
    for start, tokens in writes:
        before = () if start == 0 else held.get(start - 1)
        if before is None or start + len(tokens) > 20:
            continue
        ledger.write(blocks, start, tokens)
        for position, token in enumerate(tokens, start):
            before = (*before, token)
            held[position] = before
    text = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=16))
    seq = Sequence(Request(0, text, SamplingParams()), 0, 0)
    seq.table, seq.num_computed = BlockTable(), len(text) - 1
    seq.table.blocks = blocks
    expected = 0
    while expected < seq.num_computed and held.get(expected) == tuple(text[: expected + 1]):
        expected += 1
    assert ledger.valid_len(seq) == expected == seq.drafter_len


def test_a_long_run_keeps_a_bounded_timeline_with_the_right_sums() -> None:
    timeline = Timeline()
    for step in range(3000):
        timeline.add(4, step % 5)
        timeline.kept(step % 2)
    rows = timeline.record()["rows"]
    assert len(rows) <= MOST
    assert [sum(column) for column in zip(*rows, strict=True)] == [3000, 12000, 6000, 1500]


def test_a_ledger_copies_with_its_blocks() -> None:
    ledger = SlotLedger(4, 4)
    ledger.write([0, 1], 0, [5, 6, 7, 8, 9])
    ledger.copy_block(1, 3)
    seq = SimpleNamespace(table=SimpleNamespace(blocks=[0, 3]), drafter_len=0, num_computed=5, token_ids=[5, 6, 7, 8, 9, 1])
    assert ledger.valid_len(seq) == 5  # type: ignore[arg-type]
