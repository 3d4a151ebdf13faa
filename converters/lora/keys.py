"""Which tensor of an adapter is meant for which layer: PEFT's key names, sorted by layer, and every one accounted for.

base_model.model.MODULE.lora_A.weight                 [r, inputs]        lora_B.weight  [outputs, r]      lora_B.bias  [outputs]
base_model.model.MODULE.lora_magnitude_vector         [outputs]          of an embedding: [width]
base_model.model.MODULE.lora_embedding_A              [r, tokens]        lora_embedding_B  [width, r]
base_model.model.MODULE.token_adapter.trainable_tokens_delta  [n, width] rows that take the place of the base's
base_model.model.MODULE[.token_adapter].base_layer.weight|bias           the adapted layer's own base, where training changed it
base_model.model.MODULE[.modules_to_save].weight|bias                    a layer trained whole (modules_to_save, bias, new tokens)
base_model.model.MODULE.original_module.*                                what the layer was before: not used
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from dspark.converters.lora.adapter import Adapter, AdapterConfig
from dspark.converters.readers.base import summarize

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
VOCABULARY_LAYERS = (EMBEDDING, HEAD)
_PREFIX = "base_model.model."
_NAME = r"(?:\.default)?"  # the adapter's name, which some trainers leave in
_ROLES: tuple[tuple[str, str], ...] = (
    (rf"lora_A{_NAME}\.weight", "A"),
    (rf"lora_B{_NAME}\.weight", "B"),
    (rf"lora_B{_NAME}\.bias", "B.bias"),
    (rf"lora_embedding_A{_NAME}", "embedding_A"),
    (rf"lora_embedding_B{_NAME}", "embedding_B"),
    (rf"lora_magnitude_vector{_NAME}(?:\.weight)?", "magnitude"),
    (rf"token_adapter\.trainable_tokens_delta{_NAME}", "tokens"),
    (r"(?:token_adapter\.)?base_layer\.weight", "base.weight"),
    (r"(?:token_adapter\.)?base_layer\.bias", "base.bias"),
    (r"weight", "saved.weight"),
    (r"bias", "saved.bias"),
)
_KEY = re.compile(r"(?P<module>.+?)\.(?:" + "|".join(f"(?P<role{i}>{pattern})" for i, (pattern, _) in enumerate(_ROLES)) + ")")
_SAVED = re.compile(rf"\.modules_to_save{_NAME}(?=\.)")
_ORIGINAL = re.compile(r"\.original_module(?=\.)")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Patch:
    """What one adapter does to one layer. keys: role -> key in the adapter's file, roles as in the table above."""

    adapter: Adapter
    module: str
    keys: dict[str, str] = field(default_factory=dict)

    def has(self, *roles: str) -> bool:
        return any(role in self.keys for role in roles)

    def only(self, *roles: str) -> Patch:
        """This patch with some of its roles."""
        return replace(self, keys={role: key for role, key in self.keys.items() if role in roles})

    def replacement(self, leaf: str) -> str | None:
        """Key of the tensor that takes the place of the base's `leaf` ("weight", "bias"), or None."""
        return self.keys.get(f"saved.{leaf}") or self.keys.get(f"base.{leaf}")

    def changes(self, leaf: str) -> bool:
        """Whether the layer's `leaf` becomes another."""
        roles = ("B.bias",) if leaf == "bias" else ("A", "embedding_A", "tokens")
        return self.has(*roles) or self.replacement(leaf) is not None


def sort_roles(adapter: Adapter) -> tuple[dict[str, Patch], list[str]]:
    """Layer -> patch, and the keys that are no part of an adapter, or that give a part twice."""
    patches: dict[str, Patch] = {}
    unknown = []
    # PEFT saves a resized layer that was also trained whole under both names: the plain one, sorted first, is the trained one
    for key in sorted(adapter.shapes(), key=lambda key: _SAVED.search(key) is not None):
        name, untouched = _ORIGINAL.subn("", key.removeprefix(_PREFIX))
        name, marked = _SAVED.subn("", name)
        match = _KEY.fullmatch(name)
        if match is None:
            unknown.append(key)
        elif not untouched:
            role = next(_ROLES[i][1] for i in range(len(_ROLES)) if match[f"role{i}"] is not None)
            keys = patches.setdefault(match["module"], Patch(adapter, match["module"])).keys
            if role in keys and not marked:
                unknown.append(f"{key} (given twice)")
            keys.setdefault(role, key)
    return patches, unknown


