"""Quantizing an engine or a checkpoint: which layers, which groups, what the manifest says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from case_checkpoints import llama_config, llama_state, save_checkpoint
from engine_logits import by_transformers
from safetensors.torch import load_file
from tiny_models import FAMILIES, make_tiny_checkpoint

from dspark.converters.pipeline import convert, quantize
from dspark.kernels.wna16 import Wna16Weight
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.manifest import load_manifest

PROMPT = list(range(3, 43))


def source_of(tmp_path: Path, **changes: object) -> Path:
    config = llama_config(**changes)
    return save_checkpoint(tmp_path / "ckpt", config, llama_state(config, 1))


def tensors_of(engine: Path) -> dict[str, torch.Tensor]:
    return load_file(engine / "weights-00001-of-00001.safetensors")


@pytest.mark.parametrize(("scheme", "group_size"), [("w8a16", -1), ("w8a16-asym", 64), ("w4a16", 64), ("w4a16-asym", 32), ("w4a16", -1)])
def test_scheme_travels_in_the_manifest(tmp_path: Path, scheme: str, group_size: int) -> None:
    result = quantize(source_of(tmp_path), tmp_path / "engine", scheme, group_size=group_size, audit=False)
    quant = load_manifest(tmp_path / "engine").quant
    assert quant is not None and quant.scheme.name == scheme and quant.scheme.group_size == group_size and quant.scheme.method == "rtn"
    tensors = tensors_of(tmp_path / "engine")
    name = "model.layers.0.mlp.down_proj"
    zeros = tensors.get(f"{name}.zeros")
    assert (zeros is not None) == scheme.endswith("asym") and f"{name}.weight" not in tensors
    packed = Wna16Weight(tensors[f"{name}.qweight"], tensors[f"{name}.scales"], zeros, quant.scheme.weight_bits, 256)
    original = load_file(tmp_path / "ckpt" / "model.safetensors")[f"{name}.weight"]
    floor = {8: 35, 4: 15}[quant.scheme.weight_bits]
    noise = (packed.dense(torch.float32) - original).square().sum()
    assert 10 * torch.log10(original.square().sum() / noise) > floor
    assert tensors["lm_head.weight"].dtype == torch.float32 and "model.embed_tokens.weight" in tensors
    assert len(result.manifest.quality["layers"]) == 14 and result.manifest.quality["worst_sqnr_db"] > floor


def test_quantizing_an_engine_equals_quantizing_its_checkpoint(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    convert(source, tmp_path / "dense", audit=False)
    quantize(source, tmp_path / "a", "w4a16", audit=False)
    quantize(tmp_path / "dense", tmp_path / "b", "w4a16", audit=False)
    first, second = load_manifest(tmp_path / "a"), load_manifest(tmp_path / "b")
    assert first.tensors == second.tensors and first.model == second.model and first.files == second.files
    assert second.lineage["made_of"]["format"] == "safetensors"


@pytest.mark.parametrize("family", FAMILIES)
def test_8_bit_stays_close_for_every_family(tmp_path: Path, family: str) -> None:
    """44 dB per layer is 2 to 4 % of a token's logits (root mean square) in these random models; a wrong layout or group is near 100 %.

    The median over the tokens counts: where two experts are nearly as good, noise makes a token take the other one.
    """
    source = make_tiny_checkpoint(tmp_path / "ckpt", family)
    convert(source, tmp_path / "dense", audit=False)
    quantize(source, tmp_path / "q", "w8a16", audit=False)
    want = by_transformers(tmp_path / "dense", PROMPT)
    error = by_transformers(tmp_path / "q", PROMPT) - want
    assert 0 < float((error.square().mean(-1).sqrt() / want.square().mean(-1).sqrt()).median()) < 0.05


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_routers_stay_dense_and_every_expert_is_a_layer(tmp_path: Path, family: str) -> None:
    """One wrong choice changes a token's whole layer; the audit compares the experts' own codes with transformers."""
    result = quantize(make_tiny_checkpoint(tmp_path / "ckpt", family), tmp_path / "engine", "w4a16")
    manifest = load_manifest(tmp_path / "engine")
    assert manifest.audit["summary"].startswith("audit passed")
    routers = [name for name in manifest.tensors if name.endswith((".mlp.gate.weight", ".shared_expert_gate.weight"))]
    assert len(routers) == manifest.model.num_layers * (2 if family == "qwen2_moe" else 1)
    assert manifest.quant is not None and manifest.quant.ignore[2] == "*.mlp.gate"
    experts = [module for module in result.manifest.quality["layers"] if ".experts." in module]
    assert len(experts) == 3 * manifest.model.num_experts * manifest.model.num_layers


@pytest.mark.parametrize(
    ("changes", "scheme", "expected"),
    [
        ({"hidden_size": 128, "intermediate_size": 256}, "w4a16", 128),
        ({"hidden_size": 192, "head_dim": 48}, "w4a16", 64),
        ({"hidden_size": 160, "intermediate_size": 224, "head_dim": 40}, "w4a16", 32),
        ({}, "w8a16", -1),
    ],
)
def test_default_group_size_is_the_largest_that_divides_and_is_noted(tmp_path: Path, changes: dict, scheme: str, expected: int) -> None:
    result = quantize(source_of(tmp_path, **changes), tmp_path / "engine", scheme, audit=False)
    assert result.manifest.quant is not None and result.manifest.quant.scheme.group_size == expected
    assert any(note.startswith(f"group size {expected} (") for note in result.notes)


def test_a_group_size_that_does_not_divide_is_refused_before_any_work(tmp_path: Path) -> None:
    """Found at save time, hours later, it costs a night."""
    source = source_of(tmp_path, hidden_size=160, intermediate_size=224, head_dim=40)
    touched: list[int] = []
    with pytest.raises(UsageError) as caught:
        quantize(source, tmp_path / "engine", "w4a16", group_size=64, audit=False, progress=lambda *step: touched.append(1))
    assert "group size 64 does not divide the inputs of model.layers.0.self_attn.q_proj (160 inputs)" in caught.value.message
    assert caught.value.hint == "type --group-size 32 or -1"
    assert not touched and not (tmp_path / "engine").exists()


def test_widths_that_do_not_fill_words_are_refused_before_any_work(tmp_path: Path) -> None:
    source = source_of(tmp_path, intermediate_size=252)
    with pytest.raises(UsageError, match=r"not so in model\.layers\.0\.mlp\.down_proj \(252 inputs of 4 bits\)"):
        quantize(source, tmp_path / "engine", "w4a16", group_size=-1, audit=False)
    quantize(source, tmp_path / "engine", "w4a16", group_size=-1, ignore=("*.down_proj",))
    assert load_manifest(tmp_path / "engine").audit["summary"].startswith("audit passed")


def test_ignored_layers_stay_dense(tmp_path: Path) -> None:
    result = quantize(source_of(tmp_path), tmp_path / "engine", "w4a16", ignore=("*.down_proj", "model.layers.1.*"), audit=False)
    assert result.manifest.quant is not None
    assert result.manifest.quant.ignore == ("lm_head", "model.embed_tokens", "*.down_proj", "model.layers.1.*")
    assert sorted(result.manifest.quality["layers"]) == [
        f"model.layers.0.{part}_proj" for part in ("mlp.gate", "mlp.up", "self_attn.k", "self_attn.o", "self_attn.q", "self_attn.v")
    ]
    assert by_transformers(tmp_path / "engine", PROMPT).isfinite().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheme": "w5a16"}, "unknown scheme 'w5a16', allowed: w8a16"),
        ({"scheme": "w4a16", "method": "best"}, "--method is best, allowed: rtn, gptq, awq, awq-gptq, smoothquant, smoothquant-gptq"),
        ({"scheme": "w4a16", "method": "gptq"}, "--method gptq looks at text"),
        ({"scheme": "w8a8", "method": "awq"}, "--method awq does not make w8a8, allowed for it: rtn, gptq, smoothquant, smoothquant-gptq"),
        ({"scheme": "w8a8", "group_size": 64}, "--group-size is 64, but w8a8 has no groups of inputs"),
        ({"scheme": "w4a16", "rules": (("layers.7.*", "w8a16"),)}, r"--rule layers\.7\.\* matches no layer"),
        ({"scheme": "w4a16", "group_size": 48}, "--group-size is 48, allowed: 128, 64, 32, -1"),
        ({"scheme": "w4a16", "ignore": ("nothing*",)}, r"--ignore nothing\* matches no layer"),
        ({"scheme": "w4a16", "ignore": ("*",)}, "leaves no layer to quantize"),
    ],
)
def test_wrong_options_are_one_sentence(tmp_path: Path, options: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        quantize(source_of(tmp_path), tmp_path / "engine", audit=False, **options)


def test_rules_give_layers_other_schemes_and_the_last_one_counts(tmp_path: Path) -> None:
    rules = (("layers.0.*", "w8a16"), ("*.down_proj", "w2a16"), ("model.layers.0.self_attn.v_proj", "dense"))
    result = quantize(source_of(tmp_path), tmp_path / "engine", "w4a16", group_size=32, rules=rules)
    quant = load_manifest(tmp_path / "engine").quant
    assert quant is not None
    names = {module: scheme.describe() for module, scheme in (quant.modules or {}).items()}
    assert names["model.layers.0.mlp.up_proj"] == "w8a16 per channel"
    assert names["model.layers.0.mlp.down_proj"].startswith("w2a16")
    assert names["model.layers.1.self_attn.v_proj"] == "w4a16 group 32"
    assert "model.layers.0.self_attn.v_proj" not in names and "lm_head" not in names
    assert result.manifest.audit["summary"].startswith("audit passed")


def test_a_quantized_engine_is_not_quantized_again(tmp_path: Path) -> None:
    quantize(source_of(tmp_path), tmp_path / "engine", "w4a16", audit=False)
    with pytest.raises(InputError, match=r"already quantized \(w4a16\)"):
        quantize(tmp_path / "engine", tmp_path / "again", "w8a16", audit=False)


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    config = llama_config()
    state = llama_state(config)
    state["model.layers.1.mlp.up_proj.weight"][5, 5] = float("nan")
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has values that are not finite"):
        quantize(save_checkpoint(tmp_path / "ckpt", config, state), tmp_path / "engine", "w4a16", audit=False)
    assert not (tmp_path / "engine").exists()


def test_progress_is_in_bytes_and_reaches_its_end(tmp_path: Path) -> None:
    """Of the weights as if none were quantized, so that the bar's length is known before the first one."""
    seen: list[tuple[int, int]] = []
    quantize(source_of(tmp_path), tmp_path / "engine", "w4a16", audit=False, progress=lambda done, total, name: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1 and seen[-1][0] == seen[-1][1] > 10_000
