"""--kv-cache-dtype against what the engine was calibrated for; the manifest's record of it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from standin_engine import make_standin_engine_dir

from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.kv_cache import KVCacheConfig, choose_cache_dtype
from dspark.runtime.spec.manifest import EngineManifest, TensorRecord, load_manifest
from dspark.runtime.spec.model_config import ModelConfig

INT8 = KVCacheConfig("int8", "channel", margin=1.1, num_tokens=7)


@pytest.mark.parametrize(
    ("calibrated", "wanted", "want"),
    [
        (None, "auto", "bfloat16"),
        (None, "model", "bfloat16"),
        (None, "bfloat16", "bfloat16"),
        (INT8, "auto", "int8"),
        (INT8, "int8", "int8"),
        (INT8, "model", "bfloat16"),
        (INT8, "bfloat16", "bfloat16"),
    ],
)
def test_what_a_run_takes(calibrated: KVCacheConfig | None, wanted: str, want: str) -> None:
    assert choose_cache_dtype(calibrated, "bfloat16", wanted) == want


@pytest.mark.parametrize(
    ("calibrated", "wanted", "words"),
    [
        (None, "int8", "the engine has no scales for the KV cache; calibrate them: dspark quantize .* --kv-cache-dtype int8"),
        (None, "fp8", "the engine has no scales for the KV cache; calibrate them: dspark quantize .* --kv-cache-dtype fp8"),
        (INT8, "fp8", "the engine has scales for int8"),
        (INT8, "float16", "the model's dtype is bfloat16; type --kv-cache-dtype model"),
    ],
)
def test_a_cache_without_its_scales_is_refused(calibrated: KVCacheConfig | None, wanted: str, words: str) -> None:
    """vLLM takes scales of 1.0 where it finds none: a Llama 70B then loses 6 % of perplexity without a word."""
    with pytest.raises(UsageError) as error:
        choose_cache_dtype(calibrated, "bfloat16", wanted)
    shown = f"{error.value}; {error.value.hint}"
    assert re.search(words, shown), shown


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match="--kv-cache-dtype is int4, allowed: auto, model, int8, fp8"):
        EngineConfig(kv_cache_dtype="int4")


def test_the_manifest_keeps_the_record(tmp_path: Path) -> None:
    make_standin_engine_dir(tmp_path / "engine")
    manifest = load_manifest(tmp_path / "engine")
    assert manifest.kv_cache is None
    replace(manifest, kv_cache=INT8).save(tmp_path / "engine")
    assert load_manifest(tmp_path / "engine").kv_cache == INT8
    path = tmp_path / "engine" / "engine.json"
    data = json.loads(path.read_text())
    del data["kv_cache"]  # an engine of an older dspark
    path.write_text(json.dumps(data))
    assert load_manifest(tmp_path / "engine").kv_cache is None
    path.write_text(json.dumps({**data, "kv_cache": {"dtype": "int8"}}))
    with pytest.raises(InputError, match="is damaged"):
        load_manifest(tmp_path / "engine")


def test_scales_are_no_tensors_of_the_model() -> None:
    """Audit and export compare with a checkpoint's tensors, and those have no such names."""
    record = TensorRecord("s", "float32", (1,), "")
    names = [
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.v_scale",
        "model.norm.weight",
        "model.layers.0.mlp.up_proj.scales",
    ]
    model = ModelConfig("llama", 8, 8, 8, 1, 1, 1, 8, 1e-5, 16)
    assert list(EngineManifest(model, dict.fromkeys(names, record)).model_tensors()) == names[2:]
