"""The text of a request depends on the request alone: not on batch size, order, pool size, caching or neighbours."""

import random

import pytest
from engine_runs import run_requests, texts, tiny_engine

from dspark.runtime.kv.pool import bytes_per_block
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams


def make_requests(count: int = 24, seed: int = 5) -> list[Request]:
    """Prompts of 1 to 60 tokens, some with a common beginning; greedy, seeded and n > 1 mixed."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 320) for _ in range(37)]
    requests = []
    for i in range(count):
        own = [rng.randrange(3, 320) for _ in range(rng.randint(1, 23))]
        params = SamplingParams(
            max_tokens=rng.choice([1, 7, 30, 45]),
            temperature=rng.choice([0.0, 0.0, 0.8, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            n=rng.choice([1, 1, 1, 3]),
            ignore_eos=rng.random() < 0.5,
        )
        requests.append(Request(i, (common + own) if i % 3 == 0 else own, params, draw_key=rng.getrandbits(128)))
    return requests


def pool_bytes(engine, dtype, num_blocks: int) -> int:
    return num_blocks * bytes_per_block(load_manifest(engine).model, 16, dtype)


VARIANTS = {
    "one_at_a_time": {"max_num_seqs": 1},
    "eight_at_a_time": {"max_num_seqs": 8},
    "small_steps": {"max_num_seqs": 16, "max_num_batched_tokens": 16},
    "no_prefix_caching": {"enable_prefix_caching": False},
    "one_thread": {"threads": 1},
    "block_32": {"block_size": 32},
}


@pytest.fixture(scope="module", params=[("float32", None), ("bfloat16", None), ("bfloat16", "w8a16"), ("bfloat16", "w4a16")], ids=str)
def baseline(request, tmp_path_factory):
    dtype, scheme = request.param
    engine = tiny_engine(tmp_path_factory.mktemp("engine"), "llama", dtype, scheme)
    settings = {"deterministic": dtype != "float32"}
    return engine, settings, texts(run_requests(engine, make_requests(), **settings))


@pytest.mark.parametrize("variant", VARIANTS)
def test_text_is_the_same(baseline, variant: str) -> None:
    engine, settings, expected = baseline
    if variant == "one_thread" and settings["deterministic"]:
        pytest.skip("a deterministic run is promised the same bytes with the same number of threads only")
    assert texts(run_requests(engine, make_requests(), **{**settings, **VARIANTS[variant]})) == expected


def test_text_does_not_depend_on_the_order_of_requests(baseline) -> None:
    engine, settings, expected = baseline
    assert texts(run_requests(engine, make_requests()[::-1], **settings)) == expected


def test_text_survives_preemption(baseline) -> None:
    """A pool of 9 blocks: sequences are thrown out and recomputed many times."""
    import torch

    engine, settings, expected = baseline
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[load_manifest(engine).model.dtype]
    outputs = run_requests(engine, make_requests(), kv_cache_memory_bytes=pool_bytes(engine, dtype, 9), **settings)
    assert sum(o.num_preemptions for o in outputs.values()) > 0
    assert texts(outputs) == expected


def test_a_request_alone_gives_the_same_text(baseline) -> None:
    engine, settings, expected = baseline
    for request in make_requests()[:6]:
        assert texts(run_requests(engine, [request], **settings)) == {request.request_id: expected[request.request_id]}


def test_samples_of_one_request_differ(baseline) -> None:
    """n answers are n draws: the sample index is part of the key."""
    engine, settings, _ = baseline
    request = Request(0, [5, 6, 7], SamplingParams(max_tokens=20, temperature=1.5, n=4, ignore_eos=True), draw_key=1)
    answers = texts(run_requests(engine, [request], **settings))[0]
    assert len({tuple(a) for a in answers}) == 4


def test_prefix_of_many_requests_is_computed_once(baseline) -> None:
    """64 requests that share 64 tokens and miss the cache at the same moment: the shared blocks are computed by the first one only."""
    engine, settings, _ = baseline
    common = list(range(3, 67))
    requests = [Request(i, [*common, 70 + i], SamplingParams(max_tokens=2), draw_key=i) for i in range(64)]
    outputs = run_requests(engine, requests, **settings)
    assert sum(o.num_cached_tokens for o in outputs.values()) == 63 * 64