def sort_keys(adapter: Adapter, shapes: dict[str, Shape], faults: list[str]) -> dict[str, Patch]:
    """Layer -> patch. shapes: of the base model's tensors, a tied head among them. Keys that fit nowhere are added to `faults`."""
    patches, lost = sort_roles(adapter)
    for patch in patches.values():
        lost += [key for role, key in patch.keys.items() if f"{patch.module}.{_leaf(role)}" not in shapes]
    if lost:
        faults.append(f"no such layer in the base: {summarize(lost, 8)}")
    return {module: patch for module, patch in patches.items() if f"{module}.weight" in shapes}


def _leaf(role: str) -> str:
    return "bias" if role.endswith("bias") else "weight"


def check_patch(patch: Patch, base: Shape, bias: Shape | None) -> list[str]:
    """What is wrong with a patch for a layer whose weight has shape `base`: halves of pairs, shapes, ranks, token ids."""
    found = patch.adapter.shapes()
    config = patch.adapter.config
    weight = found.get(patch.replacement("weight") or "", base)
    faults = _check_pairs(patch, config)
    grows = patch.module in VOCABULARY_LAYERS and len(weight) == 2 and weight[1:] == base[1:]
    if weight != base and not grows:
        faults.append(f"{patch.replacement('weight')} has {list(weight)}, the base {list(base)}")
    wanted: dict[str, Shape] = {}
    rank = config.rank_of(patch.module)
    if patch.has("A", "B", "embedding_A", "embedding_B") and len(weight) != 2:
        return [*faults, f"{patch.module} is no matrix, so it takes no LoRA"]
    if patch.has("A", "B"):
        wanted |= {"A": (rank, weight[1]), "B": (weight[0], rank), "B.bias": (weight[0],), "magnitude": (weight[0],)}
    if patch.has("embedding_A", "embedding_B"):
        wanted |= {"embedding_A": (rank, weight[0]), "embedding_B": (weight[1], rank), "magnitude": (weight[1],)}
    if patch.has("tokens"):
        ids = config.tokens_of(patch.module) or ()
        wanted["tokens"] = (len(ids), *weight[1:])
        beyond = [token for token in ids if token >= weight[0]]
        if beyond:
            faults.append(f"{patch.keys['tokens']} trains token {beyond[0]}, the base has {weight[0]}")
    if bias is not None:
        wanted |= {"saved.bias": bias, "base.bias": bias}
    for role, key in patch.keys.items():
        if role in wanted and found[key] != wanted[role]:
            faults.append(f"{key} has {list(found[key])}, needed {list(wanted[role])}")
    return faults


def _check_pairs(patch: Patch, config: AdapterConfig) -> list[str]:
    faults = []
    for first, second in (("A", "B"), ("embedding_A", "embedding_B")):
        if patch.has(first) != patch.has(second):
            there, absent = (first, second) if patch.has(first) else (second, first)
            faults.append(f"{patch.keys[there]} has no lora_{absent} beside it")
    if patch.has("A") and patch.has("embedding_A"):
        faults.append(f"{patch.module} has both lora_A and lora_embedding_A")
    if patch.has("A", "embedding_A") and patch.has("tokens"):
        faults.append(f"{patch.module} has both LoRA matrices and trained tokens, which is not supported")
    if patch.has("A", "embedding_A") and config.dora != patch.has("magnitude"):
        what = "no lora_magnitude_vector, but use_dora is set" if config.dora else "a lora_magnitude_vector, but use_dora is not set"
        faults.append(f"{patch.module} has {what}")
    if patch.has("magnitude") and not patch.has("A", "embedding_A"):
        faults.append(f"{patch.keys['magnitude']} has no LoRA matrices beside it")
    return faults
