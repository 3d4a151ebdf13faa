"""Ten thousand random speculative steps: no block is lost, every read is a line's own, every answer is the undisturbed one."""

from __future__ import annotations

import random
from collections import Counter

from fake_executor import FakeRun, FakeSpeculator

from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams

STEPS = 10_000
PREFIXES = ([0, 1, 2, 3, 4, 5, 0, 2] * 3, [0, 1, 2, 3, 4, 5, 0, 2, 1, 1, 1, 1], [5] * 16)


def random_run(dice: random.Random) -> FakeRun:
    """From a pool for little more than one line to one for all, blocks of one token to eight."""
    block_size = dice.choice([1, 2, 4, 8])
    return FakeRun(
        num_blocks=-(-dice.choice([48, 52, 60, 72, 400]) // block_size),
        block_size=block_size,
        max_num_seqs=dice.randint(1, 8),
        max_num_batched_tokens=dice.choice([6, 9, 16, 64]),
        enable_prefix_caching=dice.random() < 0.8,
        recompute_at=dice.choice([None, None, 20]),
        speculator=FakeSpeculator(dice.choice([1, 3, 6, 8])),
    )


def random_request(request_id: int, dice: random.Random) -> Request:
    prompt = dice.choice(PREFIXES)[: dice.randint(1, dice.choice([4, 16]))] + [dice.randrange(3) for _ in range(dice.randint(0, 3))]
    params = SamplingParams(
        max_tokens=dice.randint(1, 28),
        ignore_eos=dice.random() < 0.8,
        n=dice.choice([1, 1, 2, 3]),
        stop_token_ids=dice.choice([(), (), (4,)]),
    )
    return Request(request_id, prompt, params, draw_key=dice.randrange(4), priority=dice.choice([0, 0, 0, 1, -1]))


def note(run: FakeRun, seen: Counter[str]) -> None:
    """One step, and what happened in it."""
    drafts = len(run.speculator.learned)
    for item in run.step().scheduled:
        if item.draft:
            seen["trees" if item.draft.parents else "chains"] += 1
    for nodes, accepted in run.speculator.learned[drafts:]:
        seen["rejected" if accepted == 0 else "accepted" if accepted == nodes else "accepted in part"] += 1


def test_ten_thousand_random_steps_keep_every_block_accounted_for() -> None:
    dice, seen = random.Random(29), Counter[str]()
    while seen["steps"] < STEPS:
        run = random_run(dice)
        for request_id in range(dice.randint(1, 12)):
            request = random_request(request_id, dice)
            if run.fits(request):
                run.add(request)
            for _ in range(dice.choice([0, 0, 1, 3])):
                if run.scheduler.num_unfinished:
                    note(run, seen)
        while run.scheduler.num_unfinished:
            note(run, seen)
        run.finish(max_steps=0)  # compares every answer and counts the blocks that are still held
        assert not run.speculator.held
        seen.update(steps=run.num_steps, preemptions=run.scheduler.num_preemptions, answers=len(run.answers))
        seen.update(reason for _, reason in run.answers.values())
    rare = {name: count for name, count in seen.items() if count < 200}
    assert not rare and len(seen) == 10, f"too little of something happened: {seen}"
