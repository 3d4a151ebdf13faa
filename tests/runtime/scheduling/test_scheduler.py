"""What the scheduler promises, one scene at a time."""

from __future__ import annotations

import pytest
from fake_executor import FakeRun, FakeSpeculator

from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams


def request(request_id: int, prompt: list[int], max_tokens: int = 4, priority: int = 0, **options: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **options})  # type: ignore[arg-type]
    return Request(request_id, prompt, params, draw_key=request_id, priority=priority)


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i * i) % 6 for i in range(length)]


@pytest.mark.parametrize("length", [8, 12, 16])
def test_equal_prompts_that_end_at_a_block_edge_may_arrive_together(length: int) -> None:
    """The second one shared the last block too and copied it before the first had written it: it read what was never stored."""
    run = FakeRun(num_blocks=64, block_size=4)
    for i in range(3):
        run.add(request(i, prompt(length)))
    run.finish(max_steps=8)


def test_answers_of_one_request_start_together_at_a_block_edge() -> None:
    """The same fault with n > 1: sibling answers are admitted in one step."""
    run = FakeRun(num_blocks=64, block_size=8)
    run.add(request(0, prompt(16), n=4))
    run.finish(max_steps=8)


@pytest.mark.parametrize("length", [13, 16, 17])
def test_a_late_sibling_forks_the_prompt_and_computes_one_token_of_it(length: int) -> None:
    """An answer that starts after its sibling shares even the block that is not full, by copy-on-write."""
    run = FakeRun(num_blocks=64, block_size=8, max_num_batched_tokens=length)
    run.add(request(0, prompt(length), max_tokens=6, n=3))
    assert [item.num_tokens for item in run.step().scheduled] == [length]
    plan = run.step()
    assert [item.num_tokens for item in plan.scheduled] == [1, 1, 1]
    assert len(plan.copies) == (0 if (length - 1) % 8 == 0 else 2)
    run.finish(max_steps=8)


