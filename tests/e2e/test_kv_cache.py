"""Engines with an 8-bit KV cache: close to the same engine without, and as independent of batch, chunks, pool and prefix caching."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_runs import run_requests, texts, tiny_engine
from kv_engines import calibrated

from dspark.kernels.kv_cache import CODE_LIMITS
from dspark.runtime.engine import Engine
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.kv.pool import bytes_per_block
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams

_RANDOM = random.Random(3)
SAMPLES = [[_RANDOM.randrange(3, 320) for _ in range(length)] for length in (60, 100, 30)]
PROMPT = [_RANDOM.randrange(3, 320) for _ in range(90)]
LARGEST_ERROR = {"int8": 0.1, "fp8": 0.12}
"""Of a logit, over the largest logit. Random weights attend sharply, so these are harsh models: real ones stay far below."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def int8(plain: Path, tmp_path_factory) -> Path:
    return calibrated(plain, tmp_path_factory.mktemp("int8") / "engine", "int8", SAMPLES)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_logits_stay_close(tmp_path: Path, family: str, dtype: str) -> None:
    """Biases on keys, norms on heads, windows and caps; compiled kernels and the reference alike, and one with the other."""
    engine = calibrated(tiny_engine(tmp_path, family), tmp_path / dtype, dtype, SAMPLES)
    want = logits_for(load_model(engine), PROMPT)
    found = {kernels: logits_for(load_model(engine, kernels=kernels, kv_cache_dtype="auto"), PROMPT) for kernels in ("auto", "reference")}
    for logits in found.values():
        assert 0 < float((logits - want).abs().max()) < LARGEST_ERROR[dtype] * float(want.abs().max())
    mean = float((found["auto"] - found["reference"]).abs().mean())
    assert mean < 0.2 * float((found["auto"] - want).abs().mean()) + 1e-6  # a number at a tie may be rounded to its other neighbour


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_do_not_show(int8: Path, dtype: str) -> None:
    """Every token reads the keys of its own step from the cache too, rounded, as later steps will: so chunks cannot matter."""
    model = load_model(int8, dtype=dtype, deterministic=True, kv_cache_dtype="int8")
    assert model.kernels.facts.kv_dtype == torch.int8
    whole = logits_for(model, PROMPT)
    for chunk in (1, 7, 64):
        assert torch.equal(logits_for(model, PROMPT, chunk), whole)


def requests() -> list[Request]:
    """Prompts that share a beginning which ends inside a block, several answers of one prompt, greedy and drawn."""
    rng = random.Random(8)
    common = [rng.randrange(3, 320) for _ in range(37)]
    found = []
    for i in range(12):
        own = [rng.randrange(3, 320) for _ in range(rng.randint(1, 20))]
        params = SamplingParams(max_tokens=rng.choice([3, 25]), temperature=0.0 if i % 3 else 0.9, n=1 if i % 4 else 3, ignore_eos=True)
        found.append(Request(i, common + own if i % 2 else own, params, draw_key=rng.getrandbits(128)))
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 4, "max_num_batched_tokens": 16},
        {"enable_prefix_caching": False},
        {"pool_blocks": 7},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_texts_do_not_depend_on_the_run(int8: Path, settings: dict) -> None:
    """Forks, copies on write, shared beginnings and sequences computed again after they gave their blocks back: the same texts."""
    settings = dict(settings)
    blocks = settings.pop("pool_blocks", None)
    if blocks is not None:
        settings["kv_cache_memory_bytes"] = blocks * bytes_per_block(load_manifest(int8).model, 16, torch.int8)
    want = run_requests(int8, requests(), deterministic=True)
    found = run_requests(int8, requests(), deterministic=True, **settings)
    assert texts(found) == texts(want)
    if blocks is not None:
        assert sum(output.num_preemptions for output in found.values()) > 0


def test_the_pool_has_more_blocks_for_the_same_bytes(plain: Path, int8: Path) -> None:
    found = {}
    for name, engine in (("plain", plain), ("int8", int8)):
        config = EngineConfig(device="cpu", kv_cache_memory_bytes=1 << 20)
        running = Engine.from_directory(engine, config, load_codec(engine))
        found[name] = running.metrics()
        running.close()
    assert found["int8"]["kv_blocks"] == 4 * found["plain"]["kv_blocks"]  # the model is float32
    assert [found[name]["kv_cache_dtype"] for name in found] == ["float32", "int8"]


def test_the_cache_can_be_turned_off(plain: Path, int8: Path) -> None:
    """The scales of an engine are taken from it all the same: every tensor of an engine has a reader."""
    assert torch.equal(logits_for(load_model(int8, kv_cache_dtype="model"), PROMPT), logits_for(load_model(plain), PROMPT))


def test_scales_keep_their_digits_in_a_16_bit_engine(int8: Path) -> None:
    """bfloat16 scales would move every number of a channel by up to 0.4 %."""
    model = load_model(int8, dtype="bfloat16", kv_cache_dtype="int8")
    scales = model.layers[0].attention.kv_scales
    assert scales is not None and scales.k.dtype == torch.float32
    assert not torch.equal(scales.k, scales.k.bfloat16().float())


def test_an_engine_without_its_scales_does_not_load(plain: Path, int8: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no scales for the KV cache"):
        load_model(plain, kv_cache_dtype="int8")
    manifest = load_manifest(int8)
    cut = tmp_path / "cut"
    cut.mkdir()
    for path in int8.iterdir():
        (cut / path.name).symlink_to(path)
    (cut / "engine.json").unlink()
    without = {name: record for name, record in manifest.tensors.items() if name != "model.layers.1.self_attn.v_scale"}
    replace(manifest, tensors=without).save(cut)
    with pytest.raises(InputError, match=r"needs model.layers.1.self_attn.k_scale and model.layers.1.self_attn.v_scale"):
        load_model(cut, kv_cache_dtype="auto")


def test_every_8_bit_dtype_has_a_limit() -> None:
    from dspark.runtime.execution.loader import CACHE_DTYPES
    from dspark.runtime.spec.kv_cache import QUANTIZED_CACHES

    assert set(CACHE_DTYPES) == set(QUANTIZED_CACHES)
    assert set(CACHE_DTYPES.values()) == set(CODE_LIMITS)
