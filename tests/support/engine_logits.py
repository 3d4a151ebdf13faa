"""What an engine computes, by two roads: transformers on the engine's config and tensors, and dspark's own runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def by_transformers(engine: str | Path, token_ids: list[int]) -> Any:
    """Logits [T, vocab] of transformers' model with the engine's own config and (dequantized) weights."""
    import torch

    from dspark.converters.audit import reference_model
    from dspark.runtime.spec.manifest import load_manifest

    with torch.inference_mode():
        return reference_model(Path(engine), load_manifest(engine))(torch.tensor([token_ids])).logits[0]


def relative_error(got: Any, want: Any) -> float:
    """Largest difference over the largest value."""
    return float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-9))
