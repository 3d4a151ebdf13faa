"""The two kinds of draft that are distilled: how each is made, stored, and measured as it is served."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from dspark.converters.distill.acceptance import draft_model_rounds, held_out_rounds
from dspark.converters.distill.block_learner import BlockLearner
from dspark.converters.distill.data import DistillData
from dspark.converters.distill.features import Features, TargetVocabulary
from dspark.converters.distill.learner import Learner, Parameters
from dspark.converters.distill.model_learner import ModelLearner
from dspark.converters.distill.options import DistillOptions
from dspark.converters.distill.shape import choose_mask_token, draft_config
from dspark.converters.distill.small_model import VOCABULARY_TENSORS, first_parameters, small_config
from dspark.converters.drafts.store import store_draft
from dspark.converters.writer import EngineWriter, hash_file
from dspark.runtime.execution.loader import load_model
from dspark.runtime.jobs.tokenizer import TextCodec
from dspark.runtime.models import FAMILIES
from dspark.runtime.spec.manifest import EngineManifest
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.speculation.heads.config import DraftConfig
from dspark.runtime.speculation.heads.replay import Round

PACKAGING = "dspark distill"


@dataclass(frozen=True)
class Target:
    """The engine that a draft is made for."""

    directory: Path
    manifest: EngineManifest
    codec: TextCodec
    device: str


class DraftKind(Protocol):
    """taps: target layers whose states it learns from. num_positions: tokens of a draft. has_confidence: whether it says how sure it is in
    numbers that temperatures are fitted to."""

    taps: tuple[int, ...]
    num_positions: int
    has_confidence: bool

    def learner(self, data: DistillData, features: Features, vocabulary: TargetVocabulary) -> Learner:
        """A draft in training, with its first weights."""

    def store(self, directory: Path, parameters: Parameters, lineage: dict[str, Any], temperatures: tuple[float, ...] = ()) -> None:
        """Write the draft as it is served; `directory` does not exist."""

    def rounds(self, directory: Path, data: DistillData, features: Features) -> list[Round]:
        """Every round of the held-out lines with a stored draft beside its target."""


def choose_kind(target: Target, options: DistillOptions, data: DistillData) -> DraftKind:
    """The kind that the options ask for. Raises UsageError or UnsupportedError for a draft that this target cannot have."""
    if options.kind == "draft-model":
        return ModelKind(target, options, *small_config(target.manifest.model, options))
    mask = choose_mask_token(target.codec, target.manifest.model, (token for line in data.lines for token in line.tokens))
    return HeadKind(target, options, draft_config(target.manifest.model, options, mask))


@dataclass(frozen=True)
class _Parameters:
    """A DraftSource."""

    config: DraftConfig
    parameters: Parameters
    packaging: str = PACKAGING

    def read(self, name: str) -> torch.Tensor:
        return self.parameters[name].detach().cpu()


class HeadKind:
    """A DSpark head on the target's features."""

    has_confidence = True

    def __init__(self, target: Target, options: DistillOptions, config: DraftConfig) -> None:
        self._target, self._options, self._config = target, options, config
        self.taps, self.num_positions = config.taps, config.block_size

    def learner(self, data: DistillData, features: Features, vocabulary: TargetVocabulary) -> Learner:
        return BlockLearner(self._config, data, features, vocabulary, self._options)

    def store(self, directory: Path, parameters: Parameters, lineage: dict[str, Any], temperatures: tuple[float, ...] = ()) -> None:
        directory.mkdir()
        draft = _Parameters(replace(self._config, temperatures=temperatures), parameters)
        store_draft(draft, directory, self._target.manifest.model.dtype, lineage=lineage)

    def rounds(self, directory: Path, data: DistillData, features: Features) -> list[Round]:
        return held_out_rounds(directory, load_model(self._target.directory, device=self._target.device), data, features)


class ModelKind:
    """A decoder of the target's family that starts from its layers `kept`: an engine of its own."""

    taps: tuple[int, ...] = ()
    has_confidence = False

    def __init__(self, target: Target, options: DistillOptions, config: ModelConfig, kept: tuple[int, ...]) -> None:
        self._target, self._options, self._config, self._kept = target, options, config, kept
        self.num_positions = options.block_size
        self._vocabulary: TargetVocabulary | None = None

    def learner(self, data: DistillData, features: Features, vocabulary: TargetVocabulary) -> Learner:
        self._vocabulary = vocabulary
        target = self._target
        parameters = first_parameters(target.directory, target.manifest, self._config, self._kept, target.device)
        return ModelLearner(self._config, parameters, data, features, vocabulary, self._options)

    def store(self, directory: Path, parameters: Parameters, lineage: dict[str, Any], temperatures: tuple[float, ...] = ()) -> None:
        assert self._vocabulary is not None and not temperatures
        shared = dict(zip(VOCABULARY_TENSORS, (self._vocabulary.embedding, self._vocabulary.head), strict=True))
        dtype, manifest = getattr(torch, self._config.dtype), self._target.manifest
        names = list(FAMILIES[self._config.family].tensors(self._config))
        record = {"source": "the target's own layers", "format": PACKAGING, "layers": list(self._kept), **lineage}
        with EngineWriter(directory, names) as writer:
            for name in manifest.files:
                shutil.copy(self._target.directory / name, writer.directory / name)
                writer.files[name] = hash_file(writer.directory / name)
            for name in names:
                writer.add(name, shared.get(name, parameters.get(name)).detach().to(dtype))  # type: ignore[union-attr]
            writer.finish(self._config, None, record, audit={"summary": "not audited: a draft model"})
            writer.publish()

    def rounds(self, directory: Path, data: DistillData, features: Features) -> list[Round]:
        target = load_model(self._target.directory, device=self._target.device)
        return draft_model_rounds(directory, target, self._target.codec, data, self._options.block_size)
