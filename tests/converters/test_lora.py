"""Merged adapters against PEFT's own logits, and every way in which an adapter must be refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from case_checkpoints import llama_config, llama_state, save_checkpoint, token_ids
from engine_logits import by_transformers, relative_error
from lora_cases import CASES, LoraCase, edit_config, make_adapter, make_case, peft_logits, rename_keys
from safetensors.torch import load_file, save_file
from tiny_models import build_tokenizer, make_tiny_checkpoint, save_tokenizer

from dspark.converters.pipeline import Result, convert
from dspark.runtime.spec.errors import InputError, UnsupportedError

CLOSE = 1e-4
FAR = 100 * CLOSE
TOKENS = list(range(3, 300, 5))
PREFIX = "base_model.model.model."


def merged(base: Path, engine: Path, *adapters: Path | tuple[Path, float], **options: Any) -> Result:
    pairs = [adapter if isinstance(adapter, tuple) else (adapter, 1.0) for adapter in adapters]
    return convert(base, engine, audit=False, adapters=pairs, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Base and adapter; tests that change them copy them first."""
    return make_case(tmp_path_factory.mktemp("plain"), CASES["plain"])


@pytest.fixture
def adapter(plain: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the plain adapter to be damaged."""
    return Path(shutil.copytree(plain[1], tmp_path / "adapter"))


@pytest.mark.parametrize("name", list(CASES))
def test_merged_logits_are_those_of_peft(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    base, adapter = make_case(tmp_path, case)
    result = merged(base, tmp_path / "engine", adapter)
    tokens = [token for token in TOKENS if token < (case.rows or 320)] + list(range(320, case.rows or 320))
    got, want = by_transformers(tmp_path / "engine", tokens), peft_logits(base, [(adapter, 1.0)], tokens, case.rows)
    assert relative_error(got, want) < CLOSE
    assert result.manifest.model.tie_word_embeddings is case.tied
    assert result.manifest.model.vocab_size == (case.rows or 320)
    merged(base, tmp_path / "bare")
    without = by_transformers(tmp_path / "bare", [token for token in tokens if token < 320])
    width = min(320, case.rows or 320)
    assert relative_error(without[:, :width], want[: len(without), :width]) > FAR, "the adapter changes nothing: the test is empty"


# --------------------------------------------------------------------------- reported cases, on the base that their reports used


@pytest.fixture(scope="module")
def wide_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = llama_config()
    return save_checkpoint(tmp_path_factory.mktemp("wide") / "base", config, llama_state(config, 14))


def test_the_scale_of_rank_stabilised_adapters_is_alpha_over_root_r(tmp_path: Path, wide_base: Path) -> None:
    """B14: alpha / r loads without a word and is sqrt(r) too weak: here 0.5 instead of 2."""
    adapter = make_adapter(tmp_path / "adapter", wide_base, r=16, lora_alpha=8, use_rslora=True)
    merged(wide_base, tmp_path / "engine", adapter)
    got, want = by_transformers(tmp_path / "engine", token_ids()), peft_logits(wide_base, [(adapter, 1.0)], token_ids())
    weak = peft_logits(wide_base, [(edit_config(adapter, use_rslora=False), 1.0)], token_ids())
    assert relative_error(got, want) < CLOSE and relative_error(got, weak) > FAR


def test_dora_magnitudes_are_folded_into_the_rows(tmp_path: Path, wide_base: Path) -> None:
    """B15: a merge of A and B alone loses the magnitudes; with them missing from the file it is refused."""
    adapter = make_adapter(tmp_path / "adapter", wide_base, use_dora=True)
    merged(wide_base, tmp_path / "engine", adapter)
    assert relative_error(by_transformers(tmp_path / "engine", token_ids()), peft_logits(wide_base, [(adapter, 1.0)], token_ids())) < CLOSE
    rename_keys(adapter, lambda key: None if "magnitude" in key else key)
    with pytest.raises(InputError, match=r"layers\.0\.self_attn\.q_proj has no lora_magnitude_vector, but use_dora is set"):
        merged(wide_base, tmp_path / "other", adapter)


def test_keys_that_match_nothing_are_one_error_that_lists_them(tmp_path: Path, wide_base: Path) -> None:
    """B16: a non-strict load merges nothing, or half, and calls it done."""
    adapter = make_adapter(tmp_path / "adapter", wide_base)
    other_config = llama_config(hidden_size=192, head_dim=48)
    other_base = save_checkpoint(tmp_path / "other-base", other_config, llama_state(other_config, 77))
    prefix = rename_keys(Path(shutil.copytree(adapter, tmp_path / "prefix")), lambda key: key.replace(PREFIX, "base_model.model."))
    half = rename_keys(Path(shutil.copytree(adapter, tmp_path / "half")), lambda key: key.replace("layers.1.", "layers.9."))
    for base, broken, words in (
        (wide_base, prefix, r"no such layer in the base: base_model\.model\.layers\.0\.mlp\.down_proj\.lora_A\.weight, .* and 4 more"),
        (wide_base, half, r"no such layer in the base: base_model\.model\.model\.layers\.9\."),
        (other_base, adapter, r"q_proj\.lora_A\.weight has \[8, 128\], needed \[8, 192\]"),
    ):
        with pytest.raises(InputError, match=words):
            merged(base, tmp_path / "engine", broken)
        assert not list(tmp_path.glob("*engine*"))


# --------------------------------------------------------------------------- several adapters, weights, files


def test_adapters_are_summed_with_their_weights(plain: tuple[Path, Path], tmp_path: Path) -> None:
    base, first = plain
    second = make_adapter(tmp_path / "second", base, seed=5, r=4, target_modules=["q_proj", "o_proj"])
    pairs = [(first, 0.5), (second, -1.25)]
    merged(base, tmp_path / "engine", *pairs)
    assert relative_error(by_transformers(tmp_path / "engine", TOKENS), peft_logits(base, pairs, TOKENS)) < CLOSE


def test_several_dora_adapters_rescale_what_they_find(plain: tuple[Path, Path], tmp_path: Path) -> None:
    """As in PEFT: the norms are those of the base with the adapter's own matrices, what is scaled is the sum so far."""
    base, first = plain
    second = make_adapter(tmp_path / "second", base, seed=5, use_dora=True)
    third = make_adapter(tmp_path / "third", base, seed=6, use_dora=True)
    pairs = [(second, 1.0), (first, 1.0), (third, 1.0)]
    merged(base, tmp_path / "engine", *pairs)
    assert relative_error(by_transformers(tmp_path / "engine", TOKENS), peft_logits(base, pairs, TOKENS)) < CLOSE


def test_weight_scales_the_whole_change(tmp_path: Path) -> None:
    """Saved copies, trained tokens, biases and magnitudes too: 0 is the base, 1 the adapter, 0.5 lies in the middle."""
    base = make_tiny_checkpoint(tmp_path / "base", "llama-bias")
    adapter = make_adapter(tmp_path / "adapter", base, use_dora=True, bias="all", modules_to_save=["norm", "lm_head"])
    states = {}
    for weight in (0.0, 0.5, 1.0):
        merged(base, tmp_path / f"engine{weight}", (adapter, weight))
        states[weight] = load_file(next((tmp_path / f"engine{weight}").glob("weights-*")))
    bare = load_file(base / "model.safetensors")
    for name, tensor in bare.items():
        torch.testing.assert_close(states[0.0][name], tensor)
        torch.testing.assert_close(states[0.5][name], (tensor + states[1.0][name]) / 2)


def test_merging_is_done_in_float32_and_rounded_once(tmp_path: Path) -> None:
    """In bfloat16 a small change is lost in the addition before it is rounded."""
    base = make_tiny_checkpoint(tmp_path / "base", "llama", dtype="bfloat16")
    adapter = make_adapter(tmp_path / "adapter", base)
    result = merged(base, tmp_path / "engine", adapter)
    name = "model.layers.0.self_attn.q_proj"
    parts = load_file(adapter / "adapter_model.safetensors")
    a, b = (parts[f"base_model.model.{name}.lora_{letter}.weight"].double() for letter in "AB")
    want = load_file(base / "model.safetensors")[f"{name}.weight"].double() + 2.0 * b @ a
    got = load_file(next((tmp_path / "engine").glob("weights-*")))[f"{name}.weight"]
    assert result.manifest.model.dtype == "bfloat16" and got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want.float().bfloat16(), rtol=2**-8, atol=0)
    assert float((got != want.float().bfloat16()).float().mean()) < 1e-3


