"""Training a block drafter on features that are computed already.

Optimiser, schedule and objective are those of the published recipe (arXiv 2607.05147): AdamW without weight decay, linear warm-up, cosine
to 0, gradients cut at a norm, float32 weights. What a step sees follows from the seed and its number alone, so nothing but the weights and
moments has to be kept for a run to go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from dspark.converters.distill.checkpoints import TrainingState, load_checkpoint, save_checkpoint
from dspark.converters.distill.data import AnsweredLine, DistillData
from dspark.converters.distill.features import Features, TargetVocabulary
from dspark.converters.distill.losses import CE_WEIGHT, CONFIDENCE_WEIGHT, TV_WEIGHT, expected_lengths, sequence_loss, supervised_rows
from dspark.converters.distill.model import Parameters, TrainableDraft, new_parameters
from dspark.converters.distill.options import DistillOptions
from dspark.runtime.spec.errors import MachineError
from dspark.runtime.speculation.heads.config import DraftConfig

TIMED_STEPS = 3
"""Steps after which a run with a budget decides how many it can do; the first one is not counted."""
_SAFETY = 0.9  # of the time that is left, for steps that take longer than those that were timed
_HELD_OUT_STREAM = 1 << 40


@dataclass(frozen=True)
class Progress:
    """One report. loss: of the newest step; tau: tokens a round that the held-out lines are expected to bring at temperature 1, as of the
    last look at them."""

    step: int
    total_steps: int
    loss: float
    tau: float
    elapsed_s: float


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Trained:
    """parameters: the best ones by held-out tau. stopped: "steps", "budget" or "no further gain". steps: done; best_step: theirs."""

    parameters: Parameters
    steps: int
    best_step: int
    stopped: str
    tau_before: float
    tau_after: float
    history: list[dict[str, Any]]


class Trainer:
    """lines and features in the order of data.lines. work: where checkpoints lie. plan: what a resumed run must have the same."""

    def __init__(
        self,
        config: DraftConfig,
        data: DistillData,
        features: Features,
        vocabulary: TargetVocabulary,
        options: DistillOptions,
        work: Path,
        plan: dict[str, Any],
        report: Report | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._data, self._features, self._vocabulary = config, data, features, vocabulary
        self._options, self._work, self._plan, self._report, self._clock = options, work, plan, report, clock
        self.device = vocabulary.embedding.device
        self.parameters = new_parameters(config, options.seed, str(self.device))
        longest = max(len(line.tokens) for line in data.lines)
        self._draft = TrainableDraft(config, self.parameters, vocabulary.embed, longest)
        self._optimizer = torch.optim.AdamW(list(self.parameters.values()), lr=options.learning_rate, weight_decay=0.0)

    def run(self, deadline_s: float | None = None) -> Trained:
        """Train to the end of the plan, of the budget (a time of the clock), or of what the held-out lines gain."""
        options = self._options
        state = load_checkpoint(self._work, self._plan) if options.resume else None
        if state is None:
            state = TrainingState({}, total_steps=math.ceil(len(self._data.training) * options.epochs / options.batch_lines))
            looked = self._clock()
            self._look(state, math.nan)
            look_s = self._clock() - looked
        else:
            self._restore(state)
            look_s = 0.0
        began = saved = self._clock()
        earlier_s, loss, stopped, first_s = state.elapsed_s, math.nan, "steps", 0.0
        while state.step < state.total_steps:
            if state.looks_since_best >= options.patience:
                stopped = "no further gain"
                break
            if deadline_s is not None and state.step and self._clock() >= deadline_s:
                stopped = "budget"
                break
            loss = self._step(state)
            now = self._clock()
            state.elapsed_s = earlier_s + now - began
            if state.step == 1:
                first_s = now
            if deadline_s is not None and state.step == TIMED_STEPS:
                self._plan_steps(state, (now - first_s) / (TIMED_STEPS - 1), deadline_s - now - look_s * options.evaluations)
            if state.step % self._look_every(state) == 0 or state.step == state.total_steps:
                self._look(state, loss)
            if self._report is not None:
                self._report(Progress(state.step, state.total_steps, loss, state.history[-1]["tau"], state.elapsed_s))
            if self._clock() - saved >= options.checkpoint_s:
                self.save(state)
                saved = self._clock()
        if state.history[-1]["step"] != state.step:
            self._look(state, loss)
        self.save(state)
        best = {name: tensor.to(self.device) for name, tensor in state.part("best").items()}
        return Trained(best, state.step, state.best_step, stopped, state.history[0]["tau"], state.best_tau, state.history)

    def _plan_steps(self, state: TrainingState, step_s: float, left_s: float) -> None:
        """Cut the plan to the time, so that the learning rate comes down to 0 within it."""
        fitting = state.step + int(max(_SAFETY * left_s, 0.0) / max(step_s, 1e-6))
        state.total_steps = max(state.step, min(state.total_steps, fitting))

    def _look_every(self, state: TrainingState) -> int:
        return max(1, state.total_steps // self._options.evaluations)

    # ------------------------------------------------------------------------------------------------------------ one step

    def _step(self, state: TrainingState) -> float:
        """One optimiser step. Raises MachineError when the loss is not finite."""
        options = self._options
        self._optimizer.zero_grad()
        lines = self._batch(state.step)
        anchors = [self._anchors(index, state.step * options.batch_lines + place) for place, index in enumerate(lines)]
        rows = [supervised_rows(self._tokens(i), at, self._config.block_size) for i, at in zip(lines, anchors, strict=True)]
        weight = sum(float(entry.weight.sum()) for entry in rows)
        sums = torch.zeros(3, device=self.device)
        for index, at, entry in zip(lines, anchors, rows, strict=True):
            states = self._states(index, at)
            sums += sequence_loss(self._draft, self._vocabulary, states, entry, self._final(index), 1 / weight)[0]
        ce, tv, confidence = (sums / weight).tolist()
        loss = float(CE_WEIGHT * ce + TV_WEIGHT * tv + CONFIDENCE_WEIGHT * confidence)
        if not math.isfinite(loss):
            hint = "lower the learning rate, or check the engine with: dspark eval"
            raise MachineError(f"the drafter's loss is {loss} in step {state.step + 1}", hint)
        torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), options.clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = options.learning_rate * rate(state.step, state.total_steps, options.warm_up_share)
        self._optimizer.step()
        state.step += 1
        return loss

    def _batch(self, step: int) -> list[int]:
        """Training lines of a step: every epoch has its own order."""
        count = len(self._data.training)
        places = [step * self._options.batch_lines + i for i in range(min(self._options.batch_lines, count))]
        orders = {epoch: torch.randperm(count, generator=self._generator(epoch)) for epoch in {place // count for place in places}}
        return [int(orders[place // count][place % count]) for place in places]

    def _anchors(self, index: int, stream: int) -> torch.Tensor:
        """Places of the answer that a draft starts behind, without repetition, ascending."""
        line: AnsweredLine = self._data.lines[index]
        possible = torch.arange(line.prompt_len, len(line.tokens) - 1)
        picked = torch.randperm(len(possible), generator=self._generator(stream, 1))[: self._options.anchors]
        return possible[picked].sort().values.to(self.device)

    def _generator(self, *parts: int) -> torch.Generator:
        words = b"".join(part.to_bytes(8, "little") for part in (self._options.seed, *parts))
        return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(words) >> 1)

    def _states(self, index: int, anchors: torch.Tensor) -> torch.Tensor:
        tapped = self._features.tapped[self._features.rows(index)].to(self.device)
        return self._draft.states(tapped, self._tokens(index), anchors).flatten(0, 1)

    def _tokens(self, index: int) -> torch.Tensor:
        return torch.tensor(self._data.lines[index].tokens, device=self.device)

    def _final(self, index: int) -> torch.Tensor:
        return self._features.final[self._features.rows(index)].to(self.device)

    # ------------------------------------------------------------------------------------------------------------ looks

    def _look(self, state: TrainingState, loss: float) -> None:
        """Measure the held-out lines, at the same anchors each time, and keep the weights if they are the best so far."""
        tau, terms = self.held_out()
        named = dict(zip(("ce", "tv", "confidence"), terms, strict=True))
        state.history.append({"step": state.step, "loss": None if math.isnan(loss) else loss, "tau": tau, "held_out": named})
        if state.step == 0 or tau > state.best_tau:
            state.best_tau, state.best_step, state.looks_since_best = tau, state.step, 0
            state.tensors |= {f"best/{name}": tensor.detach().clone() for name, tensor in self.parameters.items()}
        else:
            state.looks_since_best += 1

    @torch.no_grad()
    def held_out(self) -> tuple[float, list[float]]:
        """tau of the held-out lines, and their mean losses (cross entropy, total variation, confidence)."""
        first = len(self._data.training)
        lengths, sums, weight = [], torch.zeros(3, device=self.device), 0.0
        for index in range(first, len(self._data.lines)):
            anchors = self._anchors(index, _HELD_OUT_STREAM + index)
            rows = supervised_rows(self._tokens(index), anchors, self._config.block_size)
            states = self._states(index, anchors)
            found, overlap = sequence_loss(self._draft, self._vocabulary, states, rows, self._final(index))
            lengths.append(expected_lengths(rows, overlap, len(anchors), self._config.block_size))
            sums, weight = sums + found, weight + float(rows.weight.sum())
        return float(torch.cat(lengths).mean()), [float(term) for term in (sums / weight).tolist()]

    # ------------------------------------------------------------------------------------------------------------ checkpoints

    def save(self, state: TrainingState) -> None:
        """Bring weights, moments and counters to disk."""
        state.tensors |= {f"weight/{name}": tensor for name, tensor in self.parameters.items()}
        for name, tensor in self.parameters.items():
            moments = self._optimizer.state.get(tensor, {})
            state.tensors |= {f"{kind}/{name}": moments[kind] for kind in ("exp_avg", "exp_avg_sq", "step") if kind in moments}
        save_checkpoint(self._work, self._plan, state)

    def _restore(self, state: TrainingState) -> None:
        with torch.no_grad():
            for name, tensor in state.part("weight").items():
                self.parameters[name].copy_(tensor)
        kinds = {kind: state.part(kind) for kind in ("exp_avg", "exp_avg_sq", "step")}
        for name, tensor in self.parameters.items():
            if name in kinds["step"]:
                moments = {kind: found[name].to(self.device) for kind, found in kinds.items() if kind != "step"}
                self._optimizer.state[tensor] = {**moments, "step": kinds["step"][name]}


def rate(step: int, total: int, warm_up_share: float) -> float:
    """Factor on the learning rate of step number `step` (from 0): linear over the first share, then a cosine to 0."""
    warm_up = max(1, round(total * warm_up_share))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, total - warm_up)))
