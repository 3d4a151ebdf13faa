"""The engine: requests in, finished requests out. The only file that names all parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dspark.runtime.execution.executor import Executor, PendingStep, StepTooLargeError
from dspark.runtime.execution.single import SingleExecutor
from dspark.runtime.jobs.detokenizer import IncrementalDetokenizer, final_text
from dspark.runtime.jobs.tokenizer import TextCodec
from dspark.runtime.kv.manager import KVCacheManager
from dspark.runtime.scheduling.plan import Ahead, SchedulerOutput
from dspark.runtime.scheduling.scheduler import Scheduler
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import MachineError, RequestError, UsageError
from dspark.runtime.spec.manifest import EngineManifest, load_manifest
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.request import Completion, Request, RequestOutput
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.build import build_speculator, drafter_builder
from dspark.runtime.speculation.choice import Choice, choose_speculation
from dspark.runtime.speculation.drafter import Proposer
from dspark.runtime.speculation.halves import Halves
from dspark.runtime.speculation.ngram import NgramProposer, save_memory


@dataclass
class _Group:
    """A request and its answers so far."""

    added_at_s: float
    finished: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True)
class _Step:
    """A step under way. began: the engine's clock when it was submitted. was_ahead: while another one ran."""

    plan: SchedulerOutput
    pending: PendingStep
    began: float
    was_ahead: bool


@dataclass
class _Counters:
    num_steps: int = 0
    num_ahead: int = 0
    num_too_large: int = 0
    num_tokens: int = 0
    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    step_s: float = 0.0
    max_step_tokens: int = 0