def test_pickled_adapters_are_read_and_nothing_in_them_is_run(plain: tuple[Path, Path], adapter: Path, tmp_path: Path) -> None:
    state = load_file(adapter / "adapter_model.safetensors")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(state, adapter / "adapter_model.bin")
    merged(plain[0], tmp_path / "engine", adapter)
    assert relative_error(by_transformers(tmp_path / "engine", TOKENS), peft_logits(plain[0], [(plain[1], 1.0)], TOKENS)) < CLOSE

    class Canary:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.mkdir, (tmp_path / "canary",))

    torch.save({**state, "extra": Canary()}, adapter / "adapter_model.bin")
    with pytest.raises(UnsupportedError):
        merged(plain[0], tmp_path / "other", adapter)
    assert not (tmp_path / "canary").exists() and not (tmp_path / "other").exists()


def test_new_tokens_come_with_the_tokenizer_of_the_adapter_and_pass_the_audit(tmp_path: Path) -> None:
    base = make_tiny_checkpoint(tmp_path / "base", "qwen2-tied")
    adapter = make_adapter(tmp_path / "adapter", base, rows=324)
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(["<|tool|>", "<|call|>"])
    tokenizer.add_tokens(["zyxxy", "qwvbn"])
    save_tokenizer(adapter, tokenizer, "{{ messages[0]['content'] }} zyxxy", unk_token=None)
    result = convert(base, tmp_path / "engine", adapters=[(adapter, 1.0)])
    assert result.manifest.audit["summary"].startswith("audit passed")
    assert result.manifest.model.vocab_size == 324
    assert (
        "zyxxy" in (tmp_path / "engine" / "chat_template.jinja").read_text()
        and "zyxxy" in (tmp_path / "engine" / "tokenizer.json").read_text()
    )
    assert any("from 320 to 324" in note for note in result.notes) and any("tokenizer" in note for note in result.notes)


