"""The geometry of a new drafter for a target, and the token that stands in its blocks."""

from __future__ import annotations

from collections.abc import Iterable

from dspark.converters.distill.options import DistillOptions
from dspark.converters.drafts.block import spread_taps
from dspark.converters.drafts.checkpoint import fit_faults
from dspark.runtime.jobs.tokenizer import TextCodec
from dspark.runtime.spec.errors import UsageError
from dspark.runtime.spec.model_config import ModelConfig, RopeConfig
from dspark.runtime.speculation.heads.config import DraftConfig

_FOLLOWS_LENGTH = ("dynamic", "longrope")


def draft_config(target: ModelConfig, options: DistillOptions, mask_token_id: int) -> DraftConfig:
    """A DSpark drafter with the target's width, heads and rope, Qwen3's layers (norms of q and k), the target's embedding and head.

    A rope that follows the sequence's length becomes the plain one of its base: a draft's keys are kept for good. Raises UsageError for
    sizes and taps that a drafter of this target cannot have.
    """
    if options.num_layers < 1 or options.block_size < 1 or options.markov_rank < 1:
        sizes = f"{options.num_layers} layers, block_size {options.block_size}, markov_rank {options.markov_rank}"
        raise UsageError(f"a drafter with {sizes}", "each must be at least 1")
    config = DraftConfig(
        method="dspark",
        model=ModelConfig(
            family="qwen3",
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size or 3 * target.hidden_size,
            num_layers=options.num_layers,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            max_position=target.max_position,
            rope=_rope(target.rope),
            qk_norm=True,
            dtype=target.dtype,
            embedding_multiplier=target.embedding_multiplier,
            round_embedding_multiplier=target.round_embedding_multiplier,
        ),
        taps=options.taps if options.taps is not None else choose_taps(target.num_layers, options.num_taps),
        target_hidden_size=target.hidden_size,
        target_num_layers=target.num_layers,
        draft_vocab_size=target.vocab_size,
        own_embedding=False,
        own_head=False,
        block_size=options.block_size,
        mask_token_id=mask_token_id,
        markov="vanilla",
        markov_rank=options.markov_rank,
        confidence=True,
        confidence_with_markov=True,
    )
    if faults := fit_faults(config, target):
        raise UsageError(f"no drafter of this target can be made: {'; '.join(faults)}", "choose other taps, or leave them out")
    return config


def _rope(rope: RopeConfig) -> RopeConfig:
    return RopeConfig(theta=rope.theta, partial_rotary_factor=rope.partial_rotary_factor) if rope.kind in _FOLLOWS_LENGTH else rope


def choose_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """Layers spread as published drafters have them, from the second to the fourth last; of a target with few layers its last ones but
    one."""
    spread = sorted(set(spread_taps(num_layers, count) or ())) if num_layers >= 5 else []
    if len(spread) == count:
        return tuple(spread)
    return tuple(range(-1, num_layers - 1))[-count:]


def choose_mask_token(codec: TextCodec, target: ModelConfig, used: Iterable[int]) -> int:
    """A token that no text has: a row of the embedding behind the tokenizer's last token, else an unused special token, else the last
    token that none of `used` is. Raises UsageError when every token occurs."""
    if codec.vocab_size < target.vocab_size:
        return codec.vocab_size
    taken = {*used, *target.eos_token_ids}
    named = (target.bos_token_id, target.pad_token_id, codec.bos_token_id, codec.eos_token_id)
    special = sorted(codec.special_ids - taken - {token for token in named if token is not None})
    free = [token for token in special if token < target.vocab_size] or [t for t in range(target.vocab_size) if t not in taken]
    if not free:
        raise UsageError("every token of the vocabulary occurs in the answers, so none can stand for a masked place", "use fewer prompts")
    return free[-1]
