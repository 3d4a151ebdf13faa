"""One tiny target for all tests of drafting heads, as an engine and as transformers' model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from draft_checkpoints import TARGET_LAYERS, MadeDraft, make_draft
from tiny_models import make_tiny_checkpoint, make_tiny_model

from dspark.converters.drafts.checkpoint import read_draft
from dspark.converters.drafts.store import store_draft
from dspark.converters.pipeline import convert
from dspark.runtime.models.decoder import Decoder
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.speculation.heads.load import load_drafter


@dataclass(frozen=True)
class Target:
    """engine: its directory. model: the same weights in transformers."""

    engine: Path
    model: Any


@dataclass(frozen=True)
class Stored:
    """A draft as it was made and as the engine keeps it."""

    made: MadeDraft
    directory: Path

    def build(self, **options: Any) -> Callable[[Decoder, Sampler, int], Any]:
        return lambda model, sampler, max_len: load_drafter(self.directory, model, sampler, max_len, **options)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    checkpoint = make_tiny_checkpoint(folder / "checkpoint", "llama", num_hidden_layers=TARGET_LAYERS)
    convert(checkpoint, folder / "engine", dtype="float32", audit=False)
    return Target(folder / "engine", make_tiny_model("llama", num_hidden_layers=TARGET_LAYERS))


@pytest.fixture(scope="session")
def stored(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Stored]:
    """Makes a draft of a kind and stores it; the same arguments give the same one."""
    known: dict[str, Stored] = {}

    def make(kind: str, **changes: Any) -> Stored:
        key = repr((kind, sorted(changes.items())))
        if key not in known:
            folder = tmp_path_factory.mktemp("draft")
            made = make_draft(folder / "published", kind, **changes)
            (folder / "draft").mkdir()
            store_draft(read_draft(folder / "published", load_manifest(target.engine).model), folder / "draft", "float32")
            known[key] = Stored(made, folder / "draft")
        return known[key]

    return make
