"""Training a draft on features that are computed already.

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

from dspark.converters.distill.checkpoints import TrainingState, load_checkpoint, save_checkpoint
from dspark.converters.distill.learner import Learner, Parameters, seeded
from dspark.converters.distill.options import DistillOptions
from dspark.runtime.spec.errors import MachineError

TIMED_STEPS = 3
"""Steps after which a run with a budget decides how many it can do; the first one is not counted."""
_SAFETY = 0.9  # of the time that is left, for steps that take longer than those that were timed


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
    """num_lines: of the training. work: where checkpoints lie. plan: what a resumed run must have the same."""

    def __init__(
        self,
        learner: Learner,
        num_lines: int,
        options: DistillOptions,
        work: Path,
        plan: dict[str, Any],
        report: Report | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._learner, self._num_lines = learner, num_lines
        self._options, self._work, self._plan, self._report, self._clock = options, work, plan, report, clock
        self.parameters = learner.parameters
        self._optimizer = torch.optim.AdamW(list(self.parameters.values()), lr=options.highest_rate, weight_decay=0.0)

    def run(self, deadline_s: float | None = None) -> Trained:
        """Train to the end of the plan, of the budget (a time of the clock), or of what the held-out lines gain."""
        options = self._options
        state = load_checkpoint(self._work, self._plan) if options.resume else None
        if state is None:
            state = TrainingState({}, total_steps=math.ceil(self._num_lines * options.epochs / options.batch_lines))
            looked = self._clock()
            self._look(state, math.nan)
            look_s = self._clock() - looked
        else:
            self._restore(state)
            look_s = 0.0
        began = saved = self._clock()
        earlier_s, loss, stopped, first_s = state.elapsed_s, math.nan, "steps", 0.0
        while state.step < state.total_steps:
            if state.looks_since_gain >= options.patience:
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
        best = {name: tensor.to(self.parameters[name].device) for name, tensor in state.part("best").items()}
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
        loss = self._learner.add_gradients(self._batch(state.step), state.step * options.batch_lines)
        if not math.isfinite(loss):
            hint = "lower the learning rate, or check the engine with: dspark eval"
            raise MachineError(f"the drafter's loss is {loss} in step {state.step + 1}", hint)
        torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), options.clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = options.highest_rate * rate(state.step, state.total_steps, options.warm_up_share)
        self._optimizer.step()
        state.step += 1
        return loss

    def _batch(self, step: int) -> list[int]:
        """Training lines of a step: every epoch has its own order."""
        count = self._num_lines
        places = [step * self._options.batch_lines + i for i in range(min(self._options.batch_lines, count))]
        epochs = {place // count for place in places}
        orders = {epoch: torch.randperm(count, generator=seeded(self._options.seed, epoch)) for epoch in epochs}
        return [int(orders[place // count][place % count]) for place in places]

    # ------------------------------------------------------------------------------------------------------------ looks

    def _look(self, state: TrainingState, loss: float) -> None:
        """Measure the held-out lines, at the same anchors each time, and keep the weights if they are the best so far."""
        tau, terms = self._learner.held_out()
        gains = tau > state.best_tau or terms["loss"] < state.least_loss
        state.looks_since_gain = 0 if gains else state.looks_since_gain + 1
        state.least_loss = min(state.least_loss, terms["loss"])
        state.history.append({"step": state.step, "loss": None if math.isnan(loss) else loss, "tau": tau, "held_out": terms})
        if state.step == 0 or tau > state.best_tau:
            state.best_tau, state.best_step = tau, state.step
            state.tensors |= {f"best/{name}": tensor.detach().clone() for name, tensor in self.parameters.items()}

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
                moments = {kind: found[name].to(tensor.device) for kind, found in kinds.items() if kind != "step"}
                self._optimizer.state[tensor] = {**moments, "step": kinds["step"][name]}


def rate(step: int, total: int, warm_up_share: float) -> float:
    """Factor on the learning rate of step number `step` (from 0): linear over the first share, then a cosine to 0."""
    warm_up = max(1, round(total * warm_up_share))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, total - warm_up)))
