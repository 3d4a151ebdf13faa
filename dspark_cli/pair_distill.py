"""`dspark pair --distill`: a draft made on the spot, for engines that nobody has published one for."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.runtime.spec.errors import UsageError
from dspark_cli.console import Console, Progress
from dspark_cli.options import flag

if TYPE_CHECKING:
    from dspark.converters.distill.options import DistillOptions
    from dspark.converters.distill.train import Progress as Step

WORK_FOLDER = ".distill"
DRAFT_KINDS = ("dspark", "draft-model")


@dataclass(frozen=True)
class DistillFlags:
    """Flags of `dspark pair --distill`."""

    distill: bool = flag(False, "make a draft first: train one on the engine's own answers to the lines of --prompts", names="--distill")
    draft_kind: str = flag(
        "dspark", "what to train: a head on the engine's states, or a small model made of some of its layers", choices=DRAFT_KINDS
    )
    budget: float = flag(1800.0, "seconds that making the draft may take, answers and all", metavar="SECONDS", low=1, high=10**7)
    draft_layers: int | None = flag(None, "layers of the draft (default: 2 of a head, 4 of a model)", low=1, high=1024)
    draft_length: int = flag(5, "tokens that it drafts at a time", low=1, high=31)
    draft_answers: int = flag(1, "answers to learn from of each line; those after the first are drawn at random", low=1, high=1024)
    max_prompts: int = flag(1024, "lines to learn from, chosen by their content", low=2, high=10**6)
    draft_seed: int = flag(42, "what all that is random in the training follows from", low=0, high=2**63 - 1)
    resume: bool = flag(True, "go on with a training that was stopped, or start anew (default: resume)", names="--resume/--fresh")

    def changed(self) -> list[str]:
        """Flags, but for --distill itself, that are not at their defaults."""
        names = {field.name: "--" + field.name.replace("_", "-") for field in fields(self)} | {"resume": "--fresh"}
        return [names[f.name] for f in fields(self) if f.name != "distill" and getattr(self, f.name) != f.default]

    def options(self, device: str, threads: int | None) -> DistillOptions:
        """What the training is asked for."""
        from dspark.converters.distill.options import DistillOptions

        return DistillOptions(
            budget_s=self.budget,
            resume=self.resume,
            device=device,
            threads=threads,
            seed=self.draft_seed,
            kind=self.draft_kind,
            layers=self.draft_layers,
            block_size=self.draft_length,
            answers=self.draft_answers,
            max_prompts=self.max_prompts,
            epochs=MOST_EPOCHS,
        )


MOST_EPOCHS = 40
"""The budget ends a training; where it would allow more than this, little is left to learn from the same lines."""


def make_draft(console: Console, engine: Path, prompts: Path, flags: DistillFlags, device: str, threads: int | None) -> Path:
    """Train a draft, or take the one that a stopped command with the same settings has finished. Returns its directory, in the engine until
    `discard_work`. Raises as `distill` does."""
    from dspark.converters.distill.run import distill, is_made_from

    options, out = flags.options(device, threads), engine / WORK_FOLDER / "draft"
    if not flags.resume:
        discard_work(engine)
    if out.exists():
        if is_made_from(out, engine, prompts, options):
            console.note("distill: the draft is finished already (--fresh makes it anew)")
            return out
        raise UsageError("a draft of other settings is finished and was not stored", "type the old settings again, or add --fresh")
    out.parent.mkdir(exist_ok=True)
    steps = StepBar(console)
    console.note(f"distill: a draft of kind {options.kind}, {options.num_layers} layers, in {flags.budget:.0f} s or less")
    try:
        result = distill(engine, prompts, out, options, steps.show, lambda line: console.note(f"distill: {line}"))
    finally:
        steps.close()
    for note in result.notes:
        console.note(f"note: {note.removeprefix('distill: ')}")
    return out


def learned_prompts(draft: Path) -> frozenset[str]:
    """Digests of the prompts that a distilled draft was trained on, none of any other."""
    from dspark.converters.distill.run import lineage_of

    return frozenset(lineage_of(draft).get("training_prompts", ()))


def discard_work(engine: Path) -> None:
    """Remove what a training left in the engine."""
    shutil.rmtree(engine / WORK_FOLDER, ignore_errors=True)


class StepBar:
    """A bar of training steps; their number is known once some were timed."""

    def __init__(self, console: Console) -> None:
        self._console, self._total = console, 0
        self._bar: Progress | None = None

    def show(self, step: Step) -> None:
        """Count one step."""
        if self._bar is None or step.total_steps != self._total:
            self.close()
            self._total = step.total_steps
            self._bar = self._console.progress(step.total_steps, "step", step.step - 1)
        loss = "" if math.isnan(step.loss) else f"{step.loss:.3f}"
        self._bar.advance(1, loss=loss, tokens_a_round=f"{step.tau:.2f}")

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
