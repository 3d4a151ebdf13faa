"""Real engines over executors without a model: tokens are letters, and blocks hold digests (see fake_executor)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from fake_executor import EOS, VOCAB_SIZE

from dspark.runtime.engine import Engine
from dspark.runtime.spec.errors import RequestError
from dspark.runtime.spec.manifest import EngineManifest
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.request import Request
from dspark.runtime.speculation.choice import Choice

LETTERS = "abcdefg"

Answer = tuple[list[int], str, str, Any]
"""Token ids, text, finish reason, stop reason."""


class LetterCodec:
    """One letter per token."""

    vocab_size = VOCAB_SIZE
    special_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(LETTERS[token] for token in token_ids)


def standin_engine(
    executor: Any,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 64,
    enable_prefix_caching: bool = True,
) -> Engine:
    """An engine around the executor. Its limits may be smaller than those that a user may choose."""
    model = ModelConfig("llama", VOCAB_SIZE, 8, 16, 1, 1, 1, 8, 1e-5, max_model_len, eos_token_ids=(EOS,))
    config: Any = SimpleNamespace(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=executor.block_size,
        enable_prefix_caching=enable_prefix_caching,
        num_speculative_tokens=None,
        speculative="off",
        draft_memory=None,
    )
    codec: Any = LetterCodec()
    return Engine(EngineManifest(model, {}), config, executor, codec, max_model_len, Choice("off"))


def answers_of(engine: Engine, arrivals: Sequence[tuple[int, Request]], most_steps: int) -> dict[int, list[Answer]]:
    """Answers by request id; those that the pool cannot hold are left out. arrivals: (steps to run before it arrives, request)."""
    outputs = []
    for steps, request in arrivals:
        for _ in range(steps):
            outputs += _checked_step(engine)
        try:
            engine.add(request)
        except RequestError as error:
            assert error.code == "kv_capacity_exceeded"
    while engine.num_unfinished:
        assert most_steps > 0, "the run does not end"
        most_steps -= 1
        outputs += _checked_step(engine)
    assert engine.kv.allocator.num_held == 0 and engine.scheduler.num_unfinished == 0
    found = {output.request_id: output for output in outputs}
    assert len(found) == len(outputs), "a request is answered twice"
    return {key: [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in o.completions] for key, o in found.items()}


def _checked_step(engine: Engine) -> list[Any]:
    outputs = engine.step()
    engine.kv.check_integrity(list(engine.scheduler.running))
    assert all(not seq.table.blocks for seq in engine.scheduler.waiting)
    return outputs
