"""One adapter directory: its configuration, checked and with everything that cannot be merged refused by name, and its tensors.

`adapter_config.json` and `adapter_model.safetensors` (or `.bin`) as PEFT writes them; the tensors stay on disk until they are merged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.converters.readers.safetensors import open_safetensors, read_json_object
from dspark.runtime.spec.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    import torch

CONFIG_NAME = "adapter_config.json"
SAFETENSORS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"
PEFT_TYPES = ("LORA",)
# keys of a LoRA configuration that change what the adapter computes in a way that a merge into weights cannot express, or that is not built
_UNMERGEABLE: dict[str, str] = {
    "alora_invocation_tokens": "an activated LoRA works only after its invocation tokens, which no merged weight does",
    "arrow_config": "Arrow routes each token between several adapters, which no merged weight does",
    "layer_replication": "layer_replication builds a deeper model",
    "target_parameters": "target_parameters adapts bare parameters, not layers",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "use_qalora": "QA-LoRA is not supported",
    "kasa_config": "KaSA is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
}
# ways to start that also rewrite the base: such an adapter belongs to a base that is in nobody's directory
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says. trained_tokens: module -> token ids; the key "" means the input embedding."""

    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    bias: str = "none"
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    trained_tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    base_model: str | None = None

    def rank_of(self, module: str) -> int:
        """Rank of a layer."""
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scaling(self, module: str) -> float:
        """Factor of B @ A for a layer: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA."""
        rank = self.rank_of(module)
        alpha = float(_by_pattern(self.alpha_pattern, module, self.alpha))
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def saves(self, module: str) -> bool:
        """Whether modules_to_save names a layer."""
        return any(module == name or module.endswith("." + name) for name in self.modules_to_save)

    def tokens_of(self, module: str) -> tuple[int, ...] | None:
        """Ids of the trained tokens of an embedding or head; a head without an entry of its own follows the embedding. None: no tokens."""
        named = next((ids for name, ids in self.trained_tokens.items() if name and (module == name or module.endswith("." + name))), None)
        if named is not None:
            return named
        fallback = self.trained_tokens.get("")
        return fallback if fallback is not None else next(iter(self.trained_tokens.values()), None)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """PEFT's rule: the first key that, as a regular expression, matches the end of the layer's name from a dot on."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


class Adapter:
    """One adapter and its weight in the sum. Raises InputError for a damaged one, UnsupportedError for a kind that cannot be merged."""

    def __init__(self, path: Path, weight: float = 1.0) -> None:
        self.path = path
        self.weight = weight
        self.raw = read_adapter_config(path)
        self.config = parse_config(self.raw, path)
        self._weights = _open_weights(path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Key -> shape of every tensor."""
        return {key: self._weights.shape(key) for key in self._weights.keys()}  # noqa: SIM118 - no mapping

    def read(self, key: str) -> torch.Tensor:
        """One tensor in float32. Raises InputError when it has values that are not finite."""
        import torch

        tensor = self._weights.read(key).to(torch.float32)
        if not bool(tensor.isfinite().all()):
            raise InputError(f"adapter '{self.path}': {key} has values that are not finite", "the adapter is damaged: use another copy")
        return tensor

    def files(self) -> list[Path]:
        """Configuration and weights, for the lineage."""
        return [self.path / CONFIG_NAME, self._weights.path]

    def trained_on(self, source: str) -> bool:
        """Whether the base that the adapter names can be `source`; only the last part of a path or hub name counts."""
        named = self.config.base_model
        return named is None or Path(named.rstrip("/")).name.lower() == Path(source.rstrip("/")).name.lower()


def read_adapter_config(path: Path) -> dict[str, Any]:
    """adapter_config.json of a directory. Raises InputError saying what is missing."""
    if not path.is_dir():
        what = "is no directory" if path.exists() else "does not exist"
        raise InputError(f"adapter '{path}' {what}", f"name a directory with {CONFIG_NAME} and {SAFETENSORS_NAME}")
    if not (path / CONFIG_NAME).is_file():
        raise InputError(f"'{path}' is no adapter: it has no {CONFIG_NAME}", "name the directory that PEFT's save_pretrained wrote")
    return read_json_object(path / CONFIG_NAME)


