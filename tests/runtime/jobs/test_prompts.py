"""Lines to requests: tokens, limits, options over defaults, random streams."""

from __future__ import annotations

import json
import time
from pathlib import Path

import case_lines
import pytest
import tiny_models
from tokenizers.processors import TemplateProcessing

from dspark.runtime.jobs.lines import LineError, parse_line
from dspark.runtime.jobs.prompts import PromptBuilder
from dspark.runtime.jobs.tokenizer import TextCodec, load_codec
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams

CONTEXT, VOCAB = tiny_models.CONTEXT, tiny_models.VOCAB_SIZE


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_models.save_tokenizer(directory, chat_template=tiny_models.NO_SYSTEM_TEMPLATE)
    return load_codec(directory)


@pytest.fixture(scope="module")
def builder(codec: TextCodec) -> PromptBuilder:
    return PromptBuilder(codec, SamplingParams(), CONTEXT, VOCAB)


def build(builder: PromptBuilder, record: dict | bytes, number: int = 1) -> Request:
    raw = record if isinstance(record, bytes) else json.dumps(record).encode()
    return builder.build(parse_line(raw, number), 7)


def refusal(builder: PromptBuilder, record: dict) -> LineError:
    with pytest.raises(LineError) as caught:
        build(builder, record)
    return caught.value


def outcomes(builder: PromptBuilder, name: str, shape: str) -> dict[str, Request | LineError]:
    found: dict[str, Request | LineError] = {}
    for number, raw in enumerate(case_lines.file(name, shape).splitlines(), 1):
        try:
            line = parse_line(raw, number)
            found[line.custom_id] = builder.build(line, number)
        except LineError as error:
            found[error.custom_id] = error
    return found


@pytest.mark.parametrize("shape", case_lines.SHAPES)
def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(codec: TextCodec, builder: PromptBuilder, shape: str) -> None:
    wide = PromptBuilder(codec, SamplingParams(), 2 * CONTEXT, VOCAB)
    found = outcomes(wide, "B27_long_and_empty", shape)
    errors = {custom_id: result.code for custom_id, result in found.items() if isinstance(result, LineError)}
    assert errors == {
        "long": "prompt_too_long",
        "empty": "empty_prompt",
        "null": "missing_field",
        "nofield": "missing_field",
        "emptylist": "empty_prompt",
    }
    assert f"allowed: up to {2 * CONTEXT - 1} tokens" in found["long"].message
    assert found["ok1"].prompt_token_ids == codec.encode("the river runs")
    assert found["space"].prompt_token_ids == codec.encode(" ")
    capped = found["fits_prompt_only"]
    assert len(capped.prompt_token_ids) + capped.params.max_tokens == 2 * CONTEXT
    assert outcomes(builder, "B27_long_and_empty", shape)["fits_prompt_only"].code == "prompt_too_long"


def test_the_message_of_a_prompt_that_is_too_long_counts_its_tokens(builder: PromptBuilder) -> None:
    assert build(builder, {"prompt": [5] * (CONTEXT - 1)}).params.max_tokens == 1
    error = refusal(builder, {"prompt": [5] * CONTEXT})
    assert error.message == "prompt is too long: 256 tokens, allowed: up to 255 tokens (the context is 256, prompt and answer together)"
    assert error.param == "prompt"


@pytest.mark.parametrize("shape", case_lines.SHAPES)
def test_max_tokens_is_capped_to_the_context(builder: PromptBuilder, shape: str) -> None:
    found = outcomes(builder, "B27_exact_limit", shape)
    room = CONTEXT - len(found["at"].prompt_token_ids)
    assert {i: r.params.max_tokens for i, r in found.items() if isinstance(r, Request)} == {
        "at": min(251, room),
        "over": room,
        "absent": room,
        "null": room,
    }


def test_a_text_of_megabytes_is_refused_without_tokenizing_it(builder: PromptBuilder) -> None:
    started = time.thread_time()
    found = outcomes(builder, "B39_one_huge_line", "flat")
    assert time.thread_time() - started < 5
    assert found["huge"].code == "prompt_too_long"
    assert "8000000 characters" in found["huge"].message
    assert isinstance(found["ok"], Request)
    assert refusal(builder, {"messages": [{"role": "user", "content": "x" * 100_000}]}).param == "messages"


def test_a_long_text_of_few_tokens_is_served(tmp_path: Path) -> None:
    """More characters than any estimate allows, but they fit: runs of blanks are one token in many vocabularies."""
    tokenizer = tiny_models.build_tokenizer()
    tokenizer.add_tokens(["x" * 1000])
    tiny_models.save_tokenizer(tmp_path, tokenizer)
    builder = PromptBuilder(load_codec(tmp_path), SamplingParams(), CONTEXT, VOCAB + 1)
    assert build(builder, {"prompt": "x" * 100_000}).prompt_token_ids == [VOCAB] * 100


def test_line_over_defaults(codec: TextCodec) -> None:
    builder = PromptBuilder(codec, SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9), CONTEXT, VOCAB)
    params = build(builder, {"prompt": "x", "temperature": 0, "top_p": None, "stop": "END"}).params
    assert params == SamplingParams(max_tokens=9, temperature=0.0, top_p=0.9, stop=("END",))


