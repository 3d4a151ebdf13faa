"""Faults of speculative decoding that users of other tools reported: ends inside an accepted block, options, a short draft context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from case_checkpoints import llama_config, llama_state, save_checkpoint
from engine_runs import texts, tiny_engine
from safetensors.torch import load_file, save_file
from tiny_models import EOS_ID, PROMPTS, build_tokenizer, make_tiny_checkpoint

from dspark.converters.pipeline import convert
from dspark.runtime.engine import Engine
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.choice import choose_speculation

TEXT = "Quick\U0001f642 th\u00e9 END."


def chain_engine(directory: Path, successors: dict[int, int], otherwise: int, seconds: dict[int, int] | None = None) -> Path:
    """A model in which each token has one successor: its layers add nothing, the head reads the token off the embedding. seconds: another
    successor of a token that is nearly as likely."""
    config = llama_config()
    state = llama_state(config)
    for name, weight in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif name.endswith("norm.weight"):
            weight.fill_(1.0)
    embedding, head = torch.zeros_like(state["model.embed_tokens.weight"]), torch.zeros_like(state["lm_head.weight"])
    embedding[:, 0] = 1.0
    head[otherwise, 0] = 12.0
    for dimension, (token, following) in enumerate(successors.items(), 1):
        embedding[token] = 0.0
        embedding[token, dimension] = 1.0
        head[following, dimension] = 12.0
        if seconds is not None:
            head[seconds[token], dimension] = 11.95
    state["model.embed_tokens.weight"], state["lm_head.weight"] = embedding, head
    save_checkpoint(directory / "checkpoint", config, state)
    convert(directory / "checkpoint", directory / "engine", dtype="float32", audit=False)
    return directory / "engine"


def answers(engine_dir: Path, requests: list[Request], draft: Path | None = None, length: int = 4, **config: Any) -> Any:
    """(token ids, texts and finish reasons by request, speculation's metrics)."""
    if draft is not None:
        config |= {"speculative": "draft-model", "draft": str(draft), "num_speculative_tokens": length}
    settings = EngineConfig(device="cpu", kv_cache_memory_bytes=64 << 20, **config)
    engine = Engine.from_directory(engine_dir, settings, load_codec(engine_dir))
    for request in requests:
        engine.add(request)
    outputs = {output.request_id: output for output in engine.drain()}
    ends = {key: [(c.text, c.finish_reason, c.stop_reason) for c in output.completions] for key, output in sorted(outputs.items())}
    metrics = engine.metrics()["speculation"]
    engine.close()
    return texts(outputs), ends, metrics


@pytest.fixture(scope="module")
def path() -> list[int]:
    ids = build_tokenizer().encode(TEXT, add_special_tokens=False).ids
    assert len(set(ids)) == len(ids)
    return [*ids, EOS_ID]


@pytest.fixture(scope="module")
def chain(path: list[int], tmp_path_factory) -> Path:
    return chain_engine(tmp_path_factory.mktemp("chain"), dict(pairwise(path)), path[0])


@pytest.fixture(scope="module")
def chain_drafts(path: list[int], tmp_path_factory) -> dict[str, Path]:
    """One that is right, one that is wrong at every second token, one that goes on where the answer ends."""
    follow = dict(pairwise(path))
    kinds = {
        "agree": follow,
        "half": {token: 77 if i % 2 else following for i, (token, following) in enumerate(follow.items())},
        "past_eos": {**follow, path[-2]: 99, 99: 98, 98: 97},
    }
    return {kind: chain_engine(tmp_path_factory.mktemp(kind), successors, path[0]) for kind, successors in kinds.items()}


@pytest.mark.parametrize("kind", ["agree", "half", "past_eos"])
def test_an_end_inside_an_accepted_block_is_the_end(chain: Path, chain_drafts: dict[str, Path], path: list[int], kind: str) -> None:
    """End of text, stop strings, max_tokens and min_tokens land in the middle of what a step accepts (case B32)."""
    start = build_tokenizer().encode("zz").ids
    options: list[dict[str, Any]] = [{"max_tokens": count} for count in (1, 2, 3, 5, 8, len(path) - 1, len(path), len(path) + 1, 40)]
    options += [{"max_tokens": 40, "min_tokens": count} for count in (5, len(path) - 1, len(path) + 6)]
    options += [{"max_tokens": 30, "ignore_eos": True}]
    options += [
        {"max_tokens": most, "stop": (stop,)} for stop, most in (("ick", 4), ("ick", 3), ("h\u00e9", 12), ("END.", 40), ("END.", 18))
    ]
    requests = [Request(i, start, SamplingParams(temperature=0.0, **option)) for i, option in enumerate(options)]
    plain, ends, _ = answers(chain, requests)
    assert plain[8] == [path] and ends[8][0][1] == "stop" and ends[2][0][1] == "length"
    for length in range(1, 9):
        found, found_ends, metrics = answers(chain, requests, chain_drafts[kind], length)
        assert (found, found_ends) == (plain, ends)
        assert metrics["accepted_tokens"] > 0


GREEDY: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.8},
    {"frequency_penalty": 0.8},
    {"min_tokens": 10},
    {"min_p": 0.2},
    {"logit_bias": ((60, 5.0), (100, -100.0))},
    {"top_k": 1},
)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Path]:
    yield tiny_engine(tmp_path_factory.mktemp("target"))