def unsupported_reason(raw: dict[str, Any]) -> str | None:
    """Why an adapter cannot be merged, or None."""
    kind = raw.get("peft_type")
    if kind not in PEFT_TYPES:
        return f"is of PEFT type {kind!r}, which is not supported, supported: {', '.join(PEFT_TYPES)} (plain, rslora, DoRA)"
    reason = next((text for key, text in _UNMERGEABLE.items() if raw.get(key)), None)
    if reason is not None:
        return f"cannot be merged: {reason}"
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_BASE_CHANGING):
        return f"starts with init_lora_weights '{start}', which changes the base model too"
    return None


def parse_config(raw: dict[str, Any], path: Path) -> AdapterConfig:
    """Check adapter_config.json. Raises UnsupportedError or InputError naming the key and its value."""
    reason = unsupported_reason(raw)
    if reason is not None:
        converted = "save it with path_initial_model_for_weight_conversion in PEFT" if "init_lora_weights" in reason else ""
        raise UnsupportedError(f"adapter '{path}' {reason}", converted or "merge it with PEFT and convert the result")

    def wrong(key: str, allowed: str) -> InputError:
        return InputError(f"adapter '{path}': {CONFIG_NAME} has {key} {raw.get(key)!r:.60}, allowed: {allowed}", "save the adapter again")

    if not _is_number(raw.get("r"), whole=True):
        raise wrong("r", "a positive integer")
    if not _is_number(raw.get("lora_alpha"), low=None):
        raise wrong("lora_alpha", "a number")
    for key, whole in (("rank_pattern", True), ("alpha_pattern", False)):
        table = raw.get(key) or {}
        if not isinstance(table, dict) or not all(_is_pattern(k) and _is_number(v, whole, 0 if whole else None) for k, v in table.items()):
            raise wrong(key, "an object of layer patterns and numbers")
    bias = raw.get("bias") or "none"
    if bias not in ("none", "all", "lora_only"):
        raise wrong("bias", "none, all, lora_only")
    saved = raw.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise wrong("modules_to_save", "a list of layer names")
    tokens = _token_table(raw.get("trainable_token_indices"))
    if tokens is None:
        raise wrong("trainable_token_indices", "a list of token ids, or an object of layer names and such lists")
    base = raw.get("base_model_name_or_path")
    return AdapterConfig(
        rank=int(raw["r"]),
        alpha=float(raw["lora_alpha"]),
        rslora=bool(raw.get("use_rslora")),
        dora=bool(raw.get("use_dora")),
        bias=bias,
        rank_pattern=raw.get("rank_pattern") or {},
        alpha_pattern=raw.get("alpha_pattern") or {},
        modules_to_save=tuple(saved),
        trained_tokens=tokens,
        base_model=base if isinstance(base, str) and base else None,
    )


def _is_number(value: Any, whole: bool = False, low: float | None = 0) -> bool:
    kinds = (int,) if whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value) and (low is None or value > low)


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _token_table(value: Any) -> dict[str, tuple[int, ...]] | None:
    """Layer name ("" for a bare list) -> token ids; None when the value is neither."""
    if value is None:
        return {}
    table = value if isinstance(value, dict) else {"": value}
    for ids in table.values():
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            return None
    return {str(name): tuple(ids) for name, ids in table.items()}


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = open_safetensors(path)

    def keys(self) -> list[str]:
        return list(self._handle.keys())

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._handle.get_slice(key).get_shape())

    def read(self, key: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handle.get_tensor(key)
        return tensor


class _Pickle:
    """A pickled state dict, loaded with torch's weights-only reader: nothing in the file is run."""

    def __init__(self, path: Path) -> None:
        from dspark.converters.readers.torch_bin import load_state

        self.path = path
        self._state = load_state(path)

    def keys(self) -> list[str]:
        return list(self._state)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._state[key].shape)

    def read(self, key: str) -> torch.Tensor:
        return self._state[key]


def _open_weights(path: Path) -> _Safetensors | _Pickle:
    if (path / SAFETENSORS_NAME).is_file():
        return _Safetensors(path / SAFETENSORS_NAME)
    if (path / PICKLE_NAME).is_file():
        return _Pickle(path / PICKLE_NAME)
    raise InputError(f"adapter '{path}' has no {SAFETENSORS_NAME} or {PICKLE_NAME}", "copy the whole adapter directory")
