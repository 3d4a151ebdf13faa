"""Walking a model layer by layer gives what the whole model gives."""

import pytest
import torch
from tiny_models import FAMILIES, make_tiny_checkpoint

from dspark.converters.pipeline import convert
from dspark.runtime.execution.layer_walk import LayerWalk, walk_model
from dspark.runtime.execution.loader import EngineWeights, choose_kernels, load_model
from dspark.runtime.execution.logits import logits_for
from dspark.runtime.spec.manifest import load_manifest

LENGTHS = (5, 90, 1, 33, 16)


def samples_of(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 320, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_walk_are_those_of_the_model(family: str, tmp_path) -> None:
    """Samples of unequal lengths, in batches that hold one and several of them."""
    convert(make_tiny_checkpoint(tmp_path / "checkpoint", family), tmp_path / "engine", audit=False)
    manifest, samples = load_manifest(tmp_path / "engine"), samples_of(LENGTHS)
    model = load_model(tmp_path / "engine")
    whole = torch.cat([logits_for(model, sample) for sample in samples])
    kernels = choose_kernels(manifest.model)
    walk = LayerWalk(manifest.model, samples, kernels, batch_tokens=64)
    assert [batch.rows for batch in walk.batches] == [slice(0, 5), slice(5, 95), slice(95, 145)]
    weights = EngineWeights(tmp_path / "engine", manifest, kernels.facts.dtype, "cpu")
    head = walk_model(walk, manifest.quant, weights)
    weights.check_all_taken()
    torch.testing.assert_close(walk.logits(head, slice(0, walk.num_tokens)), whole, rtol=1e-4, atol=1e-4)


def test_a_walk_needs_tokens(tmp_path) -> None:
    convert(make_tiny_checkpoint(tmp_path / "checkpoint", "llama"), tmp_path / "engine", audit=False)
    manifest = load_manifest(tmp_path / "engine")
    for samples in ([], [[1], []]):
        with pytest.raises(ValueError, match="needs a token"):
            LayerWalk(manifest.model, samples, choose_kernels(manifest.model))