def test_lineage_names_every_adapter_with_hashes_and_weight(plain: tuple[Path, Path], adapter: Path, tmp_path: Path) -> None:
    result = merged(plain[0], tmp_path / "engine", plain[1], (adapter, 0.25))
    first, second = result.manifest.lineage["adapters"]
    assert (first["weight"], second["weight"]) == (1.0, 0.25) and second["source"] == "adapter"
    assert set(first["files"]) == {"adapter_config.json", "adapter_model.safetensors"}
    assert all(len(entry["xxh3"]) == 32 and entry["bytes"] > 0 for entry in first["files"].values())
    assert result.manifest.lineage["source"] == "base" and "model.safetensors" in result.manifest.lineage["files"]


def test_another_base_model_is_a_note(plain: tuple[Path, Path], adapter: Path, tmp_path: Path) -> None:
    assert not [note for note in merged(plain[0], tmp_path / "engine", plain[1]).notes if "base model" in note]
    edit_config(adapter, base_model_name_or_path="someone/Other-1B")
    (note,) = [note for note in merged(plain[0], tmp_path / "engine2", adapter).notes if "base model" in note]
    assert "someone/Other-1B" in note and "'base'" in note


def test_adapters_merge_into_an_engine_too(plain: tuple[Path, Path], tmp_path: Path) -> None:
    convert(plain[0], tmp_path / "dense", audit=False)
    result = merged(tmp_path / "dense", tmp_path / "engine", plain[1])
    assert relative_error(by_transformers(tmp_path / "engine", TOKENS), peft_logits(plain[0], [(plain[1], 1.0)], TOKENS)) < CLOSE
    assert result.manifest.lineage["made_of"]["source"] == "base" and not [note for note in result.notes if "base model" in note]


