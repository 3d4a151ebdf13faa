"""An engine and a tokenizer without a model: the answer follows from the prompt's tokens and the options, nothing else. No torch."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import RequestError
from dspark.runtime.spec.manifest import EngineManifest
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.request import Completion, Request, RequestOutput
from dspark.runtime.spec.sampling_params import SamplingParams

VOCAB_SIZE = 320
MAX_MODEL_LEN = 2048


class ByteCodec:
    """One token per byte; chats are joined without a template."""

    vocab_size = 256
    longest_token = 1

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        if messages[0]["role"] == "system" and not messages[0].get("content"):
            raise RequestError("the chat template refuses these messages: no empty system turn", "template_refused", "messages")
        return "".join(f"<{m['role']}>{m.get('content') or ''}" for m in messages)

    def id_to_token(self, token_id: int) -> str:
        return chr(token_id)


def standin_answer(request: Request) -> bytes:
    """One to max_tokens letters."""
    key = array("I", request.prompt_token_ids).tobytes() + repr((request.params.temperature, request.draw_key)).encode()
    digest = hashlib.sha256(key).hexdigest().encode()
    most = request.params.max_tokens or 16
    length = 1 + int(digest[:8], 16) % most
    return (digest * (length // len(digest) + 1))[:length]


@dataclass
class StandinEngine:
    """Answers up to max_num_seqs requests at a time, a few tokens of each per step. delay_s: length of a step."""

    max_num_seqs: int = 8
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = VOCAB_SIZE
    delay_s: float = 0.0
    tokens_per_step: int = 8
    num_steps: int = 0
    fail_at_step: int | None = None
    error: BaseException = field(default_factory=lambda: RuntimeError("the stand-in was told to fail"))
    most_waiting: int = 0
    order_added: list[int] = field(default_factory=list)
    _waiting: list[tuple[Request, float]] = field(default_factory=list)
    _left: dict[int, int] = field(default_factory=dict)

    def finish(self) -> list[str]:
        return []

    def add(self, request: Request) -> None:
        if bytes(request.prompt_token_ids).startswith(b"TOO BIG") and max(request.prompt_token_ids) < 256:
            raise RequestError("the request needs 99 KV blocks, allowed: 16, the whole pool", "kv_pool_too_small", "prompt")
        self._waiting.append((request, time.monotonic()))
        self.order_added.append(request.request_id)
        self.most_waiting = max(self.most_waiting, len(self._waiting))

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise self.error
        if self.delay_s:
            time.sleep(self.delay_s)
        finished = []
        for request, added_at in self._waiting[: self.max_num_seqs]:
            answer = standin_answer(request)
            left = self._left.get(request.request_id, len(answer)) - self.tokens_per_step
            self._left[request.request_id] = left
            if left <= 0:
                reason = "length" if len(answer) == request.params.max_tokens else "stop"
                choices = [Completion(i, list(answer), answer.decode(), reason) for i in range(request.params.n)]
                now = time.monotonic()
                finished.append(RequestOutput(request.request_id, len(request.prompt_token_ids), choices, 0, added_at, now, now))
                del self._left[request.request_id]
        gone = {output.request_id for output in finished}
        self._waiting = [pair for pair in self._waiting if pair[0].request_id not in gone]
        return finished

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting)

    def metrics(self) -> dict[str, Any]:
        return {"steps": self.num_steps, "kernels": {}, "host_overhead_fraction": 0.0}

    def close(self) -> None:
        self._waiting.clear()


def make_standin_engine_dir(directory: Path, created: int = 1_700_000_000) -> Path:
    """An engine directory with a manifest and nothing else."""
    directory.mkdir(parents=True, exist_ok=True)
    model = ModelConfig("llama", VOCAB_SIZE, 8, 16, 1, 1, 1, 8, 1e-5, MAX_MODEL_LEN)
    EngineManifest(model, {}, created=created, lineage={"name": "standin"}).save(directory)
    return directory


def load_standin_builder(engine_dir: Path, manifest: EngineManifest, config: EngineConfig, defaults: SamplingParams) -> Any:
    """A `Loaders.load_builder` for the job."""
    from dspark.runtime.jobs.prompts import PromptBuilder

    codec: Any = ByteCodec()
    return PromptBuilder(codec, defaults, config.max_model_len or MAX_MODEL_LEN, VOCAB_SIZE, config.seed)


def load_standin(delay_s: float = 0.0) -> Any:
    """A `Loaders.load` for the job: (engine directory, configuration) -> (engine, builder maker)."""

    def load(engine_dir: Path, config: EngineConfig) -> Any:
        from dspark.runtime.jobs.prompts import PromptBuilder

        engine = StandinEngine(config.max_num_seqs, config.max_model_len or MAX_MODEL_LEN, delay_s=delay_s)
        codec: Any = ByteCodec()
        return engine, lambda defaults: PromptBuilder(codec, defaults, engine.max_model_len, engine.vocab_size, config.seed)

    return load
