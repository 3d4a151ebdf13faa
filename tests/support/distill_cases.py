"""A tiny target whose answers can be learned: what its layers add is small, so that a token is mostly decided by the one before it,
and its distributions are sharp."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_models import VOCAB_SIZE, make_tiny_model, save_tokenizer

from dspark.converters.distill.options import DistillOptions
from dspark.converters.pipeline import convert

LAYERS = 4
SMALL = DistillOptions(
    device="cpu",
    sample_tokens=40,
    epochs=12,
    batch_lines=4,
    anchors=10,
    learning_rate=1e-2,
    markov_rank=16,
    held_out_share=0.25,
    layers=1,
    evaluations=4,
)


@dataclass(frozen=True)
class Job:
    engine: Path
    prompts: Path


def make_job(folder: Path) -> Job:
    """An engine, and prompts for it."""
    model = make_tiny_model("llama", num_hidden_layers=LAYERS)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(0.05)
            if "lm_head" in name:
                weight.mul_(3.0)
    model.save_pretrained(folder / "checkpoint")
    save_tokenizer(folder / "checkpoint")
    convert(folder / "checkpoint", folder / "engine", dtype="float32", audit=False)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB_SIZE, (6,), generator=generator).tolist() for _ in range(48)]
    lines = [json.dumps({"custom_id": str(i), "prompt": prompt}) for i, prompt in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Job(folder / "engine", folder / "prompts.jsonl")
