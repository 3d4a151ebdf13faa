"""Ropes that follow the length of a sequence, and several ropes in one model."""

from __future__ import annotations

import math

import torch

from dspark.runtime.layers.rope import RotaryEmbedding, RotaryTables, attention_factor
from dspark.runtime.spec.model_config import NO_ROPE, ModelConfig, RopeConfig

LONG = RopeConfig(kind="longrope", factor=4.0, original_max_position=64, short_factor=(1.0, 2.0), long_factor=(4.0, 8.0))
SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 2, "head_dim": 4}


def model(**fields: object) -> ModelConfig:
    return ModelConfig(family="llama", num_layers=3, rms_norm_eps=1e-6, max_position=256, **{**SIZES, **fields})  # type: ignore[arg-type]


def test_longrope_on_paper() -> None:
    """Two pairs of frequency 1 and 1/100; position 10; temperature sqrt(1 + ln 4 / ln 64) = sqrt(4/3)."""
    rope = RotaryEmbedding(LONG, 4, 256, 256)
    scale = math.sqrt(4 / 3)
    assert math.isclose(attention_factor(LONG, 64), scale)
    for length, angles in ((64, (10.0, 0.05)), (65, (2.5, 0.0125))):
        cos, sin = rope.lookup(torch.tensor([10]), torch.tensor([length]))
        torch.testing.assert_close(cos[0], torch.tensor([math.cos(a) * scale for a in angles]))
        torch.testing.assert_close(sin[0], torch.tensor([math.sin(a) * scale for a in angles]))


def test_each_token_of_a_batch_takes_the_factors_of_its_own_sequence() -> None:
    """A short text beside a long one must not be rotated by the long one's factors."""
    rope = RotaryEmbedding(LONG, 4, 256, 256)
    both = rope.lookup(torch.tensor([10, 10]), torch.tensor([64, 200]))
    for i, length in enumerate((64, 200)):
        alone = rope.lookup(torch.tensor([10]), torch.tensor([length]))
        assert torch.equal(both[0][i], alone[0][0]) and torch.equal(both[1][i], alone[1][0])


def test_keys_of_different_factors_have_different_salts() -> None:
    """Blocks of a short prompt hold other keys than the same tokens in a long one."""
    tables = RotaryTables(model(rope=LONG), 256)
    assert [tables.cache_salt(length) for length in (1, 64, 65, 200)] == [0, 0, 65, 65]
    assert tables.recompute_at == 65
    assert RotaryTables(model(rope=LONG), 64).recompute_at is None  # a run that never gets there
    dynamic = RotaryTables(model(rope=RopeConfig(kind="dynamic", factor=2.0, original_max_position=64)), 256)
    assert [dynamic.cache_salt(length) for length in (64, 65, 200)] == [0, 65, 200] and dynamic.recompute_at is None
    assert RotaryTables(model(), 256).cache_salt(10**6) == 0


def test_a_layer_without_rope_is_not_rotated() -> None:
    tables = RotaryTables(model(rope_layers=(True, False, True)), 16)
    (cos, _), (no_cos, no_sin) = tables.lookup(torch.arange(16))
    assert cos.shape == (16, 2) and no_cos.shape == no_sin.shape == (16, 0)


def test_sliding_layers_may_have_a_rope_of_their_own() -> None:
    local = RopeConfig(theta=100.0)
    config = model(local_rope=local, sliding_window=8, sliding_layers=(True, False, True))
    assert config.ropes() == (local, RopeConfig()) and [config.rope_of_layer(i) for i in range(3)] == [local, RopeConfig(), local]
    assert model(rope_layers=(False, True, True)).ropes() == (NO_ROPE, RopeConfig())
