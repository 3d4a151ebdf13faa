"""Checkpoints that others quantized, end to end: the engine's logits are those of the weights that the integers stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from case_checkpoints import State, reference_logits, token_ids
from engine_logits import by_transformers, relative_error
from quantized_checkpoints import (
    Integers,
    awq_fast_parts,
    awq_gemm_parts,
    awq_gemv_parts,
    base_model,
    compressed_parts,
    fp8_weight,
    gptq_parts,
    int8_parts,
    integers,
    linears_only,
    quantized_state,
    save_quantized,
    skewed,
)

from dspark.converters.audit import reference_model
from dspark.converters.pipeline import Result, convert, quantize
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for
from dspark.runtime.spec.errors import InputError, UnsupportedError
from dspark.runtime.spec.manifest import load_manifest

CLOSE = 1e-3
WRONG = 1e-2
PROMPT = token_ids(64)


def run(source: Path, engine: Path, **options: Any) -> Result:
    return convert(source, engine, audit=False, dtype="float32", **options)


def engine_logits(engine: Path, kernels: str = "auto") -> torch.Tensor:
    return logits_for(load_model(engine, dtype="float32", kernels=kernels), PROMPT)


def check(source: Path, engine: Path, config: dict[str, Any], dense: State) -> Result:
    """Convert, and hold the engine to transformers on the dense weights, by both kernel choices."""
    result = run(source, engine)
    want = reference_logits(config, dense, PROMPT)
    for kernels in ("reference", "auto"):
        assert relative_error(engine_logits(engine, kernels), want) < CLOSE, kernels
    assert relative_error(by_transformers(engine, PROMPT), want) < CLOSE  # what the audit compares with
    return result


def gptq_config(bits: int, group_size: int, symmetric: bool, version: str, **more: Any) -> dict[str, Any]:
    described = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": symmetric, "checkpoint_format": version}
    return {**described, "desc_act": False, "lm_head": False, **more}


@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric", "version"),
    [
        (4, 32, True, "gptq"),
        (4, 32, False, "gptq"),
        (4, 32, False, "gptq_v2"),
        (8, 64, True, "gptq"),
        (2, 32, False, "gptq_v2"),
        (3, 32, True, "gptq"),
        (3, 32, False, "gptq"),
        (4, -1, False, "gptq"),
    ],
)
def test_zero_points_of_both_versions(tmp_path: Path, bits: int, group_size: int, symmetric: bool, version: str) -> None:
    """B18: files of one version read as the other are one step off everywhere, and answer with one token for ever."""
    config, state = base_model(18)
    recipe = linears_only(lambda module, weight: integers(weight, bits, group_size, symmetric))
    stored, dense = quantized_state(state, recipe, lambda module, q: gptq_parts(q, version))
    source = save_quantized(tmp_path / "ckpt", config, stored, gptq_config(bits, group_size, symmetric, version))
    result = check(source, tmp_path / "engine", config, dense)
    scheme = result.manifest.quant.scheme_for("model.layers.0.mlp.up_proj")
    assert (scheme.weight_bits, scheme.symmetric, scheme.group_size) == (bits, symmetric, group_size)
    assert result.manifest.quant.scheme_for("lm_head") is None


def test_act_order_becomes_a_permutation(tmp_path: Path) -> None:
    """B19: without the group index the answers are gibberish."""
    config, state = base_model(19)
    seeds = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "gate_proj": 2, "up_proj": 3}  # q, k and v share their order, gate and up do not

    def recipe(module: str, weight: torch.Tensor) -> Integers:
        return integers(weight, 4, 32, False, order_seed=seeds.get(module.rpartition(".")[2], 4))

    stored, dense = quantized_state(state, linears_only(recipe), lambda module, q: gptq_parts(q))
    source = save_quantized(tmp_path / "ckpt", config, stored, gptq_config(4, 32, False, "gptq", desc_act=True))
    result = check(source, tmp_path / "engine", config, dense)
    assert result.manifest.quant.scheme.act_order
    assert result.manifest.tensors["model.layers.0.mlp.down_proj.perm"].shape == (256,)

    trap = dict(dense)
    for name in dense:
        if name.replace(".weight", ".g_idx") in stored:
            q = recipe(name.removesuffix(".weight"), state[name])
            trap[name] = Integers(q.codes, q.zeros, q.scales, torch.arange(q.codes.shape[0]) // 32, 4).dense()
    assert relative_error(engine_logits(tmp_path / "engine"), reference_logits(config, trap, PROMPT)) > WRONG


@pytest.mark.parametrize("layout", ["gemm", "gemv", "gemv_fast", "llm-awq"])
def test_awq_layouts(tmp_path: Path, layout: str) -> None:
    """B22: the order of columns is undone for weights and for zero points; all columns have different ones."""
    config, state = base_model(22)
    state = skewed(state)
    packers = {"gemm": awq_gemm_parts, "gemv": awq_gemv_parts, "gemv_fast": awq_fast_parts}
    pack = packers.get(layout, lambda q: awq_fast_parts(q, "scaled_zeros"))
    stored, dense = quantized_state(state, linears_only(lambda module, weight: integers(weight, 4, 32, False)), lambda module, q: pack(q))
    described = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": layout, "modules_to_not_convert": None}
    source = save_quantized(tmp_path / "ckpt", config, stored, described)
    check(source, tmp_path / "engine", config, dense)


@pytest.mark.parametrize("listed", [["o_proj", "model.layers.1.mlp.down_proj", "lm_head"], None], ids=["listed", "unlisted"])
def test_modules_that_were_not_converted_stay_dense(tmp_path: Path, listed: list[str] | None) -> None:
    """B23: the list was lost on saving; what is packed and what is not stands in the tensors."""
    config, state = base_model(23)
    recipe = linears_only(lambda module, weight: integers(weight, 4, 32, False), skip=("o_proj", "layers.1.mlp.down_proj"))
    stored, dense = quantized_state(state, recipe, lambda module, q: awq_gemm_parts(q))
    described = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": listed,
    }
    source = save_quantized(tmp_path / "ckpt", config, stored, described)
    result = check(source, tmp_path / "engine", config, dense)
    assert result.manifest.quant.scheme_for("model.layers.0.self_attn.o_proj") is None
    assert result.manifest.quant.scheme_for("model.layers.0.mlp.down_proj") is not None


def test_dynamic_rules_and_a_quantized_head(tmp_path: Path) -> None:
    """GPTQModel: down_proj in 8 bits, gates left dense, the head quantized too."""
    config, state = base_model(24)

    def recipe(module: str, weight: torch.Tensor) -> Integers | None:
        if "embed" in module or module.endswith("gate_proj"):
            return None
        return integers(weight, 8 if module.endswith("down_proj") else 4, 64 if module.endswith("down_proj") else 32)

    stored, dense = quantized_state(state, recipe, lambda module, q: gptq_parts(q, "gptq_v2"))
    dynamic = {"-:.*gate_proj": {}, "+:.*\\.down_proj$": {"bits": 8, "group_size": 64}}
    described = gptq_config(4, 32, True, "gptq_v2", lm_head=True, dynamic=dynamic)
    result = check(save_quantized(tmp_path / "ckpt", config, stored, described), tmp_path / "engine", config, dense)
    quant = load_manifest(tmp_path / "engine").quant
    assert quant == result.manifest.quant
    assert (quant.scheme_for("model.layers.1.mlp.down_proj").weight_bits, quant.scheme_for("lm_head").weight_bits) == (8, 4)
    assert quant.scheme_for("model.layers.1.mlp.gate_proj") is None
    assert quant.describe() == "mixed: w4a16 group 32 (11 layers), w8a16 group 64 (2 layers)"


def group_args(bits: int, kind: str = "int", strategy: str = "group", **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}


def compressed_config(format: str, weights: dict[str, Any], activations: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None, "format": format}
    described = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {**described, "config_groups": {"group_0": group}, **more}


@pytest.mark.parametrize(
    ("bits", "symmetric", "old_packing", "order_seed"),
    [(4, True, False, None), (4, False, False, 5), (8, True, False, None), (3, True, False, None), (3, False, True, None)],
)
def test_pack_quantized(tmp_path: Path, bits: int, symmetric: bool, old_packing: bool, order_seed: int | None) -> None:
    config, state = base_model(25)
    recipe = linears_only(lambda module, weight: integers(weight, bits, 32, symmetric, order_seed))
    stored, dense = quantized_state(
        state, recipe, lambda module, q: compressed_parts(q, not symmetric, old_packing, with_g_idx=order_seed is not None)
    )
    described = compressed_config("pack-quantized", group_args(bits, group_size=32, symmetric=symmetric))
    check(save_quantized(tmp_path / "ckpt", config, stored, described), tmp_path / "engine", config, dense)


TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def test_int_quantized_weights_with_dynamic_activations_are_served_as_such(tmp_path: Path) -> None:
    """W8A8: the engine rounds its activations token by token; so does the reference here, by the rule spelled out.

    A value on the border of two codes may fall to either side, which spreads over layers and tokens; every token has such a value, its
    largest one, which the rule puts between two codes. So both are nearer to each other than to the model whose activations are not
    rounded, and no more than that can be said.
    """
    config, state = base_model(26)
    stored, dense = quantized_state(state, linears_only(lambda module, weight: integers(weight, 8, -1)), lambda module, q: int8_parts(q))
    source = save_quantized(
        tmp_path / "ckpt", config, stored, compressed_config("int-quantized", group_args(8, strategy="channel"), TOKENS)
    )
    result = run(source, tmp_path / "engine")
    assert result.manifest.quant.describe() == "w8a8 per channel"
    assert result.manifest.tensors["model.layers.0.mlp.up_proj.qweight"].dtype == "int8"
    exact = reference_logits(config, dense, PROMPT)
    want = rounded_logits(tmp_path / "engine")
    assert relative_error(by_transformers(tmp_path / "engine", PROMPT), exact) < CLOSE
    assert 0.01 < relative_error(want, exact) < 0.1
    for kernels in ("reference", "auto"):
        got = engine_logits(tmp_path / "engine", kernels)
        assert (got - want).norm() < 0.95 * (want - exact).norm()
        assert relative_error(got[:2], want[:2]) < 0.05


def rounded_logits(engine: Path) -> torch.Tensor:
    """transformers on the engine's weights, the inputs of every layer's linears rounded to 255 steps of their token's range."""

    def rounded(module: Any, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        largest = args[0].abs().amax(-1, keepdim=True)
        return (args[0] * (127.5 / largest)).round().clamp(-128, 127) * (largest / 127.5)

    model = reference_model(engine, load_manifest(engine))
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(rounded)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


def test_int_quantized_weights_without_them_keep_16_bit_activations(tmp_path: Path) -> None:
    """Static activations and 4-bit codes in int8: the weights are kept, the activations are noted and left alone."""
    config, state = base_model(27)
    stored, dense = quantized_state(state, linears_only(lambda module, weight: integers(weight, 4, 32)), lambda module, q: int8_parts(q))
    stored["model.layers.0.mlp.up_proj.input_scale"] = torch.ones(1)
    static = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    described = compressed_config("int-quantized", group_args(4, group_size=32), static)
    result = check(save_quantized(tmp_path / "ckpt", config, stored, described), tmp_path / "engine", config, dense)
    assert result.manifest.quant.describe() == "w4a16 group 32"
    assert any("14 layers stay in 16 bits" in note and "8-bit int (static)" in note for note in result.notes)


def fp8_state(state: State, block: tuple[int, int], scale_name: str, flat: bool = False) -> tuple[State, State]:
    stored: State = {}
    dense: State = {}
    for name, tensor in state.items():
        if any(part in name for part in ("_proj",)):
            codes, scales, dense[name] = fp8_weight(tensor, block)
            stored[name] = codes
            stored[name.replace(".weight", f".{scale_name}")] = scales.reshape(1) if flat else scales
        else:
            stored[name] = tensor.half()
            dense[name] = stored[name].float()
    return stored, dense


def test_fine_grained_fp8(tmp_path: Path) -> None:
    """Blocks of 128 x 128, the last ones cut off by the matrix."""
    config, state = base_model(28, intermediate_size=160)
    stored, dense = fp8_state(state, (128, 128), "weight_scale_inv")
    described = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    result = check(save_quantized(tmp_path / "ckpt", config, stored, described), tmp_path / "engine", config, dense)
    assert result.manifest.quant.describe() == "fp8 blocks of 128 x 128"
    assert result.manifest.tensors["model.layers.0.mlp.down_proj.qweight"].dtype == "float8_e4m3fn"
    assert any("activations stay in 16 bits" in note for note in result.notes)


@pytest.mark.parametrize(("block", "strategy"), [((-1, -1), "tensor"), ((1, -1), "channel"), ((128, 128), "block")])
def test_float_quantized(tmp_path: Path, block: tuple[int, int], strategy: str) -> None:
    """Scales of tensors, outputs and blocks; scales of a KV cache are named and left out."""
    config, state = base_model(29)
    stored, dense = fp8_state(state, block, "weight_scale", flat=strategy == "tensor")
    stored["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    stored["model.layers.0.self_attn.v_scale"] = torch.ones(1)
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    described = compressed_config("float-quantized", group_args(8, "float", strategy), kv_cache_scheme=cache)
    result = check(save_quantized(tmp_path / "ckpt", config, stored, described), tmp_path / "engine", config, dense)
    assert any("8-bit float kv_cache_scheme (2 scales) is not used" in note for note in result.notes)


def test_audit_passes_on_quantized_checkpoints(tmp_path: Path) -> None:
    """The same check that every conversion runs, on act-order codes and on W8A8."""
    config, state = base_model(30)
    stored, _ = quantized_state(
        state, linears_only(lambda module, weight: integers(weight, 4, 32, order_seed=6)), lambda module, q: gptq_parts(q)
    )
    source = save_quantized(tmp_path / "gptq", config, stored, gptq_config(4, 32, True, "gptq", desc_act=True))
    assert "audit passed" in convert(source, tmp_path / "a").manifest.audit["summary"]
    stored, _ = quantized_state(state, linears_only(lambda module, weight: integers(weight, 8, -1)), lambda module, q: int8_parts(q))
    source = save_quantized(
        tmp_path / "w8a8", config, stored, compressed_config("int-quantized", group_args(8, strategy="channel"), TOKENS)
    )
    audit = convert(source, tmp_path / "b").manifest.audit
    assert "audit passed" in audit["summary"] and audit["logits"]["allowed"] == 1e-3


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    config, state = base_model(31)
    stored, _ = quantized_state(state, linears_only(lambda module, weight: integers(weight)), lambda module, q: gptq_parts(q))
    source = save_quantized(tmp_path / "ckpt", config, stored, gptq_config(4, 32, True, "gptq"))
    with pytest.raises(InputError, match=r"already quantized \(gptq: w4a16 group 32\)"):
        quantize(source, tmp_path / "engine", "w4a16")


@pytest.mark.parametrize(
    ("quantization", "leaf", "words"),
    [
        (gptq_config(4, 32, True, "marlin"), "qweight", "packed for the kernel 'marlin'"),
        (gptq_config(4, 32, True, "bitblas"), "qweight", "packed for the kernel 'bitblas'"),
    ],
)
def test_kernel_layouts_are_refused_by_name(tmp_path: Path, quantization: dict[str, Any], leaf: str, words: str) -> None:
    config, state = base_model(32)
    stored, _ = quantized_state(state, linears_only(lambda module, weight: integers(weight)), lambda module, q: gptq_parts(q))
    with pytest.raises(UnsupportedError, match=words):
        run(save_quantized(tmp_path / "ckpt", config, stored, quantization), tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_a_quantized_head_of_a_model_that_says_tied_is_used(tmp_path: Path) -> None:
    """The head was untied to be quantized, the flag was forgotten: a loader that follows it has a head of its own making."""
    config, state = base_model(33)

    def recipe(module: str, weight: torch.Tensor) -> Integers | None:
        return integers(weight) if module == "lm_head" else None

    stored, dense = quantized_state(state, recipe, lambda module, q: gptq_parts(q))
    described = gptq_config(4, 32, True, "gptq", lm_head=True)
    source = save_quantized(tmp_path / "ckpt", {**config, "tie_word_embeddings": True}, stored, described)
    result = check(source, tmp_path / "engine", config, dense)
    assert result.manifest.model.tie_word_embeddings is False
    assert list(result.manifest.quant.modules) == ["lm_head"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_runs_of_every_storage(tmp_path: Path, dtype: str) -> None:
    """Integers with order, FP8 blocks and W8A8 in one model: nothing depends on float32."""
    config, state = base_model(34)
    stored, _ = quantized_state(
        state,
        linears_only(lambda module, weight: integers(weight, 4, 32, False, order_seed=2)),
        lambda module, q: compressed_parts(q, True, with_g_idx=True),
    )
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.up_proj"
        stored = {key: part for key, part in stored.items() if not key.startswith(name)}
        codes, scales, _ = fp8_weight(state[f"{name}.weight"], (128, 128))
        stored |= {f"{name}.weight": codes, f"{name}.weight_scale": scales}
        name = f"model.layers.{layer}.mlp.down_proj"
        stored = {key: part for key, part in stored.items() if not key.startswith(name)}
        stored |= {f"{name}.{leaf}": part for leaf, part in int8_parts(integers(state[f"{name}.weight"], 8, -1)).items()}
    groups = {
        "group_0": {"targets": ["Linear"], "weights": group_args(4, group_size=32, symmetric=False)},
        "group_1": {"targets": ["re:.*up_proj"], "weights": group_args(8, "float", "block", block_structure=[128, 128])},
        "group_2": {"targets": ["re:.*down_proj"], "weights": group_args(8, strategy="channel"), "input_activations": TOKENS},
    }
    described = compressed_config("mixed-precision", {}) | {"config_groups": groups}
    result = run(save_quantized(tmp_path / "ckpt", config, stored, described), tmp_path / "engine")
    storages = {scheme.storage for scheme in result.manifest.quant.modules.values()}
    assert storages == {"wna16", "fp8", "int8"}
    want = engine_logits(tmp_path / "engine")
    got = logits_for(load_model(tmp_path / "engine", dtype=dtype), PROMPT).float()
    assert relative_error(got, want) < 0.1
    assert (got - want).norm() / want.norm() < 0.05
