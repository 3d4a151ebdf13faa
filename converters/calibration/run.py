"""One calibrated quantization from its samples to its last layer, able to go on where an earlier one was killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dspark.converters.calibration.answers import greedy_answers
from dspark.converters.calibration.bit_budget import spend_bits
from dspark.converters.calibration.driver import CalibratedQuantization, LayerProgress, WalkOptions
from dspark.converters.calibration.samples import CalibrationSet, SampleRequest, load_samples
from dspark.converters.calibration.work import WorkDirectory
from dspark.converters.mapping import MappedModel
from dspark.converters.quantize import QuantPlan
from dspark.converters.writer import EngineWriter, hash_file
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.cores import usable_cores
from dspark.runtime.spec.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CalibratedRun:
    """What the user asked for. resume: take over the layers of an interrupted run with the same settings."""

    samples: SampleRequest
    walk: WalkOptions = field(default_factory=WalkOptions)
    resume: bool = False
    progress: LayerProgress | None = None

    def open(self, model: MappedModel, plan: QuantPlan, engine_dir: Path) -> OpenRun:
        """The run of one model."""
        return OpenRun(self, model, plan, engine_dir)


class OpenRun(AbstractContextManager["OpenRun"]):
    """Holds the work directory from the first layer to the published engine."""

    def __init__(self, request: CalibratedRun, model: MappedModel, plan: QuantPlan, engine_dir: Path) -> None:
        self._request, self._model, self._plan, self._engine_dir = request, model, plan, engine_dir
        self._work: WorkDirectory | None = None
        self.calibration: CalibrationSet | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._work is not None:
            self._work.__exit__(kind, error, trace)

    def names(self) -> list[str]:
        """Every tensor name that the engine will hold."""
        return self._plan.names(self._model)

    def tensors(self, writer: EngineWriter) -> Iterator[tuple[str, torch.Tensor]]:
        """Read the samples with the engine's own tokenizer, then quantize layer by layer."""
        self.calibration = load_samples(self._request.samples, load_codec(writer.directory), self._model.config, self._answer)
        self._plan.notes += self.calibration.notes
        self._plan.calibration, self._plan.held_out = self.calibration.record(), self.calibration.held_out
        if self._plan.target_bpw is not None:
            kernels = self._request.walk.kernels(self._model.config)
            spend_bits(self._model, self._plan, self.calibration.samples, kernels, self._plan.target_bpw)
        self._work = WorkDirectory(self._engine_dir, self._fingerprint(self.calibration), self._request.resume).__enter__()
        if self._work.num_done:
            self._plan.notes.append(f"{self._work.num_done} layers were taken over from an interrupted run")
        walk = CalibratedQuantization(self._model, self._plan, self.calibration, self._work, self._request.walk, self._request.progress)
        yield from walk.tensors()

    def _answer(self, prompts: list[list[int]], limit: int) -> list[list[int]]:
        """By the source itself, which is converted for it unless it is an engine."""
        from dspark.converters.pipeline import convert

        source = Path(self._model.reader.path)
        if (source / MANIFEST_NAME).is_file():
            return greedy_answers(source, prompts, limit)
        with TemporaryDirectory(prefix=f".{self._engine_dir.name}.source-", dir=self._engine_dir.resolve().parent) as directory:
            engine = Path(directory) / "engine"
            convert(source, engine, dtype=self._model.config.dtype, audit=False)
            return greedy_answers(engine, prompts, limit)

    def discard(self) -> None:
        """The engine is published: nothing is left to resume."""
        if self._work is not None:
            self._work.discard()

    def _fingerprint(self, calibration: CalibrationSet) -> dict[str, Any]:
        """Everything that a layer's result depends on."""
        solver = self._plan.solver
        return {
            "dspark": version("dspark"),
            "torch": version("torch"),
            "source": {path.name: hash_file(path) for path in self._model.reader.files()},
            "method": self._plan.method,
            "quantization": self._plan.config.to_json(),
            "solver": asdict(solver) if solver is not None else None,
            "calibration": calibration.digest,
            "dtype": self._model.config.dtype,
            "activations": self._request.walk.resolved_dtype(self._model.config.dtype),
            "threads": usable_cores(),
        }
