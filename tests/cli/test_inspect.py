"""`dspark inspect` on every kind of path: what a person reads fits a screen, and a script finds the same in one document."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from case_checkpoints import cast, llama_config, llama_state, save_checkpoint, save_pickles, write_gguf
from draft_checkpoints import TARGET_LAYERS, make_draft
from engine_runs import tiny_engine
from lora_cases import edit_config, make_adapter
from quantized_checkpoints import (
    awq_gemm_parts,
    base_model,
    compressed_parts,
    fp8_weight,
    gptq_parts,
    integers,
    linears_only,
    quantized_state,
    save_quantized,
)
from tiny_models import make_tiny_checkpoint

from dspark.converters.drafts.checkpoint import read_draft
from dspark.converters.drafts.store import store_draft
from dspark.converters.pipeline import convert, quantize
from dspark.runtime.spec.kv_cache import KVCacheConfig
from dspark.runtime.spec.manifest import load_manifest
from dspark_cli.app import run
from dspark_cli.inspect_text import lines, size

GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one of everything."""
    folder = tmp_path_factory.mktemp("kinds")
    config, state = llama_config(torch_dtype="bfloat16"), cast(llama_state(llama_config()), "bfloat16")
    save_checkpoint(folder / "hf", config, state, shards=3)
    save_pickles(folder / "torch_bin", config, state)
    write_gguf(folder / "m.gguf", llama_config(), llama_state(llama_config()), "Q8_0")
    make_tiny_checkpoint(folder / "experts", "qwen2_moe-mixed")
    config, state = base_model(50)
    four = linears_only(lambda module, weight: integers(weight, 4, 32, False))
    for name, parts, described in (
        ("gptq", gptq_parts, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}),
        ("awq", awq_gemm_parts, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}),
    ):
        save_quantized(folder / name, config, quantized_state(state, four, lambda module, q, parts=parts: parts(q))[0], described)
    symmetric = linears_only(lambda module, weight: integers(weight, 4, 32))
    described = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": GROUPS, "ignore": ["lm_head"]}
    save_quantized(folder / "ct", config, quantized_state(state, symmetric, lambda module, q: compressed_parts(q))[0], described)
    save_quantized(folder / "fp8", config, fp8_state(state), {"quant_method": "fp8", "weight_block_size": [128, 128]})
    base = make_tiny_checkpoint(folder / "base", "llama")
    make_adapter(folder / "adapter", base)
    edit_config(Path(shutil.copytree(folder / "adapter", folder / "ia3")), peft_type="IA3")
    convert(folder / "hf", folder / "dense", audit=False)
    made = make_draft(folder / "published_draft", "deepspec-vanilla")
    layers = tiny_engine(folder / "draft_target", num_hidden_layers=TARGET_LAYERS)
    (folder / "draft").mkdir()
    store_draft(read_draft(made.path, load_manifest(layers).model), folder / "draft", "bfloat16")
    quantize(folder / "dense", folder / "w4", "w4a16")
    convert(base, folder / "merged", adapters=[(folder / "adapter", 0.5)], audit=False)
    shutil.copytree(folder / "w4", folder / "lost")
    next((folder / "lost").glob("weights-*")).unlink()
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("hello")
    return folder


