"""Which prompts are used, which lines are only measured on, and the token that stands for a masked place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from distill_cases import SMALL, Job

from dspark.converters.distill.data import AnsweredLine, load_answers, prompts_digest, read_prompts, save_answers, split
from dspark.converters.distill.shape import choose_mask_token
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams


def read(job: Job, tmp_path: Path, lines: list[dict[str, Any]], **options: Any) -> tuple[list[Request], list[str]]:
    path, notes = tmp_path / "lines.jsonl", list[str]()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return read_prompts(path, load_codec(job.engine), load_manifest(job.engine).model, replace(SMALL, **options), notes), notes


def lines_of(count: int) -> list[AnsweredLine]:
    requests = [Request(i, [3, 4, i], SamplingParams()) for i in range(count)]
    return [AnsweredLine(request, [*request.prompt_token_ids, 5, 6]) for request in requests]


def test_an_answer_that_a_line_brings_is_left_out(job: Job, tmp_path: Path) -> None:
    """Another model's answer teaches the drafter what its target does not write."""
    asked = [{"role": "user", "content": "one"}]
    other = {"messages": [{"role": "user", "content": "two"}]}
    answered, _ = read(job, tmp_path, [{"messages": [*asked, {"role": "assistant", "content": "the rain"}]}, other])
    bare, _ = read(job, tmp_path, [{"messages": asked}, other])
    assert [request.prompt_token_ids for request in answered] == [request.prompt_token_ids for request in bare]


def test_the_order_of_lines_and_repeated_ones_change_nothing(job: Job, tmp_path: Path) -> None:
    lines = [{"prompt": text} for text in ("the river", "a small boat", "count one", "stop here", "the river")]
    first, _ = read(job, tmp_path, lines, max_prompts=3)
    second, _ = read(job, tmp_path, lines[::-1], max_prompts=3)
    assert len(first) == 3
    assert prompts_digest(first) == prompts_digest(second)
    assert [request.request_id for request in first] == [0, 1, 2]


def test_lines_keep_their_options_but_for_the_number_of_answers(job: Job, tmp_path: Path) -> None:
    (hot, cool), _ = read(job, tmp_path, [{"prompt": "one", "temperature": 0.7, "n": 3}, {"prompt": "two"}], temperature=0.2)
    assert {hot.params.temperature, cool.params.temperature} == {0.7, 0.2}
    assert hot.params.n == cool.params.n == 1
    assert all(len(r.prompt_token_ids) + (r.params.max_tokens or 0) == SMALL.sample_tokens for r in (hot, cool))


def test_what_cannot_be_used_is_noted(job: Job, tmp_path: Path) -> None:
    requests, notes = read(job, tmp_path, [{"prompt": "one"}, {"prompt": 3.5}, {"prompt": [4] * 60}, {"prompt": "two"}])
    assert len(requests) == 2
    assert "2 lines cannot be used: line 2" in notes[0]


def test_a_line_is_on_the_same_side_whatever_stands_beside_it() -> None:
    lines = lines_of(200)
    whole, part = split(lines, "", SMALL, []), split(lines[:120], "", SMALL, [])
    assert 30 <= len(whole.held_out) <= 70 and len(whole.lines) == 200
    held = {line.request.request_id for line in whole.held_out}
    assert {line.request.request_id for line in part.held_out} == {i for i in held if i < 120}


def test_what_is_chosen_says_nothing_of_what_is_held_out(job: Job, tmp_path: Path) -> None:
    """The fault: chosen and held out by one hash, a cut file was measured on almost whole, and nothing was left to learn from."""
    chosen, _ = read(job, tmp_path, [{"prompt": [3, 4, 5 + i]} for i in range(300)], max_prompts=60)
    data = split([AnsweredLine(request, [*request.prompt_token_ids, 5, 6]) for request in chosen], "", SMALL, [])
    assert len(data.lines) == 60 and 5 <= len(data.held_out) <= 27


def test_there_is_always_a_line_on_either_side() -> None:
    for share in (0.0, 1.0):
        data = split(lines_of(3), "", replace(SMALL, held_out_share=share), [])
        assert data.training and data.held_out
    short = [AnsweredLine(line.request, line.tokens[:-1]) for line in lines_of(4)]
    with pytest.raises(InputError, match="0 answers can be learned from"):
        split(short, "", SMALL, [])


def test_kept_answers_are_taken_for_the_same_plan_only(tmp_path: Path) -> None:
    lines, path = lines_of(4), tmp_path / "answers.json"
    requests = [line.request for line in lines]
    assert load_answers(path, {"a": 1}, requests) is None
    save_answers(path, {"a": 1}, lines[:3])
    assert load_answers(path, {"a": 1}, requests) == lines[:3]
    assert load_answers(path, {"a": 2}, requests) is None


def test_the_mask_token_occurs_nowhere(job: Job) -> None:
    """One that texts use would be taken for its own place by the drafter, silently."""
    codec, model = load_codec(job.engine), load_manifest(job.engine).model
    assert codec.vocab_size == model.vocab_size
    assert choose_mask_token(codec, replace(model, vocab_size=model.vocab_size + 8), []) == model.vocab_size
    assert choose_mask_token(codec, model, [model.vocab_size - 1]) == model.vocab_size - 2  # its special tokens all have a use
    with pytest.raises(UsageError, match="every token"):
        choose_mask_token(codec, model, range(model.vocab_size))
