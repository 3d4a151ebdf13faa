"""SentencePiece tokenizers of GGUF files against what transformers builds from the same tables."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from case_checkpoints import llama_config, llama_state, write_gguf
from tiny_models import CORPUS
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from dspark.converters.audit import PROBE_TEXTS
from dspark.converters.pipeline import convert
from dspark.converters.readers.gguf_sentencepiece import ranked_merges
from dspark.converters.readers.gguf_tokenizer import bundle_from_metadata
from dspark.runtime.spec.errors import InputError, UnsupportedError

TEXTS = [
    "the river runs under the old stone bridge",
    "The 12 mills, 3.14 and 1234567 turn",
    "two  spaces   three    four",
    " leading space",
    "tabs\tand\nnew\n\nlines\r\n",
    "naïve café, Größe, 東京, Привет, שלום, 🙂👍🏽",
    "▁already escaped",
    "it's the miller's mill",
    "",
]


@functools.cache
def table(kind: str = "llama") -> dict[str, Any]:
    """Token table as llama.cpp's converter writes it: control tokens, 256 byte tokens, pieces in the order of their merges, characters."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    trained.train_from_iterator(CORPUS * 20, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    pieces = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    words = [token for token, _ in pieces if len(token) > 1]
    letters = [token for token, _ in pieces if len(token) == 1] + ["é", "T", "1", "2", ".", ",", "東"]
    names = ["<unk>", "<s>", "</s>"] if kind == "llama" else ["<pad>", "<eos>", "<bos>", "<unk>"]
    spaces = ["▁▁", "▁▁▁▁"] if kind == "llama" else ["  ", "    "]
    control = [*names, "<|user|>", "<|end|>"]
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    tokens = [*control, *byte_tokens, *spaces, *words, *letters, "<tool>"]
    types = [2 if token == "<unk>" else 3 for token in control] + [6] * 256
    types += [1 if kind == "llama" else 4] * 2 + [1] * (len(words) + len(letters)) + [4]
    scores = [0.0] * (len(control) + 256) + [-float(rank) for rank in range(len(tokens) - len(control) - 256)]
    return {
        "general.architecture": kind,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": tokens.index("<s>" if kind == "llama" else "<bos>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>" if kind == "llama" else "<eos>"),
        "tokenizer.ggml.unknown_token_id": tokens.index("<unk>"),
    }


def built(kind: str = "llama", **changes: Any) -> Tokenizer:
    metadata = {**table("llama" if kind in ("llama", "phi3") else "gemma"), "general.architecture": kind, **changes}
    bundle = bundle_from_metadata(metadata, Path("m.gguf"))
    assert bundle is not None
    return Tokenizer.from_str(bundle.tokenizer_json)


