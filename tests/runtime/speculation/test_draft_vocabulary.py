"""Ids of a draft model are the target's, are mapped by equal token strings, or the draft is refused with figures."""

import json
from pathlib import Path

import pytest
import torch
from engine_runs import texts, tiny_engine
from safetensors.torch import load_file, save_file
from speculation_lines import requests
from tiny_models import make_tiny_checkpoint

from dspark.converters.pipeline import convert
from dspark.runtime.engine import Engine
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import InputError
from dspark.runtime.speculation.draft_vocabulary import MAPPED_NAME, DraftVocabulary, match_vocabularies


def test_strings_are_compared_and_the_first_difference_is_named() -> None:
    """Sizes are equal in both cases, and equal sizes say nothing."""
    target = {"<s>": 0, "a": 1, "b": 2, "c": 3}
    assert match_vocabularies(target, dict(target)).is_same
    swapped = match_vocabularies(target, {"<s>": 0, "b": 1, "a": 2, "c": 3})
    assert not swapped.is_same and swapped.pairs == ((0, 0), (1, 2), (2, 1), (3, 3)) and swapped.fault(is_mapped=True) is None
    assert swapped.fault(is_mapped=False) == "its vocabulary is another one: id 1 is 'a' in the target and 'b' in the draft"
    assert "id 1 is 'a' in the target and 'b' in the draft" in swapped.describe()


def test_too_small_a_share_is_refused_with_figures() -> None:
    match = match_vocabularies({str(i): i for i in range(100)}, {str(i): i for i in range(60, 200)})
    shares = "its vocabulary has 40 of the target's 100 tokens (40.0%), at least 50% are needed"
    wanted = f"{shares}: id 0 is '0' in the target and no token in the draft"
    assert match.fault(is_mapped=True) == match.fault(is_mapped=False) == wanted


def test_logits_move_to_the_targets_ids_and_a_token_without_equal_ends_the_draft() -> None:
    vocabulary = DraftVocabulary(4, torch.tensor([1, 0, 0, 2]), torch.tensor([1, 0, 3, -1]))
    wide = vocabulary.widen(torch.tensor([[1.0, 2.0, 3.0, 0.0], [1.0, 2.0, 3.0, 9.0]]))
    assert wide[0].tolist() == [2.0, 1.0, -torch.inf, 3.0]
    assert wide[1].isinf().all()
    assert vocabulary.feed(torch.tensor([0, 3])).tolist() == [1, 2]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("target"))


def altered(directory: Path, swap: bool = False, rename: int = 0, pad: int = 0) -> Path:
    """The target's own model with two ids swapped, `rename` tokens called something else, `pad` rows of embedding more."""
    checkpoint = make_tiny_checkpoint(directory / "checkpoint", "llama")
    weights = load_file(checkpoint / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = weights[name]
        if swap:
            rows[[40, 41]] = rows[[41, 40]]
        weights[name] = torch.cat([rows, torch.zeros(pad, rows.shape[1])])
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "vocab_size": 320 + pad}))
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    if swap:
        first, second = (next(token for token, index in vocab.items() if index == wanted) for wanted in (40, 41))
        vocab[first], vocab[second] = 41, 40
    merged = {"".join(merge) if isinstance(merge, list) else merge.replace(" ", "") for merge in tokenizer["model"]["merges"]}
    for token in [token for token, index in vocab.items() if index > 2 and token not in merged][:rename]:
        vocab[f"{token}\u4e00"] = vocab.pop(token)
    if rename:
        tokenizer["model"]["merges"] = []
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    convert(checkpoint, directory / "engine", dtype="float32", audit=False)
    return directory / "engine"


def accepted(target: Path, draft: Path | None) -> tuple[dict[int, list[list[int]]], float | None]:
    settings = {"speculative": "draft-model", "draft": str(draft), "num_speculative_tokens": 3} if draft is not None else {}
    engine = Engine.from_directory(target, EngineConfig(device="cpu", kv_cache_memory_bytes=64 << 20, **settings), load_codec(target))
    for request in requests():
        engine.add(request)
    outputs = {output.request_id: output for output in engine.drain()}
    metrics = engine.metrics()["speculation"]
    engine.close()
    return texts(outputs), metrics and metrics["acceptance_rate"]


@pytest.mark.parametrize("change", [{"swap": True}, {"pad": 32}, {"swap": True, "pad": 8}, {"rename": 30}], ids=str)
def test_another_vocabulary_changes_no_text(target: Path, change: dict[str, int], tmp_path: Path) -> None:
    plain, _ = accepted(target, None)
    draft = altered(tmp_path, **change)
    if set(change) != {"pad"}:
        with pytest.raises(InputError, match=r"another one: id \d+ is .* in the draft") as refused:
            accepted(target, draft)
        assert "--map-vocabulary" in refused.value.hint
        (draft / MAPPED_NAME).write_text("{}")
    found, rate = accepted(target, draft)
    assert found == plain
    assert rate is not None and rate > (0.2 if "rename" in change else 0.95)  # stand-ins make another context of a prompt


def test_a_foreign_vocabulary_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"its vocabulary has \d+ of the target's 320 tokens \(\d+\.\d%\)"):
        accepted(target, altered(tmp_path, rename=250))