def test_a_family_that_ties_by_default_is_tied_without_the_key(tmp_path: Path) -> None:
    """Gemma's published configs do not have it; an adapter on the embedding alone must leave the head as it was."""
    base = make_tiny_checkpoint(tmp_path / "base", "gemma2")
    config = json.loads((base / "config.json").read_text())
    assert config.pop("tie_word_embeddings", True)
    (base / "config.json").write_text(json.dumps(config))
    adapter = make_adapter(tmp_path / "adapter", base, target_modules=["embed_tokens"])
    result = merged(base, tmp_path / "engine", adapter)
    assert result.manifest.model.tie_word_embeddings is False
    assert relative_error(by_transformers(tmp_path / "engine", TOKENS), peft_logits(base, [(adapter, 1.0)], TOKENS)) < CLOSE


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "PEFT type 'IA3'.*supported: LORA"),
        ({"peft_type": "PREFIX_TUNING"}, "PREFIX_TUNING"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"peft_type": "ADALORA"}, "ADALORA"),
        ({"peft_type": None}, "PEFT type None"),
        ({"alora_invocation_tokens": [1, 2]}, "activated LoRA"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4', which changes the base model too"),
        ({"r": 0}, "r 0, allowed: a positive integer"),
        ({"lora_alpha": None}, "lora_alpha None"),
        ({"rank_pattern": {"q_proj(": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern"),
        ({"bias": "some"}, "bias 'some', allowed: none, all, lora_only"),
        ({"trainable_token_indices": [-1]}, "trainable_token_indices"),
        ({"r": 4}, r"lora_A\.weight has \[8, 64\], needed \[4, 64\]"),
        ({"use_dora": True}, "no lora_magnitude_vector"),
    ],
)
def test_unmergeable_is_named(plain: tuple[Path, Path], adapter: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    edit_config(adapter, **changes)
    with pytest.raises(InputError, match=words):
        merged(plain[0], tmp_path / "engine", adapter)
    assert not list(tmp_path.glob("*engine*"))


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        (lambda key: None if key.endswith("layers.0.self_attn.q_proj.lora_B.weight") else key, r"q_proj\.lora_A\.weight has no lora_B"),
        (lambda key: key.replace("lora_A", "lora_E"), r"no such layer in the base: .*lora_E"),
        (lambda key: key.replace("q_proj.lora_B.weight", "q_proj.lora_B.bias"), r"no such layer in the base: .*lora_B\.bias"),
        (lambda key: None, "holds no tensors"),
    ],
)
def test_halves_and_strangers_are_named(plain: tuple[Path, Path], adapter: Path, tmp_path: Path, rename: Any, words: str) -> None:
    rename_keys(adapter, rename)
    with pytest.raises(InputError, match=words):
        merged(plain[0], tmp_path / "engine", adapter)


def test_damaged_adapters_are_refused(plain: tuple[Path, Path], adapter: Path, tmp_path: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    state = load_file(path)
    key = f"{PREFIX}layers.0.self_attn.q_proj.lora_B.weight"
    save_file({**state, key: torch.full_like(state[key], torch.nan)}, path)
    with pytest.raises(InputError, match=r"q_proj\.lora_B\.weight has values that are not finite"):
        merged(plain[0], tmp_path / "engine", adapter)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match="damaged or not complete"):
        merged(plain[0], tmp_path / "engine", adapter)
    path.unlink()
    with pytest.raises(InputError, match=r"has no adapter_model\.safetensors or adapter_model\.bin"):
        merged(plain[0], tmp_path / "engine", adapter)
    assert not list(tmp_path.glob("*engine*"))


def test_an_embedding_without_its_head_is_refused(tmp_path: Path) -> None:
    """An untied model needs rows for the new tokens on both sides."""
    base, adapter = make_case(tmp_path, LoraCase(rows=324))
    rename_keys(adapter, lambda key: None if "lm_head" in key else key)
    with pytest.raises(InputError, match=r"324 rows of model\.embed_tokens, 320 rows of lm_head"):
        merged(base, tmp_path / "engine", adapter)


def test_two_adapters_with_new_tokens_are_refused(tmp_path: Path) -> None:
    base, adapter = make_case(tmp_path, LoraCase(rows=324))
    with pytest.raises(InputError, match="both change the number of tokens"):
        merged(base, tmp_path / "engine", adapter, make_adapter(tmp_path / "second", base, rows=330))


def test_config_and_keys_may_not_disagree_on_trained_tokens(tmp_path: Path) -> None:
    base, adapter = make_case(tmp_path, CASES["trained-tokens"])
    edit_config(adapter, trainable_token_indices=[5, 9])
    with pytest.raises(InputError, match=r"trainable_tokens_delta has \[3, 64\], needed \[2, 64\]"):
        merged(base, tmp_path / "engine", adapter)
    edit_config(adapter, trainable_token_indices=[5, 9, 400])
    with pytest.raises(InputError, match="trains token 400, the base has 320"):
        merged(base, tmp_path / "engine", adapter)


# --------------------------------------------------------------------------- commands


def typed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    from dspark_cli.app import run

    capsys.readouterr()
    code = run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_convert_takes_several_adapters(
    plain: tuple[Path, Path], adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, first = plain
    code, _, err = typed(capsys, "convert", base, tmp_path / "engine", "--lora", first, "--lora", f"{adapter}=-0.5")
    assert code == 0 and "audit passed" in err.splitlines()[-1]
    want = peft_logits(base, [(first, 0.5)], TOKENS)
    assert relative_error(by_transformers(tmp_path / "engine", TOKENS), want) < CLOSE
    code, out, _ = typed(capsys, "inspect", tmp_path / "engine")
    assert code == 0 and [line.split(",")[0].split() for line in out.splitlines() if line.startswith("adapter")] == [
        ["adapter", "adapter", "x1"],
        ["adapter", "adapter", "x-0.5"],
    ]


def test_inspect_describes_an_adapter(plain: tuple[Path, Path], adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = typed(capsys, "inspect", plain[1], "--json")
    facts = json.loads(out)
    assert code == 0 and facts["format"] == "LoRA adapter" and facts["peft_type"] == "LORA" and facts["variant"] == "plain"
    assert (facts["rank"], facts["alpha"], facts["scale"]) == (8, 16, 2) and facts["targets"] == ["down_proj", "q_proj", "v_proj"]
    assert facts["layers_adapted"] == 6 and facts["base_model"] == str(plain[0]) and facts["file_bytes"] > 4 * facts["parameters"]
    edit_config(adapter, peft_type="IA3")
    code, out, _ = typed(capsys, "inspect", adapter)
    assert code == 0 and "IA3" in out and "not supported" in out
    made = make_case(tmp_path / "rich", CASES["tied-trained-new-tokens"])[1]
    code, out, _ = typed(capsys, "inspect", made, "--json")
    assert json.loads(out)["vocabulary"] == 324 and json.loads(out)["trained_tokens"] == 10
