"""Run as a script with TRITON_INTERPRET=1: drawing on the device against the host's loops and the slow clear forms; one JSON line a check.

python triton_sampling.py [NAME ...]      all checks without a name
"""

import itertools
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton_interpreter import report_all

from dspark.kernels.triton import sampling as kernels
from dspark.runtime.sampling.device import DeviceRows, row_options
from dspark.runtime.sampling.draw import argmax_rows, top2_gaps
from dspark.runtime.sampling.filters import probabilities
from dspark.runtime.sampling.penalties import changes_logits, process_row
from dspark.runtime.sampling.rng import exponential_noise, row_key
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.plan import ScheduledSequence
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.draft import Draft
from dspark.runtime.speculation.rejection import verify_rejection
from dspark.runtime.speculation.verify import verify_coupled

Options = tuple[float, int, float, float]
"""temperature, top_k, top_p, min_p"""
EOS = frozenset({7})
ALL = list(itertools.product([0.3, 1.7], [0, 1, 5, 300], [1.0, 0.999999, 0.9, 0.3, 1e-9], [0.0, 0.02, 1.0]))
COMBINATIONS = random.Random(3).sample(ALL, 25)
"""As many as an interpreter can do."""


def sequence(number: int, answer: tuple[int, ...] = (), index: int = 0, **options: Any) -> Sequence:
    seq = Sequence(Request(number, [1, 2, 3], SamplingParams(**options), draw_key=1000 + number), index, number)
    seq.token_ids += answer
    seq.num_computed = seq.num_tokens - 1
    return seq


