"""The real model end to end: SmolLM2-135M-Instruct, against transformers, against itself in another order, quantized."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import run_requests
from safetensors import safe_open
from sample_model import (
    engine_of_checkpoint,
    needs_sample_model,
    prompt_ids,
    prompt_lines,
    sample_checkpoint,
    sample_engine,
    transformers_model,
)

from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark_cli.app import run

pytestmark = [pytest.mark.slow, needs_sample_model]

MAX_TOKENS = 64
TIE = 1e-4
"""Gap between the two largest logits under which float32 rounding decides."""
BATCH = 16


def generate(directory: Path, lines: list[dict[str, Any]], engine: Path, *flags: str) -> dict[str, dict[str, Any]]:
    """Records by id of a whole job that answers every line."""
    directory.mkdir(exist_ok=True)
    source, target = directory / "in.jsonl", directory / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert run(["generate", str(source), str(target), "--engine", str(engine), "--quiet", "--fresh", *flags]) == 0
    records = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [record["custom_id"] for record in records] == [line["custom_id"] for line in lines]
    return {record["custom_id"]: record for record in records}


@torch.inference_mode()
def by_transformers(prompts: list[list[int]]) -> list[list[int]]:
    """Greedy token ids up to the end of text, in batches of prompts of like length, padded on the left."""
    model, _ = transformers_model()
    eos, answers = model.config.eos_token_id, {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        width = max(len(prompts[i]) for i in chosen)
        pads = [width - len(prompts[i]) for i in chosen]
        ids = torch.tensor([[eos] * pad + prompts[i] for i, pad in zip(chosen, pads)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        out = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=eos)
        for i, row in zip(chosen, out[:, width:].tolist()):
            answers[i] = row[: row.index(eos) + 1] if eos in row else row
    return [answers[i] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def expected() -> tuple[list[dict[str, Any]], list[list[int]], list[list[int]]]:
    """(lines, prompt ids, answer ids of transformers)."""
    lines = prompt_lines(64, MAX_TOKENS)
    prompts = [prompt_ids(line) for line in lines]
    return lines, prompts, by_transformers(prompts)


def test_both_ways_in_give_the_same_weights() -> None:
    """The GGUF file and a Hugging Face directory of it: equal bit for bit, or one of the readers is wrong."""
    ours, theirs = load_manifest(sample_engine()), load_manifest(engine_of_checkpoint())
    assert ours.model == theirs.model
    assert set(ours.tensors) == set(theirs.tensors)
    for name in ours.tensors:
        pair = []
        for engine, manifest in ((sample_engine(), ours), (engine_of_checkpoint(), theirs)):
            with safe_open(engine / manifest.tensors[name].shard, "pt") as file:
                pair.append(file.get_tensor(name))
        assert pair[0].dtype == pair[1].dtype == torch.float32
        assert torch.equal(pair[0].view(torch.int32), pair[1].view(torch.int32)), name


def test_64_prompts_give_the_tokens_of_transformers(expected: Any) -> None:
    """Token for token over 64 prompts and 64 tokens; a difference is excused by a tie alone."""
    lines, prompts, answers = expected
    requests = [Request(i, ids, SamplingParams(max_tokens=MAX_TOKENS)) for i, ids in enumerate(prompts)]
    outputs = run_requests(sample_engine(), requests, record_gaps=True, kv_cache_memory_bytes=1 << 30)
    assert sum(len(answer) for answer in answers) > 3000
    differing = [i for i, want in enumerate(answers) if outputs[i].completions[0].token_ids != want]
    for i in differing:
        (alone,) = by_transformers([prompts[i]])
        gap = outputs[i].min_top2_gap
        assert outputs[i].completions[0].token_ids == alone or (gap is not None and gap < TIE), (lines[i], gap)
    assert len(differing) <= 2


def test_64_lines_of_a_job_give_the_text_of_transformers(expected: Any, tmp_path: Path) -> None:
    """By the other way in, and through the command: the templates, the tokenizer and the text are the product's own here."""
    lines, prompts, answers = expected
    _, tokenizer = transformers_model()
    records = generate(tmp_path, lines, engine_of_checkpoint())
    got = [records[line["custom_id"]] for line in lines]
    assert [record["usage"]["prompt_tokens"] for record in got] == [len(ids) for ids in prompts]
    wanted = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    assert sum(record["text"] != text for record, text in zip(got, wanted)) <= 2
    eos = transformers_model()[0].config.eos_token_id
    reasons = ["stop" if answer[-1] == eos else "length" for answer in answers]
    assert sum(record["finish_reason"] != reason for record, reason in zip(got, reasons)) <= 2
    assert "stop" in reasons and "length" in reasons


def test_a_deterministic_bfloat16_job_gives_the_same_records_in_any_batch_and_order(tmp_path: Path) -> None:
    """Batch-invariant arithmetic: one at a time, all at once and shuffled, greedy and seeded; rounding differs without it."""
    lines = prompt_lines(16, 24)
    for line in lines[::4]:
        line |= {"temperature": 0.8, "seed": 5}
    engine = sample_engine("bfloat16")
    together = generate(tmp_path / "together", lines, engine, "--deterministic", "--max-num-seqs", "64")
    assert generate(tmp_path / "alone", lines, engine, "--deterministic", "--max-num-seqs", "1") == together
    assert (tmp_path / "alone" / "out.jsonl").read_bytes() == (tmp_path / "together" / "out.jsonl").read_bytes()
    random.Random(3).shuffle(lines)
    flags = ("--deterministic", "--max-num-seqs", "64", "--no-enable-prefix-caching")
    assert generate(tmp_path / "shuffled", lines, engine, *flags) == together


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
def test_quantized_engines_answer_sensibly(scheme: str, tmp_path: Path) -> None:
    """A wrong scale, zero point or packing order gives noise, not worse English. Rounded to 4 bits the model knows less."""
    expected = {"The capital of France is": "Paris", "The opposite of hot is": "cold", "How many days are in a week?": "days"}
    lines: list[dict[str, Any]] = [{"custom_id": text, "prompt": text, "max_tokens": 12} for text in expected]
    lines[-1] = {"custom_id": lines[-1]["custom_id"], "messages": [{"role": "user", "content": lines[-1]["prompt"]}], "max_tokens": 12}
    records = generate(tmp_path, lines, sample_engine("bfloat16", scheme), "--deterministic")
    known = list(expected) if scheme == "w8a16" else ["The capital of France is"]
    assert all(expected[text] in records[text]["text"] for text in known), records
    assert load_manifest(sample_engine("bfloat16", scheme)).weight_bytes() < 0.65 * load_manifest(sample_engine("bfloat16")).weight_bytes()


def test_the_checkpoint_is_read_as_the_family_it_says() -> None:
    config = json.loads((sample_checkpoint() / "config.json").read_text())
    model = load_manifest(sample_engine()).model
    assert (model.family, model.num_layers, model.hidden_size) == (config["model_type"], config["num_hidden_layers"], config["hidden_size"])
