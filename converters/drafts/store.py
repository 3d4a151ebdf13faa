"""Write a checked draft as an engine keeps it: `draft.json` and one safetensors file, whatever it was published as."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from dspark.converters.safetensors_stream import SafetensorsStream, tensor_bytes
from dspark.runtime.speculation.heads.config import DraftConfig
from dspark.runtime.speculation.heads.stored import DRAFT_NAME, WEIGHTS_NAME, StoredDraft, StoredTensor
from dspark.runtime.speculation.heads.tensors import draft_tensors

if TYPE_CHECKING:
    import torch


class DraftSource(Protocol):
    """A draft that fits its target: a checkpoint that was read, or one that was trained here. packaging: see StoredDraft."""

    @property
    def packaging(self) -> str: ...

    @property
    def config(self) -> DraftConfig: ...

    def read(self, name: str) -> torch.Tensor:
        """A tensor by its canonical name (see `draft_tensors`)."""


def store_draft(
    draft: DraftSource,
    directory: Path,
    dtype: str,
    shared: Callable[[str], bool] | None = None,
    lineage: dict[str, Any] | None = None,
) -> StoredDraft:
    """Write the draft into an existing empty directory; draft.json comes last, without it nothing loads.

    dtype: of the weights, as the target's engine has them. shared: whether the target holds the very numbers of a tensor
    (`embed_tokens.weight`, `lm_head.weight`), which is then left out. lineage: see StoredDraft.
    """
    import torch

    config = draft.config
    if shared is not None:
        own_embedding = config.own_embedding and not shared("embed_tokens.weight")
        config = replace(config, own_embedding=own_embedding, own_head=config.own_head and not shared("lm_head.weight"))
    records: dict[str, StoredTensor] = {}
    stream = SafetensorsStream(directory / WEIGHTS_NAME, draft_tensors(config))
    try:
        for name, shape in draft_tensors(config).items():
            tensor: torch.Tensor = draft.read(name)
            tensor = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor.long()
            tensor = tensor.contiguous()
            stream.add(name, tensor)
            records[name] = StoredTensor(shape, xxhash.xxh3_128_hexdigest(tensor_bytes(tensor)))
    except BaseException:
        stream.abort()
        raise
    stream.close()
    stored = StoredDraft(config, records, draft.packaging, lineage or {})
    (directory / DRAFT_NAME).write_text(json.dumps(stored.to_json(), indent=1) + "\n", encoding="utf-8")
    return stored
