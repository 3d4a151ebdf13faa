"""Drafting and verifying on a GPU: plain decoding's answers, by halves in turn, replayed steps, and a drafter on a stream of its own.

Runs are deterministic, so that a row has the same bits in a step of one token and among drafts.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_checks import NoText, write_tiny_engine
from scripted_proposer import ScriptedProposer

from dspark.runtime.engine import Engine
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.single import BuildDrafter, SingleExecutor
from dspark.runtime.models.decoder import Decoder
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.cost import StepCost
from dspark.runtime.speculation.draft_model import DraftModel
from dspark.runtime.speculation.draft_vocabulary import DraftVocabulary
from dspark.runtime.speculation.drafter_proposer import DrafterProposer
from dspark.runtime.speculation.halves import Halves
from dspark.runtime.speculation.speculator import Speculator

KINDS = ("near", "siblings", "draft-model")
DRAFT_TOKENS = 4
MAX_LEN = 160


class Always(Halves):
    """Divides whenever it can be done."""

    def pay(self, num_sequences: int) -> bool:
        return num_sequences > 1


def drafts_check(kind: str, device: str = "cuda", temperature: float = 0.0, tokens: int = 32) -> str:
    """kind: chains or trees that know the answers, more or less, or the target itself as the draft model. device "cpu": interpreted."""
    wide = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 384}
    with tempfile.TemporaryDirectory() as folder:
        engine_dir = write_tiny_engine(Path(folder), "llama", "float32", None, wide)
        plain, _ = _answers(engine_dir, device, temperature, tokens, None)
        drafted, metrics = _answers(engine_dir, device, temperature, tokens, kind, plain)
    assert drafted == plain, f"{sum(drafted[i] != plain[i] for i in plain)} of {len(plain)} answers are not those of plain decoding"
    speculation = metrics["speculation"]
    assert speculation["accepted_tokens"] > tokens, f"of {speculation['draft_tokens']} drafted tokens {speculation['accepted_tokens']} held"
    if device == "cuda":
        graphs, halves = metrics["cuda_graphs"], speculation["halves"]["steps"]
        assert halves > 0, "no half was drafted beside the other"
        assert graphs.get("steps_replayed", 0) > 0, f"no step was replayed: {graphs}"
        return f"{speculation['accepted_tokens']} accepted, {halves} halves, {graphs['steps_replayed']} steps replayed"
    return f"{speculation['accepted_tokens']} accepted"


def _answers(
    engine_dir: Path, device: str, temperature: float, tokens: int, kind: str | None, plain: dict[int, list[int]] | None = None
) -> tuple[dict[int, list[int]], dict[str, Any]]:
    manifest = load_manifest(engine_dir)
    config = EngineConfig(device=device, deterministic=True, max_num_seqs=8, kv_cache_memory_bytes=16 << 20, max_model_len=MAX_LEN)
    build = _target_as_draft(engine_dir) if kind == "draft-model" else None
    executor = SingleExecutor(engine_dir, manifest, config, MAX_LEN, False, device == "cpu", build)
    engine = Engine(manifest, config, executor, NoText(), MAX_LEN)
    try:
        if kind is not None:
            proposer: Any = DrafterProposer(kind, DRAFT_TOKENS, executor.draft, StepCost(), time.perf_counter, always=True)
            if kind != "draft-model":
                answers = {(i, 0): found for i, found in (plain or {}).items()}
                proposer = ScriptedProposer(kind, answers, manifest.model.vocab_size, DRAFT_TOKENS)
            engine.speculator = engine.scheduler.speculator = Speculator([proposer], fixed=DRAFT_TOKENS)
            engine.halves = Always() if executor.steps_ahead else None
        params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
        shared = [(7 * i) % 300 + 5 for i in range(40)]
        for i, prompt in enumerate([[11], [5, 6, 7], shared, [*shared, 9], [*shared[:33], 50], [(13 * i) % 300 + 5 for i in range(90)]]):
            engine.add(Request(i, prompt, params, draw_key=100 + i))
        found = {output.request_id: list(output.completions[0].token_ids) for output in engine.drain()}
        return found, engine.metrics()
    finally:
        engine.close()


def _target_as_draft(engine_dir: Path) -> BuildDrafter:
    """What makes a draft model of the same weights, which is nearly always right."""

    def build(target: Decoder, sampler: Sampler, longest: int) -> DraftModel:
        facts = target.kernels.facts
        model = load_model(
            engine_dir, device=facts.device, kernels=target.kernels.choice, block_size=facts.block_size, interpreted=facts.interpreted
        )
        return DraftModel(model, DraftVocabulary(model.config.vocab_size, None, None), sampler, longest, DRAFT_TOKENS, False)

    return build
