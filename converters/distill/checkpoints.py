"""The state of a training in one file, so that an interrupted run ends with the weights of an undisturbed one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dspark.converters.readers.safetensors import open_safetensors
from dspark.converters.writer import sync
from dspark.runtime.spec.errors import UsageError

CHECKPOINT_NAME = "training.safetensors"


@dataclass
class TrainingState:
    """tensors: parameters, both moments and the best parameters, each as `kind/name`. step: steps done; total_steps: the plan's, and the
    schedule of the learning rate; elapsed_s: spent on training, in all runs. best_tau: of `best/`; least_loss: seen on the
    held-out lines; looks_since_gain: evaluations since either got better.
    history: one entry for each evaluation."""

    tensors: dict[str, torch.Tensor]
    step: int = 0
    total_steps: int = 0
    elapsed_s: float = 0.0
    best_tau: float = 0.0
    best_step: int = 0
    least_loss: float = float("inf")
    looks_since_gain: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)

    def part(self, kind: str) -> dict[str, torch.Tensor]:
        """The tensors of a kind, by parameter name."""
        return {name.removeprefix(f"{kind}/"): tensor for name, tensor in self.tensors.items() if name.startswith(f"{kind}/")}


def save_checkpoint(directory: Path, plan: dict[str, Any], state: TrainingState) -> None:
    """Replace the checkpoint; a killed run leaves the old one or the new one. plan: what the training depends on."""
    scalars = {key: value for key, value in vars(state).items() if key != "tensors"}
    path, draft = directory / CHECKPOINT_NAME, directory / f"{CHECKPOINT_NAME}.part"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    save_file(tensors, draft, {"plan": json.dumps(plan), "state": json.dumps(scalars)})
    sync(draft)
    draft.rename(path)
    sync(directory)


def load_checkpoint(directory: Path, plan: dict[str, Any]) -> TrainingState | None:
    """The state of an interrupted run, None when there is none. Raises UsageError when it was started with another plan."""
    path = directory / CHECKPOINT_NAME
    if not path.is_file():
        return None
    handle = open_safetensors(path)
    metadata = handle.metadata()
    before, now = json.loads(metadata["plan"]), json.loads(json.dumps(plan))
    changed = sorted(key for key in {**before, **now} if before.get(key) != now.get(key))
    if changed:
        hint = "type the old settings again, or start anew with --fresh"
        raise UsageError(f"the interrupted distillation had other settings: {', '.join(changed)}", hint)
    return TrainingState({name: handle.get_tensor(name) for name in handle.keys()}, **json.loads(metadata["state"]))  # noqa: SIM118