def with_options(number: int, options: Options) -> Sequence:
    temperature, top_k, top_p, min_p = options
    return sequence(number, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def logits_of(kind: str, num_rows: int, vocab_size: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=g) * 3
    if kind == "peaked":
        logits[:, :5] += 12
    elif kind == "tied":
        logits = logits.round()
    elif kind == "masked":
        logits[:, ::3] = float("-inf")
    elif kind == "wide":
        logits *= 60
    return logits


def draw(logits: torch.Tensor, sequences: list[Sequence], device: str = "cpu") -> list[int]:
    return DeviceRows(EOS).prepare(sequences, [seq.num_tokens for seq in sequences])(logits.to(device, copy=True)).tolist()


def check_draws(kind: str, vocab_size: int, device: str = "cpu") -> None:
    """Each token wins the race over the filtered probabilities; one in hundreds may stand within rounding of another or of a cut."""
    logits = logits_of(kind, len(COMBINATIONS), vocab_size)
    sequences = [with_options(i, options) for i, options in enumerate(COMBINATIONS)]
    noise = exponential_noise([row_key(1000 + i, 0, 3) for i in range(len(sequences))], vocab_size)
    others = 0
    for row, (token, options) in enumerate(zip(draw(logits, sequences, device), COMBINATIONS, strict=True)):
        race = noise[row] / probabilities(logits[row], *options)
        best = int(race.argmin())
        if token != best:
            others += 1
            assert race[token] <= race[best] * (1 + 1e-4), (options, token, best)
    assert others <= 1, others


def check_cuts_among_equals(device: str = "cpu") -> None:
    """All logits equal: top-k and top-p keep the first ids, over more tokens than one block; a token is dropped when those before it have
    the mass exactly."""
    cuts = [((1.0, 4500, 1.0, 0.0), 4500), ((1.0, 0, 0.5, 0.0), 2500), ((1.0, 4600, 0.25, 1.0), 1150), ((1.0, 1, 1.0, 0.0), 1)]
    small = [((1.0, k, p, 0.0), kept) for p, kept in ((0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4)) for k in (0, 4)]
    for vocab, each in ((5000, cuts), (4, small)):
        sequences = [with_options(i, options) for i, (options, _) in enumerate(each * 3)]
        want = [int(exponential_noise([row_key(1000 + i, 0, 3)], kept).argmin()) for i, (_, kept) in enumerate(each * 3)]
        assert draw(torch.zeros(len(sequences), vocab), sequences, device) == want


def check_noise(device: str = "cpu") -> None:
    """The winner among equal logits is the smallest exponential, bit for bit: small ones decide every draw."""
    rows = 30
    noise = exponential_noise([row_key(1000 + i, 0, 3) for i in range(rows)], 6000)
    sequences = [sequence(i, temperature=1.0) for i in range(rows)]
    assert draw(torch.zeros(rows, 6000), sequences, device) == noise.argmin(1).tolist()


def check_best(dtype: torch.dtype, device: str = "cpu") -> None:
    """Greedy: the lowest of equals, -1 for NaN and for no finite logit, top-two gaps."""
    logits = logits_of("plain", 8, 5001).to(dtype)
    logits[0] = 0
    logits[1, [4999, 30, 700]] = 50.0
    logits[2, 4500] = float("nan")
    logits[3] = float("-inf")
    logits[4, 9] = float("inf")
    logits[5, 1:] = float("-inf")
    sequences = [sequence(i) for i in range(8)]
    drawn, _ = DeviceRows(EOS).draw(logits.to(device, copy=True), sequences, gaps=True)
    want = argmax_rows(logits.float().numpy())
    assert drawn.tokens.tolist() == want.tolist() and drawn.tokens.tolist()[:6] == [0, 30, -1, -1, -1, 0]
    good = want >= 0
    assert np.array_equal(drawn.gaps[good], top2_gaps(logits.float().numpy()[good], want[good]))
    assert draw(logits, sequences, device) == want.tolist()
    random_rows = [sequence(i, temperature=1.0) for i in range(8)]
    assert [token < 0 for token in draw(logits, random_rows, device)] == [token < 0 for token in want.tolist()]


def mixed(count: int, seed: int) -> list[Sequence]:
    """Sequences with options of all kinds."""
    dice = random.Random(seed)
    made = []
    for number in range(count):
        options: dict[str, Any] = {"temperature": dice.choice([0.0, 0.7, 1.3])}
        options |= dice.choice([{}, {"top_k": dice.choice([1, 5, 50])}, {"top_p": dice.choice([0.3, 0.95])}, {"min_p": 0.1}])
        options |= dice.choice([{}, {"repetition_penalty": dice.choice([0.5, 1.4])}])
        options |= dice.choice([{}, {"presence_penalty": 0.6}, {"frequency_penalty": -0.4, "presence_penalty": 0.25}])
        options |= dice.choice([{}, {"logit_bias": ((4, 3.0), (11, -100.0), (1, 2.5))}])
        options |= dice.choice([{}, {"min_tokens": 3, "stop_token_ids": (8, 4)}, {"min_tokens": 2, "ignore_eos": True}])
        answer = tuple(dice.choices(range(12), k=dice.choice([0, 1, 4])))
        made.append(sequence(seed * 1000 + number, answer, dice.choice([0, 3]), **options))
    return made


def check_edits(device: str = "cpu") -> None:
    """Penalties, bias and forbidden tokens change the very bits that the host's functions change."""
    sequences = mixed(60, 1)
    logits = logits_of("plain", 60, 700)
    logits[:, 2] = float("-inf")
    _, rows = DeviceRows(EOS).draw(logits.to(device, copy=True), sequences)
    wide = logits.numpy().copy()
    for row, seq in enumerate(sequences):
        if changes_logits(seq.request.params, seq.num_output_tokens):
            process_row(wide[row], seq.request.params, seq.token_ids, seq.prompt_len, EOS)
    assert np.array_equal(rows.cpu().numpy(), wide)


@settings(max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), half=st.booleans())
def check_sampler(seed: int, half: bool) -> None:
    """The sampler on the device draws what it draws on the host; a row's token depends on no other row."""
    sequences = mixed(12, seed)
    logits = logits_of(random.Random(seed).choice(["plain", "tied", "peaked"]), 12, 900 + seed % 100)
    logits = logits.half() if half else logits
    device = Sampler(EOS, True, DeviceRows(EOS))
    tokens, gaps = device.sample(logits.clone(), sequences)
    want, want_gaps = Sampler(EOS, True).sample(logits.clone(), sequences)
    assert (tokens, gaps) == (want, want_gaps)
    order = list(range(12))
    random.Random(seed).shuffle(order)
    assert draw(logits[order], [sequences[i] for i in order]) == [tokens[i] for i in order]
    assert draw(logits[3:4], sequences[3:4]) == tokens[3:4]


def check_positions() -> None:
    """Positions beyond what the host knows draw what will be drawn when it knows the tokens."""
    ahead = [sequence(i, (5,), temperature=1.0, top_k=9, min_tokens=2) for i in range(6)]
    known = [sequence(i, (5, 6), temperature=1.0, top_k=9, min_tokens=2) for i in range(6)]
    logits = logits_of("plain", 6, 500)
    rows = DeviceRows(EOS)
    assert all(rows.draws_alone(seq) for seq in ahead) and not rows.draws_alone(sequence(0, repetition_penalty=1.2))
    assert rows.prepare(ahead, [seq.num_tokens + 1 for seq in ahead])(logits.clone()).tolist() == draw(logits, known)


