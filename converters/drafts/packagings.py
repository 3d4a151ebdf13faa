"""Which packaging a draft checkpoint has: a table, and the content decides.

Architecture names do not: `Qwen3DSparkModel` is a DFlash draft when its Markov rank is 0, `DFlashDraftModel` may be a DSpark one, and
`DSparkDraftModel` stands for layers of two families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dspark.converters.drafts import block, eagle3
from dspark.converters.drafts.fields import Faults
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.speculation.heads.config import DraftConfig

Read = Callable[[dict[str, Any], frozenset[str], ModelConfig, Faults], DraftConfig | None]
SUPPORTED = (
    "DSpark and DFlash drafts of DeepSpec, z-lab, SpecForge and vLLM speculators, EAGLE-3 drafts of DeepSpec, the original layout "
    "(SpecForge, AngelSlim) and vLLM speculators"
)
_UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight", "target_lm_head.weight")
"""Tensors of training that a checkpoint may hold. `t2d` says of each target token whether `d2t` names it, which `d2t` does alone."""


@dataclass(frozen=True)
class DraftFacts:
    """What detection may look at. tensors: canonical names."""

    config: dict[str, Any]
    tensors: frozenset[str]

    def nested(self, key: str) -> dict[str, Any]:
        value = self.config.get(key)
        return value if isinstance(value, dict) else {}

    def has(self, *beginnings: str) -> bool:
        return any(name.startswith(beginnings) for name in self.tensors)


@dataclass(frozen=True)
class Packaging:
    """read: None for one that is recognised and refused."""

    name: str
    matches: Callable[[DraftFacts], bool]
    read: Read | None = None


def _speculators(*methods: str) -> Callable[[DraftFacts], bool]:
    return lambda facts: facts.config.get("speculators_model_type") in methods


def _is_dflash2(facts: DraftFacts) -> bool:
    kinds = {table.get("projector_type") for table in (facts.config, facts.nested("dflash_config"))}
    return bool(kinds - {None, "dflash", "dspark"}) or facts.has("prefix_gru.")


def _is_gemma(facts: DraftFacts) -> bool:
    kinds = [table.get("model_type") for table in (facts.config, facts.nested("transformer_layer_config"))]
    return any("gemma" in str(kind) for kind in kinds) or facts.has("layers.0.layer_scalar")


def _is_block(facts: DraftFacts) -> bool:
    return "hidden_norm.weight" in facts.tensors


def _is_eagle(facts: DraftFacts) -> bool:
    return "layers.0.hidden_norm.weight" in facts.tensors


def _is_flat(facts: DraftFacts) -> bool:
    return "dflash_config" not in facts.config and "target_layer_ids" in facts.config


PACKAGINGS: tuple[Packaging, ...] = (
    Packaging("a draft inside its target's checkpoint (DeepSeek-V4)", lambda f: "dspark_block_size" in f.config or f.has("mtp.")),
    Packaging("a quantized draft", lambda f: bool(f.config.get("quantization_config"))),
    Packaging("a Domino or DFlash2 draft", _is_dflash2),
    Packaging("a draft with Gemma layers", _is_gemma),
    Packaging("vLLM speculators", _speculators("dspark", "dflash"), block.read_speculators),
    Packaging("vLLM speculators EAGLE-3", _speculators("eagle3"), eagle3.read_speculators),
    Packaging("a draft of vLLM speculators of another kind", lambda f: "speculators_model_type" in f.config),
    Packaging("DeepSpec", lambda f: _is_block(f) and _is_flat(f), block.read_flat),
    Packaging("z-lab or SpecForge", _is_block, block.read_nested),
    Packaging("DeepSpec EAGLE-3", lambda f: _is_eagle(f) and "target_layer_ids" in f.config, eagle3.read_deepspec),
    Packaging("original EAGLE-3", _is_eagle, eagle3.read_original),
)


def packaging_of(facts: DraftFacts) -> Packaging | None:
    """The first that fits, None for what is no draft."""
    return next((packaging for packaging in PACKAGINGS if packaging.matches(facts)), None)


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Canonical name -> the checkpoint's. EAGLE-3's layer is `midlayer` in some, the whole draft lies below `model.` in others; tensors
    that only training reads are left out. Raises InputError when two of them would have one name."""
    found: dict[str, str] = {}
    for name in sorted(names):
        plain = name.removeprefix("model.")
        if plain.startswith("midlayer."):
            plain = "layers.0." + plain.removeprefix("midlayer.")
        if plain in _UNUSED or plain.endswith(".rotary_emb.inv_freq"):
            continue
        if plain in found:
            raise InputError(f"the draft has tensor '{plain}' twice: as {found[plain]} and as {name}", "download the draft again")
        found[plain] = name
    return found
