"""The codec of an engine directory against transformers' own tokenizer, and chat templates that refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from tokenizers.processors import TemplateProcessing

from dspark.runtime.jobs.tokenizer import TextCodec, load_codec
from dspark.runtime.spec.errors import InputError, RequestError

TEXTS = [
    "the river runs",
    "",
    " ",
    "  two  blanks ",
    "na\u00efve \U0001f642\n\n1. done",
    "<|eos|>x<|bos|>",
    "a\u2028b\x00c",
    "\ufffd",
    "END.",
]
TURNS = [{"role": "user", "content": "count one two"}, {"role": "assistant", "content": "three"}, {"role": "user", "content": "<|eos|>?"}]


def make(directory: Path, chat_template: Any = tiny_models.CHAT_TEMPLATE, **config: Any) -> TextCodec:
    tiny_models.save_tokenizer(directory, chat_template=chat_template, **config)
    return load_codec(directory)


def reference(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def refusal(codec: TextCodec, messages: list[dict], generation_prompt: bool = True) -> RequestError:
    with pytest.raises(RequestError) as caught:
        codec.render_chat(messages, generation_prompt)
    return caught.value


FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"add_bos_token": True},
    {"bos_token": {"__type": "AddedToken", "content": "<|bos|>", **FLAGS}},
    {"additional_special_tokens": ["<|extra|>"]},
    {"added_tokens_decoder": {"320": {"content": "<|tool|>", "special": False, **FLAGS}}},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: ",".join(config) or "plain")
def test_ids_and_texts_equal_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    codec = make(tmp_path, **config)
    theirs = reference(tmp_path)
    assert codec.special_ids == frozenset(theirs.all_special_ids)
    assert (codec.bos_token_id, codec.eos_token_id, codec.vocab_size) == (theirs.bos_token_id, theirs.eos_token_id, len(theirs))
    assert codec.special_tokens == theirs.special_tokens_map
    for text in [*TEXTS, "<|tool|> <|extra|>"]:
        for special in (False, True):
            ids = theirs.encode(text, add_special_tokens=special)
            assert codec.encode(text, special) == ids, (text, special)
            for skip in (False, True):
                expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert codec.decode(ids, skip) == expected
    assert codec.encode_batch(TEXTS, True) == [codec.encode(text, True) for text in TEXTS]


def with_bos() -> Any:
    """The tiny tokenizer with a post-processor that puts BOS in front."""
    tokenizer = tiny_models.build_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", tiny_models.BOS_ID)])
    return tokenizer


@pytest.mark.parametrize("config", [{}, {"add_bos_token": False}], ids=["plain", "add_bos_token"])
def test_bos_is_added_as_tokenizer_json_says(tmp_path: Path, config: dict[str, Any]) -> None:
    tiny_models.save_tokenizer(tmp_path, with_bos(), **config)
    codec, theirs = load_codec(tmp_path), reference(tmp_path)
    assert codec.encode("the river", True) == theirs.encode("the river") == [tiny_models.BOS_ID, *codec.encode("the river")]


def test_padding_and_truncation_of_tokenizer_json_are_ignored(tmp_path: Path) -> None:
    tokenizer = tiny_models.build_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tiny_models.save_tokenizer(tmp_path, tokenizer)
    assert len(load_codec(tmp_path).encode("the river runs under the old stone bridge")) > 4
    assert 0 not in load_codec(tmp_path).encode("the")


def test_an_incomplete_character_is_one_replacement_character(tmp_path: Path) -> None:
    codec = make(tmp_path)
    ids = codec.encode("\U0001f642")
    assert len(ids) == 4
    assert [codec.decode(ids[:n]) for n in range(1, 5)] == ["\ufffd", "\ufffd", "\ufffd", "\U0001f642"]


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_rendered_chats_equal_transformers(tmp_path: Path, generation_prompt: bool) -> None:
    template = (
        "{{ bos_token }}" + tiny_models.CHAT_TEMPLATE + "{% if tools %}T{% endif %}{% if messages[0].tool_calls is defined %}C{% endif %}"
    )
    codec = make(tmp_path, template)
    turns = [{**TURNS[0], "tool_calls": None}, *TURNS[1:]]
    expected = reference(tmp_path).apply_chat_template(turns, tokenize=False, add_generation_prompt=generation_prompt)
    assert codec.render_chat(turns, generation_prompt) == expected
    assert expected.startswith("<|bos|>")
    assert "C" not in expected


def test_the_template_file_wins_over_the_config(tmp_path: Path) -> None:
    make(tmp_path, "config")
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}", encoding="utf-8")
    assert load_codec(tmp_path).render_chat(TURNS) == "file count one two"
    assert reference(tmp_path).apply_chat_template(TURNS, tokenize=False) == "file count one two"


def test_of_several_templates_the_default_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert make(tmp_path, named).render_chat(TURNS) == "plain"
    with pytest.raises(InputError, match=r"has the chat templates \['tool_use'\] and none called default"):
        make(tmp_path, named[:1])


def test_a_refusal_carries_the_templates_own_sentence(tmp_path: Path) -> None:
    codec = make(tmp_path, tiny_models.NO_SYSTEM_TEMPLATE)
    error = refusal(codec, [{"role": "system", "content": "be brief"}])
    assert (error.code, error.param) == ("template_refused", "messages")
    assert error.message == "the chat template refuses these messages: this template takes no system turn"
    assert codec.render_chat(TURNS).startswith("<|user|>count one two")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' + messages[0].content }}",  # undefined content
        "{{ messages[0].role.missing.deeper }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",  # the sandbox
        "{{ messages[0]['role'] + 1 }}",
        "{% if %}",  # a syntax error is found at the first use
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_whatever_a_template_raises_is_that_lines_error(tmp_path: Path, template: str) -> None:
    assert refusal(make(tmp_path, template), [{"role": "user", "content": None}]).code == "template_refused"


def test_messages_without_a_template_say_what_to_do(tmp_path: Path) -> None:
    error = refusal(make(tmp_path, None), TURNS)
    assert error.code == "no_chat_template"
    assert "give the whole text as prompt" in error.message


def test_the_date_in_a_template_is_the_engines(tmp_path: Path) -> None:
    """Llama 3's templates write today's date into the prompt; two runs of one job must give one text."""
    codec = make(tmp_path, "{{ strftime_now('%d %b %Y') }}")
    assert "no engine.json with a build date" in refusal(codec, TURNS).message
    (tmp_path / "engine.json").write_text(json.dumps({"created": 1_700_000_000}), encoding="utf-8")
    assert load_codec(tmp_path).render_chat(TURNS) == "14 Nov 2023"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "cannot be read"),
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("tokenizer_config.json", "[]", "holds no JSON object"),
    ],
)
def test_broken_tokenizer_files_are_named(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    make(tmp_path)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=words):
        load_codec(tmp_path)


def test_rendering_imports_no_torch(tmp_path: Path) -> None:
    make(tmp_path)
    code = (
        "import sys; from dspark.runtime.jobs.tokenizer import load_codec; codec = load_codec(sys.argv[1]);"
        "print(codec.render_chat([{'role': 'user', 'content': 'x'}])); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["<|user|>x", "<|assistant|>", "False"]
