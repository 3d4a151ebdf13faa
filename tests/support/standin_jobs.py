"""Random jobs for stand-in engines, and what the record of a job's steps must look like."""

from __future__ import annotations

from typing import Any

from hypothesis import Phase
from hypothesis import strategies as st

from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams

PREFIXES = ([0, 1, 2, 3, 4, 5, 0, 2] * 3, [0, 1, 2, 3, 4, 5, 0, 2, 1, 1, 1, 1], [5] * 16)
UNSHRUNK = (Phase.explicit, Phase.generate)  # a failing run shrinks for minutes: remove this to see the smallest one

engines = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([6, 7, 9, 16, 64]),
        "max_model_len": st.sampled_from([30, 64]),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
    }
)
pools = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4, 8]),
        "num_tokens": st.sampled_from([40, 44, 64, 96, 400]),
        "recompute_at": st.sampled_from([None, None, 20]),
    }
)
requests = st.fixed_dictionaries(
    {
        "prefix": st.sampled_from(PREFIXES),
        "cut": st.integers(1, 24),
        "tail": st.lists(st.integers(0, 2), max_size=3),
        "draw_key": st.integers(0, 2),
        "priority": st.sampled_from([0, 0, 0, 1, -1]),
        "steps": st.integers(0, 4),
        "params": st.fixed_dictionaries(
            {
                "n": st.sampled_from([1, 1, 1, 2, 3]),
                "max_tokens": st.integers(1, 16),
                "min_tokens": st.sampled_from([0, 0, 3]),
                "ignore_eos": st.booleans(),
                "stop": st.sampled_from([(), (), (), ("ab",), ("f", "cc")]),
                "stop_token_ids": st.sampled_from([(), (), (4,)]),
                "repetition_penalty": st.sampled_from([1.0] * 7 + [1.5]),
            }
        ),
    }
)
delays = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)


def arrival(request_id: int, spec: dict[str, Any]) -> tuple[int, Request]:
    params = {**spec["params"], "min_tokens": min(spec["params"]["min_tokens"], spec["params"]["max_tokens"])}
    prompt = spec["prefix"][: spec["cut"]] + spec["tail"]
    return spec["steps"], Request(request_id, prompt, SamplingParams(**params), spec["draw_key"], spec["priority"])


def greedy(request_id: int, prompt: list[int], max_tokens: int = 12, **options: Any) -> Request:
    return Request(request_id, prompt, SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **options}), draw_key=request_id)


def check_order(log: list[tuple[str, int]]) -> int:
    """Every step is read once, in order, and at most two are under way. Returns how many were submitted before the last was read."""
    under_way: list[int] = []
    submitted = ahead = 0
    for kind, number in log:
        if kind == "submit":
            assert number == submitted and len(under_way) < 2
            ahead += len(under_way)
            under_way.append(number)
            submitted += 1
        else:
            assert number == under_way.pop(0)
    assert not under_way, "a step is never read"
    return ahead