def drafted(seed: int, vocab: int, chance_of_none: float = 0.2) -> list[ScheduledSequence]:
    """Sequences with chains behind them, drawn from distributions or certain, likely ones and unlikely ones."""
    dice, g = random.Random(seed), torch.Generator().manual_seed(seed)
    items = []
    for seq in mixed(6, seed):
        draft = None
        if dice.random() > chance_of_none:
            length = dice.randint(1, 4)
            tokens = tuple(dice.choices(range(12), k=length))
            spread = None
            if dice.random() < 0.6:
                spread = torch.softmax(torch.randn(length, vocab, generator=g) * 2, -1)
                tokens = tuple(int(row.argmax()) for row in spread)
            draft = Draft(tokens, (0.5,) * length, "test", None, spread)
        items.append(ScheduledSequence(seq, 1, draft))
    return items


@settings(max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6))
def check_rejection(seed: int) -> None:
    """Both rules keep on the device what they keep on the host, and the same tokens follow."""
    vocab = 300
    items = drafted(seed, vocab)
    num_rows = sum(1 + (len(item.draft) if item.draft else 0) for item in items)
    logits = logits_of("plain", num_rows, vocab)
    logits[:, :12] += 3  # drafts are kept now and then
    for verify in (verify_coupled, verify_rejection):
        device, host = (verify(Sampler(EOS, True, rows), logits.clone(), items) for rows in (DeviceRows(EOS), None))
        assert device == host, (verify.__name__, device, host)


def check_rejection_keeps_the_law() -> None:
    """Over many positions the first token has the target's law, whatever the draft's was (chi-square, a fixed stream)."""
    count, probs = 300, torch.tensor([0.5, 0.25, 0.15, 0.1])
    q = torch.tensor([0.1, 0.2, 0.3, 0.4])
    logits = probs.log().repeat(2 * count, 1)
    dice = random.Random(5)
    items = []
    for i in range(count):
        token = dice.choices(range(4), weights=q.tolist())[0]
        items.append(ScheduledSequence(sequence(i, temperature=1.0), 1, Draft((token,), (0.5,), "test", None, q[None])))
    gained = verify_rejection(Sampler(EOS, False, DeviceRows(EOS)), logits, items)
    seen = np.bincount([verified.token_ids[0] for verified in gained], minlength=4)
    wanted = probs.numpy() * count
    assert float(((seen - wanted) ** 2 / wanted).sum()) < 30, seen
    kept = sum(len(verified.token_ids) == 2 for verified in gained) / count
    assert abs(kept - float(torch.minimum(probs, q).sum())) < 0.1, kept


def check_option_columns() -> None:
    """The kernels' columns and the launcher's are the same."""
    from dspark.kernels.triton import sampling_kernels

    names = ("IS_RANDOM", "INVERSE", "TOP_K", "TOP_P", "MIN_P", "KEY", "DRAFT", "SOURCE", "CHANCE")
    assert [getattr(sampling_kernels, name).value for name in names] == [getattr(kernels, name) for name in names]
    assert sampling_kernels.COLUMNS.value == kernels.NUM_OPTIONS == row_options([sequence(0)], [3]).shape[1]


KINDS = ("plain", "peaked", "tied", "masked", "wide")
CHECKS: dict[str, Callable[[], Any]] = {
    **{f"draws-{kind}-{vocab}": partial(check_draws, kind, vocab) for kind in KINDS for vocab in (7, 3001)},
    "draws-plain-9000": partial(check_draws, "plain", 9000),
    "cuts_among_equals": check_cuts_among_equals,
    "noise": check_noise,
    "best-float32": partial(check_best, torch.float32),
    "best-float16": partial(check_best, torch.float16),
    "edits": check_edits,
    "sampler": check_sampler,
    "positions": check_positions,
    "rejection": check_rejection,
    "rejection_law": check_rejection_keeps_the_law,
    "option_columns": check_option_columns,
}


def main() -> None:
    torch.set_num_threads(1)
    report_all({name: CHECKS[name] for name in sys.argv[1:] or CHECKS})


if __name__ == "__main__":
    main()
