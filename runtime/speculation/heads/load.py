"""From an engine's `draft/` to a Drafter beside its target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dspark.kernels.ops import Kernels
from dspark.runtime.layers.rope import RotaryEmbedding
from dspark.runtime.models.decoder import Decoder
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.spec.errors import InputError
from dspark.runtime.speculation.heads.block import BlockDrafter, load_block_drafter
from dspark.runtime.speculation.heads.config import DraftConfig
from dspark.runtime.speculation.heads.eagle3 import EagleDrafter, load_eagle_drafter
from dspark.runtime.speculation.heads.stored import DraftWeights, load_stored
from dspark.runtime.speculation.heads.vocabulary import load_vocabulary

PRIOR = 0.6
"""Acceptance assumed of a draft token where a head does not estimate it."""


def load_drafter(
    directory: str | Path,
    target: Decoder,
    sampler: Sampler,
    max_model_len: int,
    *,
    max_tokens: int | None = None,
    temperatures: tuple[float, ...] | None = None,
    prior: float = PRIOR,
    keep_distributions: bool = False,
) -> BlockDrafter | EagleDrafter:
    """Load a stored draft for a target, on its device, in its dtype, for a cache of its block size. Not allocated yet.

    max_model_len: longest sequence in tokens. max_tokens: of an EAGLE-3 draft (a block's length is its own). temperatures: instead of the
    stored ones (see DraftConfig). prior, keep_distributions: see BlockDrafter and Chains. Raises InputError when the directory is unusable
    or the draft was made for another target.
    """
    stored = load_stored(Path(directory))
    config = stored.config if temperatures is None else replace(stored.config, temperatures=temperatures)
    _check_fit(config, target, str(directory))
    kernels = draft_kernels(config, target)
    weights = DraftWeights(Path(directory), stored, kernels.facts.dtype, kernels.facts.device)
    vocabulary = load_vocabulary(config, weights, target, kernels)
    model = config.model
    rope = RotaryEmbedding(model.rope, model.head_dim, max_model_len + config.block_size, model.max_position, kernels.facts.device)
    drafter: BlockDrafter | EagleDrafter
    if config.method == "eagle3":
        drafter = load_eagle_drafter(config, weights, vocabulary, kernels, rope, sampler, max_tokens, prior, keep_distributions)
    else:
        drafter = load_block_drafter(config, weights, vocabulary, kernels, rope, sampler, prior, keep_distributions)
    weights.check_all_taken()
    return drafter


def draft_kernels(config: DraftConfig, target: Decoder) -> Kernels:
    """The kernels of the drafter's own geometry, in the target's run. Its cache is never an 8-bit one."""
    model = config.model
    facts = replace(
        target.kernels.facts, head_dim=model.head_dim, num_heads=model.num_heads, num_kv_heads=model.num_kv_heads, cache_dtype=None
    )
    return Kernels(facts, target.kernels.choice)


def _check_fit(config: DraftConfig, target: Decoder, directory: str) -> None:
    """A draft is checked in full when it is stored; this catches one that was moved to another engine."""
    made_for = (config.target_num_layers, config.target_hidden_size, config.model.vocab_size)
    has = (target.config.num_layers, target.config.hidden_size, target.config.vocab_size)
    if made_for != has:
        shown = ["{} layers, {} wide, {} tokens".format(*numbers) for numbers in (made_for, has)]
        raise InputError(f"the draft in '{directory}' was made for a target of {shown[0]}, this has {shown[1]}", "pair the engine again")
