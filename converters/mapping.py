"""From a checkpoint's tensors to the engine's: every name and shape checked before the first one is written.

The engine's names are Hugging Face's of the Llama family, the same for every family; what differs is which of them exist. Modules that a
family's checkpoints hold as one (Family.fused) are split, so that each part is quantized, adapted and exported on its own; so are the
experts of a layer, which transformers 5 stacks in two tensors.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dspark.converters.readers.base import CheckpointReader, TensorInfo, summarize
from dspark.runtime.models import FAMILIES
from dspark.runtime.models.hf_config import declared_dtype, eos_token_ids, model_config_from_hf
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.model_config import DTYPES, ModelConfig

if TYPE_CHECKING:
    import torch

DTYPE_CHOICES = ("auto", "bfloat16", "float16", "float32")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# buffers that old savers wrote: transformers computes them
_LEFTOVER = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.\w+|(model\.)?layers\.\d+\.self_attn\.(masked_bias|bias)")
_EXPERT_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
_COMPARE_ROWS = 4096


@dataclass(frozen=True)
class FusedPart:
    """Where a tensor stands in a checkpoint that holds it together with others or under another name.

    Rows first_row .. first_row + num_rows - 1 of `source`, or with expert of source[expert], where source has three dimensions.
    """

    source: str
    first_row: int
    num_rows: int
    expert: int | None = None


@dataclass(frozen=True)
class MappedModel:
    """What will be written: the config, each tensor's name and shape in order of use, and what the user should know.

    parts: the tensors that the checkpoint holds inside others or calls otherwise.
    """

    reader: CheckpointReader
    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    notes: tuple[str, ...]
    parts: dict[str, FusedPart] = field(default_factory=dict)

    def read(self, name: str) -> torch.Tensor:
        """One tensor as the checkpoint has it, checked for the engine's dtype but not cast."""
        part = self.parts.get(name)
        if part is None:
            return self.reader.read(name)
        source = self.reader.read(part.source)
        return (source if part.expert is None else source[part.expert])[part.first_row : part.first_row + part.num_rows]

    def read_cast(self, name: str) -> torch.Tensor:
        """One tensor in the engine's dtype. Raises InputError when a finite value would become infinite (float16 holds up to 65504)."""
        import torch

        weight = self.read(name)
        cast = weight.to(getattr(torch, self.config.dtype))
        if self.config.dtype == "float16" and weight.dtype != torch.float16 and bool((cast.isinf() & weight.isfinite()).any()):
            raise InputError(f"{name} has values beyond what float16 holds ({float(weight.abs().max()):g})", "type --dtype bfloat16")
        return cast


def map_checkpoint(reader: CheckpointReader, dtype: str = "auto") -> MappedModel:
    """Check a checkpoint against its own config and choose the dtype.

    Raises InputError naming all missing, unexpected and wrongly shaped tensors at once; UnsupportedError as `model_config_from_hf`.
    """
    config = model_config_from_hf(reader.config())
    generation = reader.generation_config() or {}
    if generation.get("eos_token_id") is not None:  # transformers generates by this one, where there is one
        config = replace(config, eos_token_ids=eos_token_ids(generation["eos_token_id"]))
    found = {name: info for name, info in reader.tensors().items() if not _LEFTOVER.fullmatch(name)}
    notes: list[str] = []
    config = _settle_head(config, found, reader, notes)
    shapes = expected_tensors(config)
    parts = _rename(config, found, shapes) | _split_fused(config, found, shapes) | _split_experts(config, found, shapes)
    _check(found, shapes, reader)
    config = replace(config, dtype=_choose_dtype(dtype, reader, notes))
    return MappedModel(reader, config, shapes, tuple(notes), parts)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model, in order of use."""
    return FAMILIES[config.family].tensors(config)


def parameter_count(config: ModelConfig) -> int:
    """Parameters of a model as if none were quantized."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def with_own_head(model: MappedModel) -> MappedModel:
    """The model with a head of its own, equal to the embedding that it shared; a model whose head is its own comes back as it is."""
    if not model.config.tie_word_embeddings:
        return model
    config = replace(model.config, tie_word_embeddings=False)
    shapes = expected_tensors(config)
    part = model.parts.get(EMBEDDING, FusedPart(EMBEDDING, 0, shapes[EMBEDDING][0]))
    return replace(model, config=config, shapes=shapes, parts={**model.parts, HEAD: part})