class Engine:
    """Continuous batching over one executor.

    add() queues, step() runs one step and returns what it finished, drain() runs to the end.
    """

    def __init__(
        self,
        manifest: EngineManifest,
        config: EngineConfig,
        executor: Executor,
        codec: TextCodec,
        max_model_len: int,
        choice: Choice | None = None,
    ) -> None:
        model = manifest.model
        self.manifest = manifest
        self.config = config
        self.max_model_len = max_model_len
        self.max_num_seqs = config.max_num_seqs
        self.vocab_size = model.vocab_size
        self.executor = executor
        self.codec = codec
        self.kv = KVCacheManager(
            executor.num_blocks, config.block_size, config.enable_prefix_caching, spare_untouched=executor.device == "cpu"
        )
        self._clock = time.process_time if executor.device == "cpu" else time.perf_counter  # other programs' load is no cost of ours
        choice = choice if choice is not None else choose_speculation(config, None)
        drafter = (executor.draft_tokens, executor.draft) if executor.draft_tokens else None
        self.speculator = build_speculator(manifest, config, choice, drafter, executor.machine, self._clock)
        self.scheduler = Scheduler(
            self.kv,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            self.max_model_len,
            frozenset(model.eos_token_ids),
            executor.recompute_at,
            self.speculator,
        )
        self._groups: dict[int, _Group] = {}
        self._num_added = 0
        self._running: _Step | None = None
        self._counters = _Counters()
        self.halves = Halves() if self.speculator is not None and executor.steps_ahead else None
        self._read_at: float | None = None  # when the newest step was read, on the engine's clock

    @classmethod
    def from_directory(
        cls, engine_dir: str | Path, config: EngineConfig, codec: TextCodec, record_gaps: bool = False, interpreted: bool = False
    ) -> Engine:
        """Load an engine directory. record_gaps: note each answer's smallest top-two logit gap. interpreted: Triton kernels on CPU tensors.

        Raises InputError for an unusable directory, UsageError for settings that do not fit the model or the machine.
        """
        manifest = load_manifest(engine_dir)
        max_model_len = resolve_max_model_len(manifest.model, config.max_model_len)
        choice = choose_speculation(config, Path(engine_dir))
        builder = drafter_builder(choice, config, codec)
        executor = SingleExecutor(Path(engine_dir), manifest, config, max_model_len, record_gaps, interpreted, builder)
        return cls(manifest, config, executor, codec, max_model_len, choice)

    def again(self, choice: Choice) -> Engine:
        """Another engine over the same executor, which must be idle: an empty KV cache, new counters, and `choice` to speculate with."""
        self.executor.use_drafter(choice.draft is not None)
        config = replace(self.config, speculative="auto" if choice.method != "off" else "off", draft=None)
        return Engine(self.manifest, config, self.executor, self.codec, self.max_model_len, choice)

    @property
    def num_unfinished(self) -> int:
        """Requests added and not yet returned."""
        return len(self._groups)

    def warm_up(self) -> None:
        """Answer one token, and forget it: compiled kernels are loaded and memory is laid out before the first request is timed."""
        if self.max_model_len < 3:
            return
        self.add(Request(-1, [0], SamplingParams(max_tokens=2, ignore_eos=True)))
        for _ in self.drain():
            pass
        self.executor.reset_counters()
        self._counters = _Counters()

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError when it can never be served."""
        self._check(request)
        self._groups[request.request_id] = _Group(time.monotonic())
        salt = self.executor.cache_salt(len(request.prompt_token_ids))
        for index in range(request.params.n):
            seq = Sequence(request, index, self._num_added, salt)
            if request.params.stop:
                seq.stopper = IncrementalDetokenizer(self.codec, request.params)
            self.scheduler.add(seq)
        self._num_added += 1

    def step(self) -> list[RequestOutput]:
        """Run one step: plan, submit, wait, commit. Returns the requests it finished; [] when there is nothing to do.

        Where the executor can, the next step is planned and submitted before this one is waited for.
        """
        if not self.scheduler.num_unfinished:
            return []
        started = time.monotonic()
        step = self._running or self._start()
        if step is None:
            return []
        ahead = self._ahead_of(step)
        self._running = self._start(ahead) if ahead is not Ahead.NO else None
        finished = self._finish_step(step)
        self._count(step.plan, started)
        if self._running is not None and not self.scheduler.num_unfinished:
            self._finish_step(self._running)  # all its answers have ended: one token too many of each
            self._running = None
        return self._collect(finished)

    def _start(self, ahead: Ahead = Ahead.NO) -> _Step | None:
        """Plan a step and submit it; None when nothing can be planned ahead, or there is no memory for it: the next one is smaller."""
        plan = self.scheduler.schedule(ahead, halved=ahead is Ahead.NO and self._halves_pay())
        if not plan.scheduled:
            return None
        began = self._clock()
        try:
            pending = self.executor.submit(plan)
        except StepTooLargeError as error:
            self._shrink(plan, str(error))
            return None
        self.scheduler.advance(plan)
        self._counters.num_ahead += ahead is not Ahead.NO
        if self.halves is not None:
            self.halves.num_steps += ahead is Ahead.OTHERS
        return _Step(plan, pending, began, ahead is not Ahead.NO)

    def _shrink(self, plan: SchedulerOutput, reason: str) -> None:
        """Take back a step that the device has no memory for, and halve what a step may have. Raises MachineError when it has one token."""
        if plan.num_tokens == 1:
            raise MachineError(
                f"there is no memory for a step of one token ({reason})",
                "type a smaller --kv-cache-memory-bytes or --gpu-memory-utilization, then run the same command",
            )
        self._counters.num_too_large += 1
        self.scheduler.withdraw(plan, plan.num_tokens // 2)

    def _ahead_of(self, step: _Step) -> Ahead:
        if not self.executor.steps_ahead:
            return Ahead.NO
        return self.scheduler.ahead_of(step.plan, self.executor.draws_alone, self._halves_pay())

    def _halves_pay(self) -> bool:
        return self.halves is not None and self.halves.pay(len(self.scheduler.running))

    def _finish_step(self, step: _Step) -> list[Sequence]:
        """Wait for a step's tokens and take them over. Returns the sequences that ended."""
        asked = self._clock()
        result = step.pending.wait()
        now = self._clock()
        if self.speculator is not None:
            overlapped = step.was_ahead or self._running is not None
            own = result.device_s if overlapped and result.device_s is not None else now - step.began
            self.speculator.timed(step.plan, own)
        if self.halves is not None:
            self.halves.ran(step.plan, result.device_s)
            if self._read_at is not None:
                self.halves.prepared((self._running or step).plan, asked - self._read_at)
            self._read_at = now
        return self.scheduler.commit(step.plan, result)

    def drain(self) -> Iterator[RequestOutput]:
        """Step until every request is answered."""
        while self.num_unfinished:
            yield from self.step()

    def metrics(self) -> dict[str, Any]:
        """Counters and choices of the run so far. Times in seconds."""
        c = self._counters
        executor = self.executor.metrics()
        busy = executor.get("forward_s", 0.0)
        return {
            **executor,
            "num_steps": c.num_steps,
            "steps_ahead": c.num_ahead,
            "steps_too_large": c.num_too_large,
            "step_s": c.step_s,
            "host_overhead_fraction": 1.0 - busy / c.step_s if c.step_s else 0.0,
            "tokens_per_step_mean": c.num_tokens / c.num_steps if c.num_steps else 0.0,
            "tokens_per_step_max": c.max_step_tokens,
            "sequences_per_step_mean": c.num_sequences / c.num_steps if c.num_steps else 0.0,
            "prompt_tokens": c.num_prompt_tokens,
            "cached_tokens": c.num_cached_tokens,
            "output_tokens": c.num_output_tokens,
            "computed_tokens": c.num_tokens,
            "preemptions": self.scheduler.num_preemptions,
            "kv_blocks": self.kv.num_blocks,
            "kv_blocks_peak": self.kv.peak_held,
            "block_size": self.config.block_size,
            "max_num_seqs": self.config.max_num_seqs,
            "max_num_batched_tokens": self.scheduler.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "speculation": self._speculation_metrics(),
        }

    def _speculation_metrics(self) -> dict[str, Any] | None:
        if self.speculator is None:
            return None
        return {**self.speculator.metrics(), **({"halves": self.halves.metrics()} if self.halves is not None else {})}

    def finish(self) -> list[str]:
        """Keep what drafts remember, when that was asked for. Returns why it could not be: a warning, the answers stand."""
        memory = next((proposer.memory for proposer in self._proposers() if isinstance(proposer, NgramProposer)), None)
        if self.config.draft_memory is None or memory is None:
            return []
        try:
            save_memory(Path(self.config.draft_memory).expanduser(), memory)
        except OSError as error:
            return [f"the draft memory '{self.config.draft_memory}' was not kept ({error.strerror or error})"]
        return []

    def _proposers(self) -> list[Proposer]:
        return self.speculator.proposers if self.speculator is not None else []

    def close(self) -> None:
        """Give memory and threads back."""
        self.executor.shutdown()

    def _check(self, request: Request) -> None:
        prompt_len = len(request.prompt_token_ids)
        if request.request_id in self._groups:
            raise ValueError(f"request {request.request_id} is already being answered")
        if prompt_len == 0:
            raise RequestError("the prompt has no tokens, at least 1 is needed", "empty_prompt", "prompt")
        if prompt_len >= self.max_model_len:
            raise RequestError(
                f"the prompt has {prompt_len} tokens, the context holds {self.max_model_len} with the answer",
                "context_length_exceeded",
                "prompt",
            )
        if max(request.prompt_token_ids) >= self.vocab_size or min(request.prompt_token_ids) < 0:
            raise RequestError(f"a token id of the prompt is not below the vocabulary's {self.vocab_size}", "invalid_token", "prompt")
        longest = (
            self.max_model_len if request.params.max_tokens is None else min(prompt_len + request.params.max_tokens, self.max_model_len)
        )
        needed = self.kv.blocks_for(longest)
        if needed > self.kv.num_blocks:
            raise RequestError(
                f"prompt and answer of up to {longest} tokens need {needed} KV blocks, the pool has {self.kv.num_blocks}",
                "kv_capacity_exceeded",
                "max_tokens",
            )

    def _count(self, plan: SchedulerOutput, started: float) -> None:
        now = time.monotonic()
        c = self._counters
        c.num_steps += 1
        c.num_tokens += plan.num_tokens
        c.num_sequences += len(plan.scheduled)
        c.max_step_tokens = max(c.max_step_tokens, plan.num_tokens)
        c.step_s += now - started
        for item in plan.scheduled:
            if item.samples and item.seq.first_token_at_s == 0.0:
                item.seq.first_token_at_s = now

    def _collect(self, finished: list[Sequence]) -> list[RequestOutput]:
        """Group finished sequences; a request is done when all its answers are."""
        outputs = []
        for seq in finished:
            group = self._groups[seq.request.request_id]
            group.finished.append(seq)
            if len(group.finished) == seq.request.params.n:
                del self._groups[seq.request.request_id]
                outputs.append(self._output(group))
        return outputs

    def _output(self, group: _Group) -> RequestOutput:
        sequences = sorted(group.finished, key=lambda s: s.index)
        first = sequences[0]
        gaps = [s.min_top2_gap for s in sequences if s.min_top2_gap is not None]
        output = RequestOutput(
            request_id=first.request.request_id,
            num_prompt_tokens=first.prompt_len,
            completions=[self._completion(seq) for seq in sequences],
            num_cached_tokens=first.num_cached_tokens or 0,
            added_at_s=group.added_at_s,
            first_token_at_s=min(s.first_token_at_s for s in sequences),
            finished_at_s=time.monotonic(),
            num_preemptions=sum(s.num_preemptions for s in sequences),
            num_drafted=sum(s.num_drafted for s in sequences),
            num_accepted=sum(s.num_accepted for s in sequences),
            min_top2_gap=min(gaps) if gaps else None,
        )
        self._counters.num_prompt_tokens += first.prompt_len
        self._counters.num_cached_tokens += output.num_cached_tokens
        self._counters.num_output_tokens += sum(s.num_output_tokens for s in sequences)
        return output

    def _completion(self, seq: Sequence) -> Completion:
        assert seq.finish_reason is not None
        params, token_ids = seq.request.params, seq.output_token_ids
        ended_by_eos = seq.finish_reason == "stop" and seq.stop_reason is None
        shown = token_ids[:-1] if ended_by_eos and not params.include_stop_str_in_output else token_ids
        text = final_text(self.codec, shown, params, seq.stop_reason)
        return Completion(seq.index, token_ids, text, seq.finish_reason, seq.stop_reason)


def resolve_max_model_len(model: ModelConfig, wanted: int | None) -> int:
    """The run's context. Raises UsageError when more is wanted than the model has."""
    longest = model.context_length
    if wanted is not None and wanted > longest:
        raise UsageError(f"--max-model-len is {wanted}, the model's context is {longest}", f"type --max-model-len {longest} or less")
    return wanted or longest