def by_transformers(kind: str, **changes: Any) -> Tokenizer:
    """The tokenizer that transformers builds from the same token table."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    metadata = {**table("llama" if kind in ("llama", "phi3") else "gemma"), **changes}
    names = mapping.GGUF_TOKENIZER_MAPPING["tokenizer"]
    fields = {name: metadata[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in metadata}
    tokenizer, _ = mapping.convert_gguf_tokenizer(kind, fields)
    return tokenizer


@pytest.mark.parametrize("kind", ["llama", "phi3", "gemma", "gemma2", "gemma3"])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_as_in_transformers(kind: str, text: str) -> None:
    ours, theirs = built(kind), by_transformers(kind)
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("kind", ["llama", "phi3", "gemma2"])
def test_special_and_added_tokens_as_in_transformers(kind: str) -> None:
    for text in ("<|user|>the river<|end|>runs <tool>the mill", "the<tool>river"):
        assert built(kind).encode(text, add_special_tokens=False).ids == by_transformers(kind).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["phi3", "gemma2"])
def test_every_probe_of_the_audit_comes_back(kind: str) -> None:
    """These are audited by their round trip."""
    tokenizer = built(kind)
    for text in PROBE_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_a_round_trip_through_bytes() -> None:
    tokenizer = built()
    ids = tokenizer.encode("a 🙂\n", add_special_tokens=False).ids
    tokens = [tokenizer.id_to_token(token) for token in ids]
    assert tokens[-5:] == ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "<0x0A>"]
    assert tokenizer.decode(ids) == "a 🙂\n"


def test_bos_is_added_unless_the_file_says_otherwise() -> None:
    assert built().encode("the").ids[0] == 1
    assert built(**{"tokenizer.ggml.add_bos_token": False}).encode("the").ids[0] != 1
    assert built(**{"tokenizer.ggml.add_eos_token": True}).encode("the").ids[-1] == 2


def test_the_space_before_a_text_can_be_switched_off() -> None:
    plain, bare = built(), built(**{"tokenizer.ggml.add_space_prefix": False})
    assert plain.encode("the", add_special_tokens=False).tokens == ["▁the"]
    assert "".join(bare.encode("the", add_special_tokens=False).tokens) == "the"
    assert bare.decode(bare.encode(" the", add_special_tokens=False).ids) == " the"


def test_phi3_drops_white_space_after_a_special_token() -> None:
    """Phi-3's own tokenizer marks its special tokens so; the newline of its chat template is not a token."""
    tokenizer = built("phi3")
    ids = tokenizer.encode("<|user|>\nthe", add_special_tokens=False).ids
    assert [tokenizer.id_to_token(token) for token in ids] == ["<|user|>", "▁the"]
    assert tokenizer.encode("<s>\n", add_special_tokens=False).tokens[-1] == "<0x0A>"


def test_a_whole_file_passes_the_audit(tmp_path: Path) -> None:
    """The audit's probes begin with spaces, which `llama` does not give back: transformers' tokenizer is the measure."""
    metadata = table()
    config = llama_config(vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    write_gguf(tmp_path / "m.gguf", config, llama_state(config, 8), tokenizer=metadata)
    record = convert(tmp_path / "m.gguf", tmp_path / "engine", dtype="float32").manifest.audit
    assert record["tokenizer"]["compared_with"] == "AutoTokenizer of the source"
    engine = Tokenizer.from_file(str(tmp_path / "engine" / "tokenizer.json"))
    assert engine.encode("the river").ids == built().encode("the river").ids


def test_merges_follow_the_scores() -> None:
    """ab (score -1) before bc (-2), abc by both of its cuts, the longer left part first; control tokens are no parts."""
    ids = {token: index for index, token in enumerate(["a", "b", "c", "bc", "ab", "abc", "<s>", "<", "s>"])}
    scores = [-9.0, -9.0, -9.0, -2.0, -1.0, -3.0, 0.0, -9.0, -9.0]
    assert ranked_merges(ids, scores, {"<s>"}) == [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]


def test_merges_in_the_file_are_taken() -> None:
    tokenizer = built(**{"tokenizer.ggml.merges": ["▁ t"]})
    assert tokenizer.encode("the", add_special_tokens=False).tokens == ["▁t", "h", "e"]
    with pytest.raises(InputError, match="merges of tokens that are not in its vocabulary"):
        built(**{"tokenizer.ggml.merges": ["q zz"]})


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tokenizer.ggml.scores": [0.0]}, InputError, "has 1 scores for"),
        ({"tokenizer.ggml.tokens": []}, InputError, "without tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, InputError, "tokens that is no list of the right kind"),
        ({"tokenizer.ggml.scores": "0.5"}, InputError, "scores that is no list of the right kind"),
        ({"tokenizer.ggml.bos_token_id": "1"}, InputError, r"bos_token_id '1', a token id is needed"),
        ({"tokenizer.chat_template": ["x"]}, InputError, "chat_template that is no text"),
        ({"tokenizer.ggml.token_type": [1, 1]}, InputError, "another number of token types"),
        ({"tokenizer.ggml.model": "t5"}, UnsupportedError, r"tokenizer\.ggml\.model 't5', supported: gpt2"),
    ],
)
def test_damaged_and_unknown_tables_are_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        built(**changes)