def linear_modules(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Module name -> (outputs, inputs) of every linear layer, the head included where it has its own weight."""
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in expected_tensors(config).items()
        if len(shape) == 2 and name != EMBEDDING
    }


def router_patterns(config: ModelConfig) -> tuple[str, ...]:
    """Patterns of the modules that choose between experts: one wrong choice changes a token's whole layer, and they are small."""
    shared = ("*.mlp.shared_expert_gate",) if config.shared_expert_intermediate_size else ()
    return ("*.mlp.gate", *shared) if config.num_experts else ()


def fused_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Module that the family's checkpoints hold -> the modules of ours that it stacks along its outputs, in that order."""
    return {
        f"model.layers.{layer}.{fused}": tuple(f"model.layers.{layer}.{part}" for part in parts)
        for layer in range(config.num_layers)
        for fused, parts in FAMILIES[config.family].fused.items()
    }


def expert_stacks(config: ModelConfig) -> dict[str, list[list[str]]]:
    """Tensor in which transformers 5 stacks a layer's experts [E, rows, K] -> for each expert its tensors of ours, along the rows."""
    stacks = {}
    for layer in range(config.num_layers):
        if config.has_experts(layer):
            experts = f"model.layers.{layer}.mlp.experts"
            for stack, parts in _EXPERT_STACKS.items():
                stacks[f"{experts}.{stack}"] = [[f"{experts}.{e}.{part}.weight" for part in parts] for e in range(config.num_experts)]
    return stacks


def fuse_state(config: ModelConfig, state: dict[str, torch.Tensor], layer: int | None = None) -> dict[str, torch.Tensor]:
    """Dense tensors by our names -> by those of the family's class in transformers 5. `state` is emptied of what is put together.

    layer: the one that `state` holds, None for a whole model.
    """
    import torch

    only = "" if layer is None else f"model.layers.{layer}."
    for fused, parts in fused_names(config).items():
        if fused.startswith(only):
            state[f"{fused}.weight"] = torch.cat([state.pop(f"{part}.weight") for part in parts])
    for stack, experts in expert_stacks(config).items():
        if stack.startswith(only):
            state[stack] = torch.stack([torch.cat([state.pop(name) for name in names]) for names in experts])
    return state


def _rename(config: ModelConfig, found: dict[str, TensorInfo], shapes: dict[str, tuple[int, ...]]) -> dict[str, FusedPart]:
    """Give the tensors in `found` that this family's checkpoints call otherwise their names of ours."""
    located: dict[str, FusedPart] = {}
    for name, shape in shapes.items():
        saved = FAMILIES[config.family].saved_as(name)
        if saved != name and saved in found and name not in found:
            found[name] = found.pop(saved)
            located[name] = FusedPart(saved, 0, shape[0])
    return located


def _split_experts(config: ModelConfig, found: dict[str, TensorInfo], shapes: dict[str, tuple[int, ...]]) -> dict[str, FusedPart]:
    """Replace the stacks of experts in `found` by their parts; one of another shape stays and is reported as unexpected."""
    located: dict[str, FusedPart] = {}
    for source, experts in expert_stacks(config).items():
        rows, width = sum(shapes[name][0] for name in experts[0]), shapes[experts[0][0]][1]
        if source not in found or found[source].shape != (len(experts), rows, width) or any(name in found for name in experts[0]):
            continue
        info = found.pop(source)
        for expert, names in enumerate(experts):
            first_row = 0
            for name in names:
                located[name] = FusedPart(source, first_row, shapes[name][0], expert)
                found[name] = replace(info, shape=shapes[name])
                first_row += shapes[name][0]
    return located


def _split_fused(config: ModelConfig, found: dict[str, TensorInfo], shapes: dict[str, tuple[int, ...]]) -> dict[str, FusedPart]:
    """Replace the fused tensors in `found` by their parts, where the widths agree; any other stays and is reported as unexpected."""
    located: dict[str, FusedPart] = {}
    for fused, modules in fused_names(config).items():
        names, source = [f"{module}.weight" for module in modules], f"{fused}.weight"
        rows, width = sum(shapes[name][0] for name in names), shapes[names[0]][1:]
        if source not in found or found[source].shape != (rows, *width) or any(name in found for name in names):
            continue
        info, first_row = found.pop(source), 0
        for name in names:
            located[name] = FusedPart(source, first_row, shapes[name][0])
            found[name] = replace(info, shape=shapes[name])
            first_row += shapes[name][0]
    return located


def _settle_head(config: ModelConfig, found: dict[str, TensorInfo], reader: CheckpointReader, notes: list[str]) -> ModelConfig:
    """A tied model that was saved with a head: drop an identical copy, use a different one (a merged adapter leaves such files)."""
    if not config.tie_word_embeddings or HEAD not in found or EMBEDDING not in found:
        return config
    if found[HEAD].shape == found[EMBEDDING].shape and _same_values(reader):
        del found[HEAD]
        notes.append("the head is the embedding (tie_word_embeddings): the copy in lm_head.weight is not stored again")
        return config
    notes.append("config.json says tie_word_embeddings, but the saved lm_head.weight differs from the embedding: the saved head is used")
    return replace(config, tie_word_embeddings=False)


def _same_values(reader: CheckpointReader) -> bool:
    import torch

    head, embedding = reader.read(HEAD), reader.read(EMBEDDING)
    rows = range(0, head.shape[0], _COMPARE_ROWS)
    return all(torch.equal(head[row : row + _COMPARE_ROWS].float(), embedding[row : row + _COMPARE_ROWS].float()) for row in rows)


def _check(found: dict[str, TensorInfo], expected: dict[str, tuple[int, ...]], reader: CheckpointReader) -> None:
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    wrong = [
        f"{name} has {list(found[name].shape)}, the config says {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    bad_types = [f"{name} ({found[name].dtype})" for name in expected if name in found and not _is_readable(found[name], reader)]
    faults = [
        f"{what}: {summarize(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong), ("no float type", bad_types))
        if names
    ]
    if faults:
        hint = "check that config.json and the weights belong together"
        raise InputError(f"'{reader.path}' does not hold the tensors of its config: {'; '.join(faults)}", hint)


def _is_readable(info: TensorInfo, reader: CheckpointReader) -> bool:
    return info.packed or info.dtype in DTYPES or reader.format == "gguf"  # those readers have refused what they cannot decode


def _choose_dtype(wanted: str, reader: CheckpointReader, notes: list[str]) -> str:
    """--dtype, else what the config declares, else what the tensors are; never wider than the tensors on a config's word alone.

    A declared dtype as wide as the tensors' own but different (float16 said, bfloat16 stored) is a label that lies: the tensors win, since
    a cast between the two loses range or digits for nothing.
    """
    if wanted not in DTYPE_CHOICES:
        raise UsageError(f"--dtype is {wanted}, allowed: {', '.join(DTYPE_CHOICES)}")
    if wanted != "auto":
        return wanted
    own = reader.storage_dtype()
    declared = declared_dtype(reader.config())
    if declared is None or declared == own:
        return own
    if _WIDTH[declared] >= _WIDTH[own]:
        notes.append(f"config.json declares {declared}, but the tensors are {own}: {own} is kept")
        return own
    return declared
