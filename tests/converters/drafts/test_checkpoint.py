"""Draft checkpoints of every packaging are read for what they are, and refused with every fault at once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_checkpoints import EAGLE_KINDS, HIDDEN, KINDS, MASK, TARGET_LAYERS, make_draft
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE

from dspark.converters.drafts.checkpoint import read_draft
from dspark.converters.drafts.store import store_draft
from dspark.runtime.spec.errors import InputError, UnsupportedError
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.speculation.heads.config import DraftConfig
from dspark.runtime.speculation.heads.stored import DRAFT_NAME, WEIGHTS_NAME, DraftWeights, load_stored

TARGET = ModelConfig("llama", VOCAB_SIZE, HIDDEN, 160, TARGET_LAYERS, 4, 2, 16, 1e-6, 256, dtype="float32")


def refused(path: Path, target: ModelConfig = TARGET) -> str:
    with pytest.raises(InputError) as caught:
        read_draft(path, target)
    return caught.value.message


def change_tensors(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = {**load_file(path / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / "model.safetensors")


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_packaging_is_read_for_what_it_is(kind: str, tmp_path: Path) -> None:
    """Layers are numbered in three ways, the row layout follows from the packaging, and architecture names say neither."""
    made = make_draft(tmp_path / "draft", kind)
    truth, draft = made.truth, read_draft(tmp_path / "draft", TARGET)
    config = draft.config
    assert config.method == truth.method
    assert config.taps == tuple(state - 1 for state in truth.states)
    model = config.model
    geometry = (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim, model.intermediate_size)
    assert geometry == (truth.layers, truth.heads, truth.kv_heads, truth.head_dim, truth.inner)
    assert (model.vocab_size, config.draft_vocab_size) == (VOCAB_SIZE, truth.vocab)
    assert (config.own_embedding, config.own_head, model.qk_norm) == (truth.own_embedding, truth.own_head, truth.qk_norm)
    norms = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert all(getattr(config, name) == getattr(truth, name) for name in norms)
    if truth.method != "eagle3":
        assert (config.block_size, config.mask_token_id) == (truth.block, MASK)
        assert config.sample_from_anchor == truth.anchor_first
        assert (config.markov, config.confidence) == (truth.markov, truth.confidence)
    for name, tensor in made.tensors.items():
        assert torch.equal(draft.read(name), tensor)
    assert DraftConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("kind", ["deepspec-vanilla", "eagle3-original"])
def test_a_stored_draft_comes_back(kind: str, tmp_path: Path) -> None:
    made = make_draft(tmp_path / "draft", kind)
    draft = read_draft(tmp_path / "draft", TARGET)
    (tmp_path / "stored").mkdir()
    store_draft(draft, tmp_path / "stored", "float32")
    stored = load_stored(tmp_path / "stored")
    assert stored.config == draft.config
    weights = DraftWeights(tmp_path / "stored", stored, torch.float32, "cpu")
    for name, tensor in made.tensors.items():
        assert torch.equal(weights.take(name), tensor)
    weights.check_all_taken()


def test_what_the_target_holds_too_is_left_out(tmp_path: Path) -> None:
    """Frozen copies of the target's embedding and head are most of a draft's bytes."""
    make_draft(tmp_path / "draft", "deepspec-vanilla")
    (tmp_path / "stored").mkdir()
    stored = store_draft(read_draft(tmp_path / "draft", TARGET), tmp_path / "stored", "float32", lambda name: name == "lm_head.weight")
    assert (stored.config.own_embedding, stored.config.own_head) == (True, False)
    assert "lm_head.weight" not in stored.tensors


def test_a_damaged_stored_draft_is_refused(tmp_path: Path) -> None:
    make_draft(tmp_path / "draft", "deepspec-vanilla")
    stored_at = tmp_path / "stored"
    stored_at.mkdir()
    store_draft(read_draft(tmp_path / "draft", TARGET), stored_at, "float32")
    stored, data = load_stored(stored_at), bytearray((stored_at / WEIGHTS_NAME).read_bytes())
    data[-1] ^= 1
    (stored_at / WEIGHTS_NAME).write_bytes(data)
    weights = DraftWeights(stored_at, stored, torch.float32, "cpu")
    with pytest.raises(InputError, match="not what was written"):
        [weights.take(name) for name in stored.tensors]
    (stored_at / DRAFT_NAME).write_text(json.dumps({**stored.to_json(), "schema_version": "2.0"}))
    with pytest.raises(InputError, match=r"schema 2\.0"):
        load_stored(stored_at)


def test_all_faults_stand_in_one_message(tmp_path: Path) -> None:
    """Whoever mends one must not meet the next one at the next try."""
    made = make_draft(tmp_path, "deepspec-vanilla", config_changes={"mask_token_id": None, "markov_head_type": "cubic"})
    change_tensors(
        tmp_path, {"fc.weight": made.tensors["fc.weight"][:, :-1].contiguous(), "norm.weight": None, "norm2.weight": torch.ones(2)}
    )
    message = refused(tmp_path, replace(TARGET, num_layers=7, vocab_size=300, hidden_size=32))
    for fault in (
        "mask_token_id is missing",
        "markov_head_type is 'cubic'",
        "made for a target of 8 layers, this one has 7",
        "target layers 6 are not among -1 to 5",
        "fc.weight is [64, 191], wanted [64, 96]",
        "its vocabulary has 320 tokens, the target's 300",
        "tensors missing: norm.weight",
        "tensors that no part of it reads: norm2.weight",
    ):
        assert fault in message


@pytest.mark.parametrize(
    ("kind", "changes", "fault"),
    [
        ("deepspec-vanilla", {"markov_rank": 0}, "confidence_head_with_markov is true with markov_rank 0"),
        ("deepspec-vanilla", {"target_layer_ids": [1, 3, 7]}, "output of the last layer, 7, is never a feature"),
        ("deepspec-vanilla", {"target_layer_ids": [1, 6, 3]}, "not in ascending order"),
        ("deepspec-vanilla", {"target_layer_ids": [1, 3]}, "fc.weight is [64, 192], wanted [64, 128]"),
        ("deepspec-vanilla", {"block_size": 0}, "block_size is 0, allowed: an integer from 1"),
        ("deepspec-vanilla", {"block_size": None}, "block_size is missing"),
        ("deepspec-vanilla", {"mask_token_id": 320}, "mask_token_id 320 is not below"),
        ("deepspec-vanilla", {"markov_head_type": "gated"}, "tensors missing: markov_head.gate_proj.weight"),
        ("deepspec-vanilla", {"is_causal": True}, "is_causal is true"),
        ("deepspec-vanilla", {"model_type": "qwen2"}, "model_type 'qwen2' are not supported"),
        ("deepspec-vanilla", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
        (
            "deepspec-vanilla",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            "layers with a sliding window are not supported",
        ),
        ("deepspec-dflash", {"markov_rank": 8}, "tensors missing: markov_head.markov_w1.weight"),
        ("deepspec-dflash", {"enable_confidence_head": True}, "tensors missing: confidence_head.proj.weight"),
        ("zlab-dflash", {"dflash_config": {"target_layer_ids": [-1, 2, 5]}}, "mask_token_id is missing"),
        (
            "zlab-dflash",
            {"dflash_config": {"mask_token_id": 3, "depth_gate": 1}},
            "dflash_config has options that are not supported: depth_gate",
        ),
        ("zlab-dflash", {"shift_label": True, "sample_from_anchor": False}, "allowed: the same for both"),
        ("zlab-dflash", {"block_size": 1}, "such a block proposes nothing"),
        ("specforge-dspark", {"draft_vocab_size": None}, "wanted [320, 8]"),
        ("speculators-dspark", {"draft_adapter_rank": 4}, "not supported: draft_adapter_rank"),
        ("speculators-dspark", {"aux_hidden_state_layer_ids": [2, 4, 8]}, "output of the last layer, 7, is never a feature"),
        ("speculators-dflash", {"aux_hidden_state_layer_ids": None}, "no list of target layers"),
        ("eagle3-speculators", {"norm_before_residual": None}, "norm_before_residual is missing"),
        ("eagle3-original", {"num_hidden_layers": 2}, "EAGLE-3 draft of 2 layers is not supported"),
        ("eagle3-original", {"parallel_drafting": True}, "parallel_drafting is True"),
        ("eagle3-original", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ("eagle3-original", {"eagle_config": {"second_norm": True}}, "not supported: second_norm"),
        ("eagle3-original", {"norm_before_fc": True}, "tensors missing: input_norm.weight"),
        ("eagle3-specforge", {"norm_before_fc": True}, "norm_before_fc and fc_norm are both true"),
        ("eagle3-specforge", {"fc_norm": False}, "tensors that no part of it reads: fc_norm.0.weight"),
        ("eagle3-deepspec", {"ttt_length": "long"}, "ttt_length is 'long'"),
    ],
)
def test_a_wrong_combination_is_refused_by_name(kind: str, changes: dict[str, Any], fault: str, tmp_path: Path) -> None:
    """A draft with one of these would load elsewhere and be accepted a little less, or never, without a word."""
    make_draft(tmp_path, kind, config_changes=changes)
    assert fault in refused(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "what"),
    [
        ("deepspec-vanilla", {"dspark_block_size": 5}, "DeepSeek-V4"),
        ("deepspec-vanilla", {"model_type": "gemma4_text"}, "Gemma layers"),
        ("zlab-dflash", {"dflash_config": {"projector_type": "domino"}}, "Domino or DFlash2"),
        ("speculators-dflash", {"projector_type": "domino"}, "Domino or DFlash2"),
        ("eagle3-speculators", {"speculators_model_type": "peagle"}, "vLLM speculators of another kind"),
    ],
)
def test_what_is_not_supported_is_named(kind: str, changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    make_draft(tmp_path, kind, config_changes=changes)
    with pytest.raises(UnsupportedError, match=what) as caught:
        read_draft(tmp_path, TARGET)
    assert "EAGLE-3 drafts of DeepSpec" in caught.value.hint


def test_a_model_is_no_draft(tmp_path: Path) -> None:
    make_draft(tmp_path, "deepspec-vanilla")
    save_file({"model.embed_tokens.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="holds no drafting head"):
        read_draft(tmp_path, TARGET)


@pytest.mark.parametrize(
    ("table", "fault"), [([-1, 0], "names target tokens -1 to"), ([400], "names target tokens"), ([5, 4], "names a target token twice")]
)
def test_a_bad_table_of_tokens_is_refused(table: list[int], fault: str, tmp_path: Path) -> None:
    """A draft token mapped to the wrong target token is never accepted, and none outside the vocabulary may come up."""
    made = make_draft(tmp_path, "eagle3-original")
    offsets = made.tensors["d2t"].clone()
    offsets[: len(table)] = torch.tensor(table)
    change_tensors(tmp_path, {"d2t": offsets})
    assert fault in refused(tmp_path)


def test_a_table_that_renames_nothing_is_no_fault(tmp_path: Path) -> None:
    """SpecForge writes one for full vocabularies too."""
    make_draft(tmp_path, "eagle3-deepspec")
    change_tensors(tmp_path, {"d2t": torch.zeros(VOCAB_SIZE, dtype=torch.int64), "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool)})
    assert not read_draft(tmp_path, TARGET).config.has_own_vocabulary
    change_tensors(tmp_path, {"d2t": torch.ones(VOCAB_SIZE, dtype=torch.int64)})
    assert "d2t renames tokens" in refused(tmp_path)


@pytest.mark.parametrize(("key", "shift"), [("eagle_aux_hidden_state_layer_ids", 1), ("eagle_config", 0)])
def test_layers_beside_the_ordinary_keys_are_inputs_and_those_in_eagle_config_outputs(key: str, shift: int, tmp_path: Path) -> None:
    """The same number means two layers to two engines; SpecForge, which writes the table, counts outputs."""
    ids: Any = [2, 4, 6] if shift else {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}
    make_draft(tmp_path, "eagle3-original", config_changes={key: ids})
    assert read_draft(tmp_path, TARGET).config.taps == tuple(layer - shift for layer in (2, 4, 6))


def test_zlab_spreads_layers_where_none_are_listed(tmp_path: Path) -> None:
    """Its first checkpoints have no list: 36 layers and 5 draft layers gave 1, 9, 17, 25, 33."""
    from dspark.converters.drafts.block import spread_taps

    assert spread_taps(36, 5) == [1, 9, 17, 25, 33]
    assert spread_taps(40, 5) == [1, 10, 19, 28, 37]
    assert spread_taps(8, 1) == [4]
    make_draft(tmp_path, "zlab-dflash", config_changes={"dflash_config": {"mask_token_id": MASK}}, states=(2, 6))
    assert read_draft(tmp_path, TARGET).config.taps == (1, 5)


def test_defaults_that_speculators_leaves_out_are_those_of_its_classes(tmp_path: Path) -> None:
    """It saves the layers' config as the difference from the class: an absent hidden_size is 4096, not a fault."""
    import transformers

    from dspark.converters.drafts.layers import CLASS_DEFAULTS

    for kind, stem in (("llama", "Llama"), ("qwen3", "Qwen3")):
        config = getattr(transformers, f"{stem}Config")()
        assert CLASS_DEFAULTS[kind] == {key: getattr(config, key) for key in CLASS_DEFAULTS[kind]}
    layers = {"model_type": "llama", "num_hidden_layers": 1}
    make_draft(tmp_path, "eagle3-speculators", config_changes={"transformer_layer_config": layers})
    assert "its vocabulary has 32000 tokens" in refused(tmp_path)


def test_every_eagle_kind_has_one_layer() -> None:
    assert len(EAGLE_KINDS) == 4