def fp8_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Linears of the layers in blocks of 128 x 128."""
    stored = {}
    for name, tensor in state.items():
        if ".self_attn." in name or ".mlp." in name:
            stored[name], stored[f"{name}_scale_inv"], _ = fp8_weight(tensor, (128, 128))
        else:
            stored[name] = tensor.half()
    return stored


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The document, and the text by its labels (lines that continue one joined to it)."""
    capsys.readouterr()
    assert run(["inspect", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert run(["inspect", str(path)]) == 0
    out, err = capsys.readouterr()
    rows, label = {}, ""
    width = out.index("LoRA" if "peft_type" in document and "rank" in document else document["format"])
    assert err == "" and len(out.splitlines()) <= 40 and max(map(len, out.splitlines())) <= 160
    for line in out.splitlines():
        label = line[:width].strip() or label
        rows[label] = f"{rows[label]}\n{line[width:]}" if label in rows else line[width:]
    return document, rows


@pytest.mark.parametrize(
    ("kind", "format", "scheme", "weights"),
    [
        ("hf", "safetensors", None, "21 bfloat16 tensors, in an engine bfloat16"),
        ("torch_bin", "pytorch", None, "21 bfloat16 tensors, in an engine bfloat16"),
        ("m.gguf", "gguf", None, "16 Q8_0, 5 float32 tensors, in an engine bfloat16"),
        ("experts", "safetensors", None, "59 float32 tensors, in an engine float32"),
        (
            "gptq",
            "gptq",
            "w4a16-asym group 32",
            "14 w4a16-asym group 32, 7 float16 tensors, in an engine w4a16-asym group 32, the rest float16",
        ),
        (
            "awq",
            "awq",
            "w4a16-asym group 32",
            "14 w4a16-asym group 32, 7 float16 tensors, in an engine w4a16-asym group 32, the rest float16",
        ),
        (
            "ct",
            "compressed-tensors",
            "w4a16 group 32",
            "14 w4a16 group 32, 7 float16 tensors, in an engine w4a16 group 32, the rest float16",
        ),
        ("fp8", "fp8", "fp8 blocks of 128 x 128", "14 fp8 blocks of 128 x 128, 7 float16 tensors"),
    ],
)
def test_a_checkpoint(kinds: Path, capsys: pytest.CaptureFixture[str], kind: str, format: str, scheme: str | None, weights: str) -> None:
    facts, rows = inspected(kinds / kind, capsys)
    assert (facts["format"], facts["scheme"]) == (format, scheme) and rows["weights"].startswith(weights)
    assert rows["model"].startswith(f"{facts['family']}, {facts['parameters']:,} parameters, {facts['layers']} layers, context 256")
    sizes = {name: entry["bytes"] for name, entry in facts["files"].items()}
    source = kinds / kind
    assert sizes == {name: (source / name if source.is_dir() else source).stat().st_size for name in sizes}
    assert facts["file_bytes"] == sum(sizes.values()) and rows["files"].startswith(f"{len(sizes)} file")
    assert facts["memory"]["total_bytes"] > 450_000_000
    assert (
        rows["memory"].splitlines()[0].strip() == f"about {size(facts['memory']['total_bytes'])} for a run on a CPU with the default flags"
    )


def test_experts_and_windows_are_said(kinds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, rows = inspected(kinds / "experts", capsys)
    assert "6 experts of 32, 3 for a token, one of 32 for all, in 1 of 4 layers" in rows["model"]
    assert "lm_head of its own, rope default, window 24 in 2 layers" in rows["model"]


def test_an_engine(kinds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scheme, size, memory, what it was made from down to the first checkpoint, by which versions, and what the audit said."""
    facts, rows = inspected(kinds / "w4", capsys)
    manifest = load_manifest(kinds / "w4")
    assert facts["lineage"] == manifest.lineage and facts["audit_record"] == manifest.audit and facts["missing_files"] == []
    assert rows["weights"].splitlines() == [
        f"w4a16 group 128 by rtn, the rest bfloat16, {size(manifest.weight_bytes())}",
        "left dense: lm_head, model.embed_tokens",
    ]
    assert rows["tokenizer"] == "with a chat template" and rows["audit"].startswith("passed (logits within")
    first, *files = rows["made from"].splitlines()
    assert first.startswith("dense (engine), 2 files, ") and len(files) == 2
    recorded = manifest.lineage["files"]["engine.json"]
    assert f"  engine.json  {size(recorded['bytes'])}  xxh3 {recorded['xxh3'][:12]}" in files
    first, *files = rows["that from"].splitlines()
    assert first.startswith("hf (safetensors), 7 files, ") and len(files) == 7 and files[-1].strip() == "and 1 more (--json names all)"
    assert rows["made"].endswith(f"numpy {manifest.lineage['tools']['numpy']}") and " UTC by dspark " in rows["made"]
    assert rows["quality"].startswith("SQNR of the weights: mean ") and "group size 128" in rows["note"]


def test_adapters_of_an_engine_have_their_weight_and_hashes(kinds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts, rows = inspected(kinds / "merged", capsys)
    first, *files = rows["adapter"].splitlines()
    assert first.startswith("adapter x0.5, 2 files, ") and facts["adapters"] == ["adapter x0.5"]
    digest = facts["lineage"]["adapters"][0]["files"]["adapter_model.safetensors"]["xxh3"]
    assert any(f"xxh3 {digest[:12]}" in line for line in files) and rows["audit"] == "not audited: --no-audit"


def test_an_engine_that_lost_a_file_says_so(kinds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts, rows = inspected(kinds / "lost", capsys)
    assert facts["missing_files"] == ["weights-00001-of-00001.safetensors"]
    assert rows["MISSING"].startswith("weights-00001-of-00001.safetensors: this engine does not load")


def test_an_adapter(kinds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts, rows = inspected(kinds / "adapter", capsys)
    assert (rows["format"], rows["rank"], rows["targets"]) == ("LoRA adapter", "8", "down_proj, q_proj, v_proj")
    assert rows["files"].startswith(f"{len(facts['files'])} files, ") and "--lora DIR" in rows["to merge it"]
    facts, rows = inspected(kinds / "ia3", capsys)
    assert facts["format"] == "adapter" and "'IA3', which is not supported" in rows["not supported"] and "to merge it" not in rows


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("empty", "is no checkpoint that dspark knows; supported: a Hugging Face directory"),
        ("notes.txt", "is no checkpoint that dspark knows; supported: a Hugging Face directory"),
        ("hf/config.json", "is no checkpoint that dspark knows"),
        ("hf/model-00001-of-00003.safetensors", "is no checkpoint that dspark knows; give the directory with its config.json"),
        ("nosuch", "does not exist; give a local path"),
    ],
)
def test_what_is_none_of_these_is_one_line(kinds: Path, capsys: pytest.CaptureFixture[str], path: str, words: str) -> None:
    assert run(["inspect", str(kinds / path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith("error: ") and words in err


def test_a_calibrated_cache_and_a_measured_loss_are_shown(kinds: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """From the manifest as `quantize` leaves it; the cache's bytes follow its numbers."""
    engine = Path(shutil.copytree(kinds / "w4", tmp_path / "engine"))
    document = json.loads((engine / "engine.json").read_text())
    document["kv_cache"] = vars(KVCacheConfig("int8", "channel", num_tokens=4096))
    document["quality"]["evaluation"] = {"file": "t.txt", "perplexity": 12.5, "mean_kl": 0.0125, "top1_agreement": None}
    document["quality"]["calibration"] = {"file": "job.jsonl", "samples": 128}
    (engine / "engine.json").write_text(json.dumps(document))
    before, _ = inspected(kinds / "w4", capsys)
    facts, rows = inspected(engine, capsys)
    assert rows["KV cache"] == "int8, a scale per channel (absmax, 4096 tokens)"
    assert 2 * facts["kv_bytes_per_token"] == before["kv_bytes_per_token"] and "256 bytes a token in int8" in rows["memory"]
    assert rows["measured"] == "on t.txt: perplexity 12.5, mean KL in nats 0.0125"
    assert rows["calibrated"] == "file job.jsonl, samples 128"


def test_an_old_manifest_without_lineage_is_shown(kinds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Path(shutil.copytree(kinds / "dense", tmp_path / "engine"))
    document = json.loads((engine / "engine.json").read_text())
    (engine / "engine.json").write_text(json.dumps({**document, "lineage": {}, "audit": {}, "created": 0}))
    _, rows = inspected(engine, capsys)
    assert rows["made from"] == "unknown (unknown)" and rows["audit"] == "not audited" and rows["made"] == ""


def test_sizes_are_read_at_a_glance() -> None:
    assert [size(number) for number in (0, 999, 1000, 123_456_789, 6_300_000_000, 2 * 10**12)] == [
        "0 bytes", "999 bytes", "1.0 kB", "123.5 MB", "6.3 GB", "2.0 TB",
    ]  # fmt: skip


def test_labels_line_up() -> None:
    facts = {"format": "adapter", "peft_type": "IA3", "not_supported": "no", "files": {"a": {"bytes": 5}}}
    assert list(lines(facts)) == [
        "format         adapter",
        "peft type      IA3",
        "not supported  no",
        "files          1 file, 5 bytes",
        "                 a  5 bytes",
    ]


def test_a_draft_by_itself(kinds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it is for, what it reads, and that its weights are there."""
    facts, rows = inspected(kinds / "draft", capsys)
    assert rows["format"] == "draft: dspark, up to 5 tokens a draft"
    sizes = {name: (kinds / "draft" / name).stat().st_size for name in ("draft.json", "draft.safetensors")}
    assert {name: entry["bytes"] for name, entry in facts["files"].items()} == sizes
    assert abs(2 * facts["parameters"] - sizes["draft.safetensors"]) < 20_000  # 16 bits each, and the header
    assert f"a target with {TARGET_LAYERS} layers, hidden 64, vocabulary 320" in rows["for"]
    assert f"reads its layers {', '.join(map(str, facts['reads_layers']))}" in rows["for"] and facts["reads_layers"]
    assert rows["bias"] == "on the token before, vanilla, rank 8" and "dspark pair fits them" in rows["confidence"]
    assert "dspark pair ENGINE --draft DIR" in rows["to use it"] and "MISSING" not in rows
    torn = Path(shutil.copytree(kinds / "draft", kinds / "torn_draft"))
    (torn / "draft.safetensors").unlink()
    assert "draft.safetensors: this draft does not load" in inspected(torn, capsys)[1]["MISSING"]
    (torn / "draft.json").write_text("{")
    assert run(["inspect", str(torn)]) == 2
    assert "is damaged" in capsys.readouterr().err
