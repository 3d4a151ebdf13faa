"""From a run's settings to its drafter and its speculator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dspark.kernels.batch import MAX_TREE_NODES
from dspark.runtime.jobs.tokenizer import TextCodec
from dspark.runtime.models.decoder import Decoder
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.manifest import EngineManifest
from dspark.runtime.speculation.choice import Choice
from dspark.runtime.speculation.cost import StepCost
from dspark.runtime.speculation.drafter import Drafter, Proposer
from dspark.runtime.speculation.drafter_proposer import AskDrafts, DrafterProposer
from dspark.runtime.speculation.ngram import MAX_DRAFT, NgramProposer, load_memory
from dspark.runtime.speculation.ngram_tree import MAX_NODES, NgramTreeProposer
from dspark.runtime.speculation.pairing import Machine
from dspark.runtime.speculation.speculator import Speculator


def drafter_builder(choice: Choice, config: EngineConfig, codec: TextCodec) -> Callable[[Decoder, Sampler, int], Drafter] | None:
    """What makes the drafter beside a target (see `execution.single.BuildDrafter`), None where the method needs none."""
    directory, apart = choice.draft, config.speculative_sampling == "rejection"
    if directory is None:
        return None
    if choice.drafter == "draft-model":
        from dspark.runtime.speculation.draft_model import load_draft_model

        return lambda target, sampler, longest: load_draft_model(
            directory, target, codec, sampler, longest, config.num_speculative_tokens, apart
        )
    from dspark.runtime.speculation.heads.load import load_drafter

    return lambda target, sampler, longest: load_drafter(
        directory, target, sampler, longest, max_tokens=config.num_speculative_tokens, keep_distributions=apart
    )


def build_speculator(
    manifest: EngineManifest,
    config: EngineConfig,
    choice: Choice,
    drafter: tuple[int, AskDrafts] | None = None,
    machine: Machine | None = None,
    clock: Callable[[], float] | None = None,
) -> Speculator | None:
    """None for plain decoding. drafter: its longest draft and what asks it, for methods that have one. machine: what this run runs on; step
    times that were measured on the like are taken over. clock: seconds, for the time that drafting takes."""
    if choice.method == "off":
        return None
    fixed = config.num_speculative_tokens if config.speculative != "auto" else None
    cost = StepCost(choice.pairing.cost_points(machine) if choice.pairing is not None and machine is not None else None)
    acceptance = choice.pairing.acceptance if choice.pairing is not None else {}
    proposers: list[Proposer] = []
    if choice.has_ngrams:
        memory = load_memory(Path(config.draft_memory).expanduser(), manifest.model.vocab_size) if config.draft_memory else None
        most = config.num_speculative_tokens
        if config.speculative_tree:
            proposers.append(NgramTreeProposer(min(most or MAX_NODES, MAX_TREE_NODES), memory))
        else:
            proposers.append(NgramProposer(most or MAX_DRAFT, memory))
    if choice.drafter is not None:
        assert drafter is not None and clock is not None
        model = DrafterProposer(choice.drafter, *drafter, cost, clock, always=fixed is not None)
        if choice.pairing is not None:
            model.preload(acceptance, choice.pairing.drafter_on(machine))
        proposers.append(model)
    return Speculator(proposers, fixed, cost, acceptance)
