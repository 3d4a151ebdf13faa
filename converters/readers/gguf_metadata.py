"""The metadata of a GGUF model: values below the architecture's prefix, with the errors that name a key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.runtime.spec.errors import InputError, UnsupportedError


@dataclass(frozen=True)
class Metadata:
    """values: all keys of the file. architecture: the prefix of the model's own keys."""

    values: dict[str, Any]
    path: Path

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", "unknown"))

    def get(self, key: str, default: Any = None) -> Any:
        """A key of the model, such as "context_length"."""
        return self.values.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """As `get`. Raises InputError for an absent key."""
        value = self.get(key)
        if value is None:
            raise InputError(f"'{self.path}' lacks the metadata key {self.architecture}.{key}", "use a GGUF of a whole model")
        return value

    def positive(self, key: str) -> int:
        """A count. Raises InputError for an absent key or one that is no positive integer."""
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            what = f"'{self.path}' has {self.architecture}.{key} {value!r:.40}, allowed: a positive integer"
            raise InputError(what, "download it again")
        return value

    def uniform(self, key: str) -> int:
        """A size that may be given per layer. Raises UnsupportedError when the layers differ."""
        value = self.need(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedError(f"GGUF with a different {key} in each layer is not supported ({value[:4]}...)")
            value = value[0]
        return int(value)

    def token_id(self, name: str) -> int | None:
        """Such as "bos"."""
        return self.values.get(f"tokenizer.ggml.{name}_token_id")

    def end_ids(self) -> int | list[int] | None:
        """Ids that end a text: end of sequence, then end of turn and end of message where the model has them."""
        ids = list(dict.fromkeys(index for name in ("eos", "eot", "eom") if (index := self.token_id(name)) is not None))
        return ids[0] if len(ids) == 1 else ids or None

    def head_counts(self) -> tuple[int, int]:
        """Query heads, key/value heads."""
        heads = self.uniform("attention.head_count")
        return heads, self.uniform("attention.head_count_kv") if self.get("attention.head_count_kv") is not None else heads

    def head_dim(self) -> int:
        """Raises UnsupportedError where keys and values differ."""
        rotary = self.get("rope.dimension_count")
        size = int(self.get("attention.key_length") or 0)
        if not size:  # phi3 rotates a part of a head, so that the rotary size says nothing there
            own = self.need("embedding_length") // self.head_counts()[0]
            size = int(own if self.architecture == "phi3" or not rotary else rotary)
        if self.get("attention.value_length", size) != size:
            what = f"GGUF with head sizes key {size}, value {self.get('attention.value_length')} is not supported"
            raise UnsupportedError(what, "supported: one size for both")
        return size

    def short_float(self, key: str, default: float | None = None) -> float:
        """A float32 that was written from a short decimal, as that decimal: 9.999999747378752e-06 -> 1e-05."""
        value = self.need(key) if default is None else self.get(key, default)
        return float(f"{value:.7g}")