def test_greedy_answers_do_not_change_under_any_option(target: Path, tmp_path: Path) -> None:
    """Penalties and min_tokens count tokens, not steps, in the draft's rows too (case B33)."""
    codec = load_codec(target)
    requests = [
        Request(i, codec.encode(PROMPTS[i % len(PROMPTS)]), SamplingParams(temperature=0.0, max_tokens=40, **option))
        for i, option in enumerate(GREEDY)
    ]
    plain, ends, _ = answers(target, requests)
    stranger = tiny_engine(tmp_path / "stranger", seed=1234)
    near = nearly(tmp_path / "near")
    for draft in (target, near, stranger):
        for length in (1, 2, 3, 4, 5):
            found, found_ends, metrics = answers(target, requests, draft, length)
            assert (found, found_ends) == (plain, ends)
            if draft == target:
                assert metrics["acceptance_rate"] > 0.95
            if draft == near:
                assert 0.1 < metrics["acceptance_rate"] < 0.95


def nearly(directory: Path) -> Path:
    """The target with a little noise on every weight."""
    checkpoint = make_tiny_checkpoint(directory / "checkpoint", "llama")
    weights, noise = load_file(checkpoint / "model.safetensors"), torch.Generator().manual_seed(4)
    moved = {name: weight + 0.02 * torch.randn(weight.shape, generator=noise) for name, weight in weights.items()}
    save_file(moved, checkpoint / "model.safetensors", {"format": "pt"})
    convert(checkpoint, directory / "engine", dtype="float32", audit=False)
    return directory / "engine"


@pytest.mark.parametrize("penalty", [{}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.8}, {"presence_penalty": 0.8}], ids=str)
def test_penalties_in_a_cycle_count_tokens_not_steps(path: list[int], penalty: dict[str, float], tmp_path: Path) -> None:
    """A model that would go round for ever, each step with a close second choice; its draft knows the round only (case B33)."""
    around = dict(pairwise([*path[:-1], path[0]]))
    seconds = {token: 40 + i for i, token in enumerate(around)}
    engine = chain_engine(tmp_path / "target", around, path[0], seconds)
    draft = chain_engine(tmp_path / "draft", around, path[0])
    requests = [Request(0, build_tokenizer().encode("xx").ids, SamplingParams(temperature=0.0, max_tokens=40, **penalty))]
    plain, ends, _ = answers(engine, requests)
    assert (plain[0][0] != (path[:-1] * 40)[:40]) == bool(penalty)
    for length in range(1, 9):
        found, found_ends, metrics = answers(engine, requests, draft, length)
        assert (found, found_ends) == (plain, ends)
        assert metrics["accepted_tokens"] > 0


def test_beyond_the_drafts_context_decoding_goes_on_without_it(target: Path, tmp_path: Path) -> None:
    """A draft of 32 positions beside a target of 256, up to the last position of the target's context (case B35)."""
    codec = load_codec(target)
    short = tiny_engine(tmp_path, max_position_embeddings=32)
    long = codec.encode(" ".join(["the river runs"] * 20))
    assert len(long) > 32
    prompts = [codec.encode(PROMPTS[0]), long, long, codec.encode(PROMPTS[0])]
    requests = [
        Request(i, prompt, SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True))
        for i, (prompt, most) in enumerate(zip(prompts, (60, 40, None, 250), strict=True))
    ]
    plain, ends, _ = answers(target, requests)
    assert ends[2][0][1] == "length" and len(long) + len(plain[2][0]) == 256
    for length in (1, 8):
        found, found_ends, metrics = answers(target, requests, short, length)
        assert (found, found_ends) == (plain, ends)
        assert 0 < metrics["draft_tokens"] < 2 * 32  # only two lines are short enough to be drafted for
    # and where the draft reaches as far as the target, no draft passes the end of the context
    found, found_ends, _ = answers(target, requests, target, 8)
    assert (found, found_ends) == (plain, ends)


def test_the_memory_of_one_job_serves_the_next(target: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory.npy"
    codec = load_codec(target)
    requests = [Request(i, codec.encode(prompt), SamplingParams(temperature=0.0, max_tokens=30)) for i, prompt in enumerate(PROMPTS)]
    rates = []
    for _ in range(2):
        config = EngineConfig(
            device="cpu", kv_cache_memory_bytes=64 << 20, speculative="ngram", num_speculative_tokens=5, draft_memory=str(memory)
        )
        engine = Engine.from_directory(target, config, codec)
        for request in requests:
            engine.add(request)
        list(engine.drain())
        assert engine.finish() == []
        rates.append(engine.metrics()["speculation"]["accepted_tokens"])
        engine.close()
    assert rates[1] > rates[0]
    assert choose_speculation(config, target).method == "ngram"


def test_a_memory_that_cannot_be_kept_is_a_warning(target: Path, tmp_path: Path) -> None:
    config = EngineConfig(
        device="cpu", kv_cache_memory_bytes=64 << 20, speculative="ngram", draft_memory=str(tmp_path / "none" / "memory.npy")
    )
    engine = Engine.from_directory(target, config, load_codec(target))
    (warning,) = engine.finish()
    assert "memory.npy" in warning
    engine.config = replace(config, draft_memory=None)
    assert engine.finish() == []
    engine.close()