def test_sixty_four_prompts_with_one_beginning_compute_it_once() -> None:
    """All of them miss the cache at once: the first must be seen by the others within its own step."""
    run = FakeRun(num_blocks=400, block_size=4, max_num_seqs=64, max_num_batched_tokens=64, max_model_len=128)
    common = prompt(80)
    for i in range(64):
        run.add(request(i, [*common, i % 6, i // 6 % 6, 1 + i // 36], max_tokens=2))
    run.finish(max_steps=40)
    assert run.executor.num_computed_tokens == 80 + 64 * (3 + 1)


def test_blocks_of_finished_requests_serve_later_ones() -> None:
    """The cache outlives its sequences; the last token of the prompt is computed again."""
    run = FakeRun(num_blocks=16, block_size=4)
    for i in range(2):
        run.add(request(i, prompt(12), max_tokens=1))
        run.finish(max_steps=2)
    assert run.sequences[1].num_cached_tokens == 8
    assert run.executor.num_computed_tokens == 12 + 4


def test_prompts_of_two_kinds_share_nothing() -> None:
    """Keys that depend on more than the tokens (dynamic rope) have a salt; another salt's blocks are wrong ones."""
    run = FakeRun(num_blocks=64, block_size=4)
    for i in range(4):
        run.add(request(i, prompt(13)), salt=i % 2)
    run.finish(max_steps=8)
    assert run.executor.num_computed_tokens == 2 * (13 + 1) + 4 * 3


@pytest.mark.parametrize("num_blocks", [8, 9, 16])
def test_requests_that_cannot_run_together_end_all_the_same(num_blocks: int) -> None:
    """B36: each fills the pool nearly alone. They were admitted, evicted, admitted again, for ever."""
    run = FakeRun(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=16)
    for i in range(6):
        run.add(request(i, prompt(20, first=i), max_tokens=12))
    run.finish(max_steps=6 * 32)
    assert run.scheduler.num_preemptions < 6 * 12


def test_growing_answers_preempt_the_last_in_rank() -> None:
    """Without preemption growth would have nowhere to go; with it the first to come must be the first to end."""
    run = FakeRun(num_blocks=12, block_size=4, max_num_seqs=4)
    for i in range(4):
        run.add(request(i, prompt(8, first=i), max_tokens=20))
    run.finish(max_steps=4 * 28)
    assert run.scheduler.num_preemptions > 0
    assert run.sequences[0].num_preemptions == 0
    assert list(run.answers) == sorted(run.answers)


def test_a_decode_that_was_planned_first_can_still_be_preempted() -> None:
    """Decodes are planned before a prefill that outranks them: what it takes back must leave the plan, and its tokens the budget."""
    run = FakeRun(num_blocks=32, block_size=1, max_num_seqs=4, max_num_batched_tokens=8)
    for i in range(2):
        run.add(request(i, prompt(2, first=i), max_tokens=20, priority=1))
    run.step()
    run.add(request(2, prompt(24), max_tokens=2, priority=0))
    while run.scheduler.num_preemptions == 0:
        plan = run.step()
    assert [item.seq.request.request_id for item in plan.scheduled] == [0, 2]
    run.finish(max_steps=60)


def test_a_long_prefill_leaves_every_decode_its_token() -> None:
    """Chunked prefill takes what is left of the budget, never what the answers in progress need."""
    run = FakeRun(num_blocks=64, block_size=4, max_num_batched_tokens=8, max_model_len=128)
    for i in range(4):
        run.add(request(i, prompt(2, first=i), max_tokens=30))
    run.step()
    run.add(request(9, prompt(60), max_tokens=3))
    for _ in range(10):
        plan = run.step()
        assert [item.num_tokens for item in plan.scheduled] == [1, 1, 1, 1, 4]
    run.finish(max_steps=60)


def test_a_large_request_is_not_overtaken_for_ever_by_small_ones() -> None:
    """The queue waits for its head: small requests that keep coming would otherwise take every block that becomes free."""
    run = FakeRun(num_blocks=10, block_size=4, max_num_seqs=4)
    for i in range(3):
        run.add(request(i, prompt(6, first=i), max_tokens=6))
    run.add(request(100, prompt(30), max_tokens=6))
    for i in range(3, 40):
        run.add(request(i, prompt(6, first=i % 5), max_tokens=6))
        run.step()
    assert (100, 0) in run.answers
    run.finish(max_steps=400)


def test_a_lower_priority_number_goes_first() -> None:
    """And among equals the earlier one."""
    run = FakeRun(num_blocks=64, block_size=4, max_num_seqs=1)
    for i, priority in enumerate([1, 0, 1, -1, 0]):
        run.add(request(i, prompt(5, first=i), max_tokens=2, priority=priority))
    run.finish(max_steps=10)
    assert [key[0] for key in run.answers] == [3, 1, 4, 0, 2]


def test_an_answer_ends_where_the_context_ends() -> None:
    """max_tokens None means up to the context; no position past it is ever computed."""
    run = FakeRun(num_blocks=4, block_size=4, max_model_len=16)
    run.add(request(0, prompt(10), max_tokens=None))  # type: ignore[arg-type]
    run.finish(max_steps=6)
    assert run.answers[0, 0][1] == "length" and len(run.answers[0, 0][0]) == 6


def test_without_prefix_caching_nothing_is_left_idle() -> None:
    """Blocks go straight back to the free list, and every prompt token is computed."""
    run = FakeRun(num_blocks=32, block_size=4, enable_prefix_caching=False)
    for i in range(3):
        run.add(request(i, prompt(9), max_tokens=1))
    run.finish(max_steps=3)
    assert run.executor.num_computed_tokens == 27
    assert len(run.kv.index) == 0


@pytest.mark.parametrize("num_blocks", [64, 12])
def test_a_sequence_that_outgrows_its_keys_is_computed_anew(num_blocks: int) -> None:
    """Longrope changes the keys of all tokens at one length: no later step, sibling or prefix may read what was stored before."""
    run = FakeRun(num_blocks=num_blocks, block_size=4, recompute_at=21)
    for i in range(3):
        run.add(request(i, prompt(14 + 3 * i), max_tokens=12, n=2), salt=0)
    run.add(request(3, prompt(24), max_tokens=12), salt=21)
    run.finish(max_steps=200)
    outgrown = [seq for seq in run.sequences if seq.prompt_len < 21]
    assert len(outgrown) == 6 and all(seq.cache_salt == seq.rope_len == 21 for seq in outgrown)


def test_an_answer_does_not_fork_a_sibling_that_was_computed_anew() -> None:
    run = FakeRun(num_blocks=64, block_size=4, max_num_seqs=1, recompute_at=9)
    run.add(request(0, prompt(7), max_tokens=6, n=2))
    run.finish(max_steps=40)


@pytest.mark.parametrize("num_blocks", [200, 14])
@pytest.mark.parametrize("depth", [1, 4, 8])
def test_drafts_save_steps_and_change_no_answer(depth: int, num_blocks: int) -> None:
    """Chains and trees, right and wrong, with room and with a pool that preempts in between: `finish` compares the answers."""
    plain, run = (FakeRun(num_blocks=num_blocks, block_size=4, speculator=s) for s in (None, FakeSpeculator(depth)))
    for either in (plain, run):
        for i in range(8):
            either.add(request(i, prompt(9 + i), max_tokens=30))
        either.finish(max_steps=1000)
    learned = run.speculator.learned
    assert any(accepted for _, accepted in learned) and any(accepted == 0 for _, accepted in learned)
    assert not run.speculator.held, "a sequence that ended is still held"
    if num_blocks == 200:
        assert any(accepted >= min(depth, 4) for _, accepted in learned)
        assert run.num_steps < plain.num_steps


def test_a_draft_takes_no_more_than_the_budget_and_the_blocks_hold() -> None:
    """Three sequences in a full pool: nobody is preempted for a draft, and a step stays within its tokens."""
    run = FakeRun(num_blocks=12, block_size=4, max_num_batched_tokens=8, speculator=FakeSpeculator(6))
    for i in range(3):
        run.add(request(i, prompt(5), max_tokens=10))
    run.finish(max_steps=100)  # each step asserts its budget
    assert run.scheduler.num_preemptions == 0
    assert run.speculator.learned


def test_no_draft_reaches_past_where_the_answer_or_the_keys_end() -> None:
    run = FakeRun(num_blocks=64, block_size=4, max_model_len=20, recompute_at=12, speculator=FakeSpeculator(6))
    for i in range(6):
        run.add(request(i, prompt(4 + i), max_tokens=4 + 2 * i))
    while run.scheduler.num_unfinished:
        for item in run.step().scheduled:
            end = min(20, item.seq.prompt_len + item.seq.request.params.max_tokens)
            longest = item.draft.longest() if item.draft else 0
            assert item.seq.num_tokens <= end, "tokens past the end"
            assert longest <= 6
    run.finish(max_steps=0)


def test_room_for_a_draft_does_not_move_a_block_that_a_newcomer_shares() -> None:
    """The block that this step fills is shared with whoever is admitted in it; making room behind it copied it away from under both."""
    run = FakeRun(num_blocks=32, block_size=2, speculator=FakeSpeculator(3))
    run.add(request(0, prompt(3), max_tokens=12))
    run.step()
    run.add(request(1, [*run.sequences[0].token_ids, 5], max_tokens=4))
    plan = run.step()
    assert [item.num_tokens for item in plan.scheduled] == [1, 1] and run.sequences[1].num_cached_tokens == 4
    assert not plan.copies
    run.finish(max_steps=12)


def test_a_sequence_is_drafted_for_from_its_second_step_on() -> None:
    """In its first one the blocks that it shares may still be empty, and a drafter would read what no one has written."""
    run = FakeRun(num_blocks=32, block_size=2, speculator=FakeSpeculator(3))
    asked: list[int] = []
    propose = run.speculator.propose
    run.speculator.propose = lambda sequences, *rest: asked.extend(s.request.request_id for s in sequences) or propose(sequences, *rest)
    run.add(request(0, prompt(1), max_tokens=8))
    run.step()
    run.add(request(1, prompt(1), max_tokens=8))
    assert not asked
    run.step()
    assert asked == [0]
    run.finish(max_steps=16)
