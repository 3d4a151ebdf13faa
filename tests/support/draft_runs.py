"""Engines with a drafter beside the model, and a speculator that writes down what was drafted and mixes in what is known to be right."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from draft_reference import Reference

from dspark.runtime.engine import Engine
from dspark.runtime.execution.device_queue import DeviceQueue
from dspark.runtime.execution.graphs import Record
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.single import SingleExecutor
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.kv.pool import bytes_per_block
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.request import Request, RequestOutput
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.draft import Draft, Verified


@dataclass(frozen=True)
class Proposal:
    """One draft as the drafter made it. tokens: the sequence's, its newest one last."""

    request: Request
    index: int
    tokens: list[int]
    room: int
    draft: Draft | None


@dataclass
class MixedSpeculator:
    """Asks the drafter each time. Where an answer is known, what is verified is mixed of it: right up to some place, wrong from there."""

    executor: SingleExecutor
    max_tokens: int
    answers: dict[int, list[list[int]]] = field(default_factory=dict)
    proposals: list[Proposal] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    rests: bool = False

    def propose(self, sequences: list[Sequence], rooms: list[int], num_planned: int, num_rows: int) -> list[Draft | None]:
        drafts = self.executor.draft(sequences, rooms)
        for seq, room, draft in zip(sequences, rooms, drafts, strict=True):
            self.proposals.append(Proposal(seq.request, seq.index, list(seq.token_ids), room, draft))
        return [self.mixed(seq, room, draft) for seq, room, draft in zip(sequences, rooms, drafts, strict=True)]

    def mixed(self, seq: Sequence, room: int, draft: Draft | None) -> Draft | None:
        answers = self.answers.get(seq.request.request_id)
        if answers is None or draft is None:
            return draft
        coming = answers[seq.index][seq.num_output_tokens :][: min(room, self.max_tokens)]
        dice = zlib.crc32(repr((seq.token_ids, seq.index)).encode())
        wrong_from = dice % (len(coming) + 2)
        tokens = [token if depth < wrong_from else (token + 1) % 320 for depth, token in enumerate(coming)]
        return Draft(tuple(tokens), (0.5,) * len(tokens), "mixed") if tokens else None

    def learn(self, seq: Sequence, draft: Draft, verified: Verified) -> None:
        self.accepted.append(verified.num_accepted)

    def forget(self, seq: Sequence) -> None:
        pass


@dataclass(frozen=True)
class Run:
    """outputs: answers by request id, the token ids of each."""

    outputs: dict[int, list[list[int]]]
    speculator: MixedSpeculator | None
    engine: Engine


def run(
    engine_dir: Path,
    requests: Iterable[Request],
    build_drafter: Callable[..., Any] | None = None,
    answers: dict[int, list[list[int]]] | None = None,
    stagger: bool = False,
    interpreted: bool = False,
    queue: DeviceQueue | None = None,
    record: Record | None = None,
    **config: Any,
) -> Run:
    """Answer all requests, with a drafter if there is one. stagger: every request arrives a few steps after the one before. queue, record:
    see SingleExecutor."""
    manifest = load_manifest(engine_dir)
    settings = EngineConfig(**{"device": "cpu", "kv_cache_memory_bytes": 64 << 20, **config})
    max_len = settings.max_model_len or manifest.model.context_length
    executor = SingleExecutor(engine_dir, manifest, settings, max_len, False, interpreted, build_drafter, queue, record)
    engine = Engine(manifest, settings, executor, load_codec(engine_dir), max_len)
    speculator = None
    if build_drafter is not None:
        speculator = MixedSpeculator(executor, executor._runner.drafter.max_tokens, answers or {})
        engine.scheduler.speculator = speculator
    outputs: list[RequestOutput] = []
    for request in requests:
        engine.add(request)
        for _ in range(3 if stagger else 0):
            outputs += engine.step()
    outputs += list(engine.drain())
    engine.kv.check_integrity([])
    return Run({output.request_id: [c.token_ids for c in output.completions] for output in outputs}, speculator, engine)


def block_bytes(engine_dir: Path, draft: Any) -> int:
    """Bytes of a block of a target and of a stored draft together."""
    model = load_model(engine_dir)
    drafter = draft.build()(model, Sampler(frozenset()), 256)
    return bytes_per_block(model.config, 16, torch.float32) + int(drafter.bytes_per_block)


def requests(max_tokens: int = 24, **options: Any) -> list[Request]:
    """Prompts of several lengths; the second one begins like the first, the last one is a single token."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in (21, 9, 35, 1)]
    prompts[1] = prompts[0][:17] + prompts[1]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)
    return [Request(i, prompt, params, draw_key=7000 + i) for i, prompt in enumerate(prompts)]


def most_tokens(reference: Reference) -> int:
    truth = reference.truth
    if truth.method == "eagle3":
        return 7 if len(truth.states) == 5 else 5  # DeepSpec's config says how far it was trained
    return truth.block - (0 if truth.anchor_first else 1)


def compare(proposals: list[Proposal], reference: Reference) -> None:
    """Hold every draft against the reference: its tokens, what each was drawn from, and the estimates."""
    assert len(proposals) >= 10
    for proposal in sorted(proposals, key=lambda proposal: -len(proposal.tokens)):  # the target runs once over each answer
        draft, limit = proposal.draft, min(proposal.room, most_tokens(reference))
        assert draft is not None and len(draft) == limit
        forced = None if draft.distributions is None else draft.token_ids
        wanted = reference.draft(proposal.tokens, limit, proposal.request, proposal.index, forced)
        assert list(draft.token_ids) == wanted.tokens
        if draft.distributions is not None:
            torch.testing.assert_close(draft.distributions, torch.stack(wanted.distributions), rtol=1e-4, atol=1e-5)
        if wanted.survival:
            torch.testing.assert_close(torch.tensor(draft.survival), torch.tensor(wanted.survival), rtol=0, atol=1e-5)