def test_bos_goes_before_raw_prompts_and_never_before_a_template(tmp_path: Path) -> None:
    tokenizer = tiny_models.build_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", tiny_models.BOS_ID)])
    tiny_models.save_tokenizer(tmp_path, tokenizer, "{{ bos_token }}" + tiny_models.CHAT_TEMPLATE)
    codec = load_codec(tmp_path)
    builder = PromptBuilder(codec, SamplingParams(), CONTEXT, VOCAB)
    bos = codec.bos_token_id
    assert build(builder, {"prompt": "the"}).prompt_token_ids == [bos, *codec.encode("the")]
    assert build(builder, {"prompt": [5, 6]}).prompt_token_ids == [5, 6]
    chat = build(builder, {"messages": [{"role": "user", "content": "the"}]}).prompt_token_ids
    assert chat == codec.encode("<|bos|><|user|>the\n<|assistant|>")
    assert chat.count(bos) == 1
    open_chat = build(builder, {"messages": [{"role": "user", "content": "the"}], "add_generation_prompt": False}).prompt_token_ids
    assert codec.decode(open_chat) == "<|user|>the\n"


@pytest.mark.parametrize("shape", case_lines.SHAPES)
def test_a_template_that_refuses_costs_that_line_only(builder: PromptBuilder, shape: str) -> None:
    found = outcomes(builder, "B31_system_role", shape)
    assert {i for i, result in found.items() if isinstance(result, Request)} == {"u", "alt", "u2"}
    error = found["sys"]
    assert (error.code, error.line_number, error.shape) == ("template_refused", 2, "flat" if shape == "flat" else "chat")
    assert "this template takes no system turn" in error.message


def test_tokens_that_the_model_does_not_have_are_that_lines_error(tmp_path: Path) -> None:
    """B07: four tokens were added to the tokenizer and the embedding was never resized."""
    tokenizer = tiny_models.build_tokenizer()
    tokenizer.add_tokens([f"<new{i}>" for i in range(4)])
    tiny_models.save_tokenizer(tmp_path, tokenizer)
    builder = PromptBuilder(load_codec(tmp_path), SamplingParams(), CONTEXT, VOCAB)
    assert build(builder, {"prompt": "the"})
    error = refusal(builder, {"prompt": "the <new2>"})
    assert error.code == "token_out_of_range"
    for word in ("'<new2>'", "token 322", "324 tokens", "the model 320"):
        assert word in error.message


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"prompt": [1, VOCAB]}, "prompt", "prompt[1] is 320, allowed: a token id from 0 to 319"),
        ({"prompt": [-1]}, "prompt", "prompt[0] is -1"),
        ({"prompt": [2**40]}, "prompt", "prompt[0] is 1099511627776"),
        ({"stop_token_ids": [2, 400]}, "stop_token_ids", "stop_token_ids has 400"),
        ({"logit_bias": {"400": 1}}, "logit_bias", "logit_bias has 400"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens is 9, allowed: up to max_tokens, which is 8"),
    ],
)
def test_limits_of_the_engine_name_the_field(builder: PromptBuilder, change: dict, param: str, words: str) -> None:
    error = refusal(builder, {"custom_id": "a", "prompt": "x", **change})
    assert error.message.startswith(words)
    assert (error.param, error.custom_id, error.line_number) == (param, "a", 1)


@pytest.mark.parametrize("shape", case_lines.SHAPES)
def test_a_seeded_line_draws_the_same_whatever_its_id_and_neighbours(builder: PromptBuilder, shape: str) -> None:
    alone = outcomes(builder, "B30_seed_alone", shape)["x"].draw_key
    mixed = outcomes(builder, "B30_seed_mixed", shape)
    last = outcomes(builder, "B30_seed_last", shape)
    assert {alone, mixed["x"].draw_key, mixed["x2"].draw_key, last["x"].draw_key} == {alone}
    assert len({result.draw_key for result in mixed.values()}) == 4
    assert mixed["n1"].draw_key == last["n1"].draw_key
    assert 0 <= alone < 2**128


def test_draw_keys_depend_on_what_the_interface_says_and_nothing_else(codec: TextCodec, builder: PromptBuilder) -> None:
    other = PromptBuilder(codec, SamplingParams(temperature=1.0), CONTEXT, VOCAB, job_seed=1)
    plain = build(builder, {"custom_id": "a", "prompt": "x"}).draw_key
    assert build(builder, {"custom_id": "a", "prompt": "x", "top_p": 0.5}, 3).draw_key == plain
    different = [
        build(other, {"custom_id": "a", "prompt": "x"}).draw_key,
        build(builder, {"custom_id": "b", "prompt": "x"}).draw_key,
        build(builder, {"custom_id": "a", "prompt": "y"}).draw_key,
        build(builder, {"custom_id": "a", "prompt": "x", "seed": 0}).draw_key,
        build(builder, {"custom_id": "a", "prompt": "x", "seed": 2**64 - 1}).draw_key,
    ]
    assert len({plain, *different}) == 6
    assert build(other, {"custom_id": "b", "prompt": "x", "seed": 0}).draw_key == different[3]
