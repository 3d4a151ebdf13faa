"""A published draft checkpoint, read and held against its target.

draft = read_draft("Qwen3-4B-DSpark", load_manifest("engine").model)
draft.config, draft.read("fc.weight")
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dspark.converters.detect import open_checkpoint
from dspark.converters.drafts.fields import Faults
from dspark.converters.drafts.packagings import SUPPORTED, DraftFacts, Packaging, canonical_names, packaging_of
from dspark.converters.readers.base import CheckpointReader, TensorInfo, summarize
from dspark.runtime.spec.errors import InputError, UnsupportedError
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.speculation.heads.config import DraftConfig
from dspark.runtime.speculation.heads.tensors import TARGET_OFFSETS, draft_tensors

if TYPE_CHECKING:
    import torch

_READERS = ("safetensors", "pytorch")
_FLOATS = ("float32", "bfloat16", "float16")
_INTEGERS = ("int64", "int32", "I64", "I32")


class DraftCheckpoint:
    """A draft that fits its target. packaging: name of the row of the table that it was read by. names: canonical name -> the file's."""

    def __init__(self, reader: CheckpointReader, packaging: str, config: DraftConfig, names: dict[str, str]) -> None:
        self.path, self.packaging, self.config, self.names = reader.path, packaging, config, names
        self._reader = reader

    def read(self, name: str) -> torch.Tensor:
        """A tensor by its canonical name (see `draft_tensors`), in the checkpoint's dtype."""
        return self._reader.read(self.names[name])

    def files(self) -> list[Path]:
        """What it was read from, for the lineage."""
        return self._reader.files()


def read_draft(source: str | Path, target: ModelConfig) -> DraftCheckpoint:
    """Read a draft checkpoint's config and tensor headers, and hold them against the target.

    Raises UnsupportedError for what is no draft, or one of a kind that is not supported (naming it and what is), InputError with every
    fault of the config, of the tensors and of the fit to the target in one message.
    """
    reader = open_checkpoint(source)
    if reader.format not in _READERS:
        raise UnsupportedError(f"'{source}' is a checkpoint of format {reader.format}, no draft", f"supported: {SUPPORTED}")
    names, infos = canonical_names(reader.tensors()), reader.tensors()
    facts = DraftFacts(reader.config(), frozenset(names))
    packaging = packaging_of(facts)
    if packaging is None or packaging.read is None:
        what = "holds no drafting head that dspark knows" if packaging is None else f"is {packaging.name}, which is not supported"
        raise UnsupportedError(f"'{source}' {what}", f"supported: {SUPPORTED}")
    tensors = {name: infos[theirs] for name, theirs in names.items()}
    config = _checked(packaging, facts, tensors, target, reader, names, str(source))
    if not config.has_own_vocabulary:
        names.pop(TARGET_OFFSETS, None)
    return DraftCheckpoint(reader, packaging.name, config, names)


def _checked(
    packaging: Packaging,
    facts: DraftFacts,
    tensors: dict[str, TensorInfo],
    target: ModelConfig,
    reader: CheckpointReader,
    names: dict[str, str],
    source: str,
) -> DraftConfig:
    assert packaging.read is not None
    faults = Faults()
    config = packaging.read(facts.config, facts.tensors, target, faults)
    if config is not None:
        faults.found += fit_faults(config, target)
        faults.found += tensor_faults(config, tensors, faults.unknown)
        if not faults.found and TARGET_OFFSETS in names:
            faults.found += vocabulary_faults(config, reader.read(names[TARGET_OFFSETS]))
    if config is None or faults.found:
        raise InputError(f"the draft '{source}' ({packaging.name}) cannot serve: {'; '.join(faults.found)}", "take a draft of this target")
    return config


def fit_faults(config: DraftConfig, target: ModelConfig) -> list[str]:
    """Why a draft does not fit a target."""
    faults = []
    last, taps = target.num_layers - 1, config.taps
    if config.target_num_layers != target.num_layers:
        faults.append(f"it was made for a target of {config.target_num_layers} layers, this one has {target.num_layers}")
    if list(taps) != sorted(set(taps)):
        faults.append(f"target layers {list(taps)} are not in ascending order")
    outside = [tap for tap in taps if not -1 <= tap < last]
    if outside:
        shown = ", ".join(map(str, outside))
        faults.append(f"target layers {shown} are not among -1 to {last - 1}: the output of the last layer, {last}, is never a feature")
    if config.target_hidden_size != target.hidden_size:
        faults.append(f"it reads features {config.target_hidden_size} wide, the target's are {target.hidden_size}")
    model = config.model
    if model.vocab_size != target.vocab_size:
        faults.append(f"its vocabulary has {model.vocab_size} tokens, the target's {target.vocab_size}")
    if config.draft_vocab_size > model.vocab_size:
        faults.append(f"draft_vocab_size {config.draft_vocab_size} is more than the vocabulary's {model.vocab_size}")
    shared = [name for name, own in (("embedding", config.own_embedding), ("output head", config.own_head)) if not own]
    if shared and model.hidden_size != target.hidden_size:
        what = " and ".join(shared)
        faults.append(f"it has no {what} of its own and is {model.hidden_size} wide, the target {target.hidden_size}")
    if config.mask_token_id is not None and config.mask_token_id >= model.vocab_size:
        faults.append(f"mask_token_id {config.mask_token_id} is not below the vocabulary's {model.vocab_size}")
    return faults


def tensor_faults(config: DraftConfig, tensors: dict[str, TensorInfo], unknown: set[str]) -> list[str]:
    """Tensors that are missing, of another shape or type, or not the draft's; those whose names begin with an `unknown` are passed over."""
    wanted = draft_tensors(config)

    def judged(name: str) -> bool:
        return not name.startswith(tuple(unknown)) if unknown else True

    missing = [name for name in wanted if name not in tensors and judged(name)]
    others = [name for name in sorted(tensors) if name not in wanted and judged(name) and name != TARGET_OFFSETS]
    shapes = [
        f"{name} is {list(tensors[name].shape)}, wanted {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and judged(name) and tensors[name].shape != shape
    ]
    kinds = [
        f"{name} is of type {tensors[name].dtype}"
        for name in wanted
        if name in tensors and tensors[name].dtype not in (_INTEGERS if name == TARGET_OFFSETS else _FLOATS)
    ]
    faults = [f"tensors missing: {summarize(missing)}"] if missing else []
    faults += [f"tensors that no part of it reads: {summarize(others)}"] if others else []
    return faults + shapes + kinds


def vocabulary_faults(config: DraftConfig, offsets: torch.Tensor) -> list[str]:
    """What is wrong with the table from the draft's tokens to the target's."""
    if not config.has_own_vocabulary:
        return ["d2t renames tokens of a vocabulary that is the target's whole one"] if bool((offsets != 0).any()) else []
    import torch

    ids = offsets.long() + torch.arange(offsets.numel())
    if int(ids.min()) < 0 or int(ids.max()) >= config.model.vocab_size:
        return [f"d2t names target tokens {int(ids.min())} to {int(ids.max())}, the vocabulary has {config.model.vocab_size}"]
    return ["d2t names a target token twice"] if ids.unique().numel() != ids.numel() else []
