"""One input line: what is read, what is refused, and with which words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import case_lines
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.runtime.jobs.lines import UNBUILT_KEYS, JobLine, LineError, is_blank, options_table, parse_line
from dspark.runtime.jobs.scan import peek_id
from dspark.runtime.spec.sampling_params import FIELDS


def parse(raw: bytes | str | dict, number: int = 1) -> JobLine:
    if isinstance(raw, dict):
        raw = json.dumps(raw)
    return parse_line(raw.encode() if isinstance(raw, str) else raw, number)


def refusal(raw: bytes | str | dict, number: int = 1) -> LineError:
    with pytest.raises(LineError) as caught:
        parse(raw, number)
    return caught.value


def outcomes(content: bytes) -> dict[str, JobLine | LineError]:
    """custom_id to what became of it, for every line of a file that is not blank."""
    found: dict[str, JobLine | LineError] = {}
    for number, raw in enumerate(content.split(b"\n"), 1):
        if is_blank(raw, number):
            continue
        try:
            result: JobLine | LineError = parse_line(raw, number)
        except LineError as error:
            result = error
        assert result.line_number == number
        assert result.custom_id not in found
        found[result.custom_id] = result
    return found


def body_of(shape: str, **body: object) -> dict:
    return json.loads(case_lines.line(shape, "a", {"prompt": "x", **body}))


def test_module_imports_neither_torch_nor_transformers() -> None:
    modules = "lines, prompts, tokenizer, detokenizer, responses"
    code = (
        f"import sys; from dspark.runtime.jobs import {modules}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


# ---- the cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", case_lines.SHAPES)
@pytest.mark.parametrize("name", ["B24_bom", "B25_crlf", "B25_no_final_newline", "B25_blank_lines"])
def test_byte_order_mark_line_ends_and_blanks_do_not_change_the_requests(name: str, shape: str) -> None:
    found = outcomes(case_lines.file(name, shape))
    assert list(found) == ["r0", "r1", "r2"]
    assert [line.prompt for line in found.values()] == case_lines.PROMPTS[:3]
    plain = outcomes(case_lines.file("plain", shape))
    assert [line.content_hash for line in found.values()] == [line.content_hash for line in plain.values()]


def test_a_file_of_a_byte_order_mark_alone_has_no_request() -> None:
    assert outcomes(case_lines.file("B24_bom_only")) == {}


def test_a_byte_order_mark_counts_on_the_first_line_only() -> None:
    assert refusal(b'\xef\xbb\xbf{"prompt": "x"}', 2).code == "invalid_json"


@pytest.mark.parametrize("shape", case_lines.SHAPES)
def test_lines_that_are_no_request_are_errors_with_their_line_number(shape: str) -> None:
    found = outcomes(case_lines.file("B25_nonobject_lines", shape))
    good = [custom_id for custom_id, result in found.items() if isinstance(result, JobLine)]
    assert good == ["r0", "r1", "r3", "r5"]
    codes = {custom_id: result.code for custom_id, result in found.items() if isinstance(result, LineError)}
    assert codes == {
        **{f"line-{number}": "not_an_object" for number in range(2, 7)},
        "line-8": "invalid_json",
        "line-10": "invalid_json",
        "r4": "invalid_value",
    }
    assert found["line-4"].message == "the line is null, allowed: a JSON object"
    assert found["r4"].param == "body"
    assert found["r4"].line_number == 11


@pytest.mark.parametrize("shape", case_lines.SHAPES)
def test_unicode_line_separators_stay_inside_their_text(shape: str) -> None:
    found = outcomes(case_lines.file("B25_unicode_line_separators", shape))
    assert [found[f"r{i}"].prompt for i in range(3)] == [f"river\u2028runs\u2029under\x85the{c}bridge" for c in "\x0b\x0c\x1c"]


@pytest.mark.parametrize("shape", case_lines.SHAPES)
def test_numbers_that_cannot_be_are_errors_naming_the_field(shape: str) -> None:
    found = outcomes(case_lines.file("B25_nan_numbers", shape))
    assert [custom_id for custom_id, result in found.items() if isinstance(result, JobLine)] == ["r0", "r4"]
    params = {custom_id: result.param for custom_id, result in found.items() if isinstance(result, LineError)}
    assert params == {"r1": "temperature", "r2": "top_p", "r3": "temperature", "r5": "max_tokens", "r6": "max_tokens", "r7": "max_tokens"}
    assert found["r1"].message.startswith("temperature is NaN")
    assert found["r2"].message.startswith("top_p is Infinity")
    assert {result.shape for result in found.values()} == {"flat" if shape == "flat" else "completion"}


@pytest.mark.parametrize("shape", case_lines.SHAPES)
def test_an_id_is_a_text_and_a_line_without_one_has_its_number(shape: str) -> None:
    found = outcomes(case_lines.file("B26_missing_and_odd_ids", shape))
    assert {custom_id: getattr(result, "param", "good") for custom_id, result in found.items()} == {
        "line-1": "good",
        "line-2": "custom_id",  # 7
        "7": "good",
        "line-4": "good",
        "line-5": "custom_id",  # 3.5
        "line-6": "custom_id",  # an object
    }
    assert found["line-2"].message == 'custom_id is 7, allowed: a text, such as "7"'
    assert not found["line-1"].has_own_id
    assert found["7"].has_own_id


@pytest.mark.parametrize("shape", case_lines.SHAPES)
def test_empty_and_absent_prompts_are_errors(shape: str) -> None:
    found = outcomes(case_lines.file("B27_long_and_empty", shape))
    assert len(found) == 10
    codes = {custom_id: result.code for custom_id, result in found.items() if isinstance(result, LineError)}
    assert codes == {"empty": "empty_prompt", "null": "missing_field", "nofield": "missing_field", "emptylist": "empty_prompt"}


@pytest.mark.parametrize("shape", case_lines.SHAPES)
def test_zero_and_negative_max_tokens_are_errors_and_null_is_absent(shape: str) -> None:
    found = outcomes(case_lines.file("B27_exact_limit", shape))
    assert [custom_id for custom_id, result in found.items() if isinstance(result, LineError)] == ["zero", "minus"]
    assert found["zero"].message == "max_tokens is 0, allowed: an integer from 1"
    assert "max_tokens" not in found["null"].options


def test_stop_in_every_form_it_comes_in() -> None:
    found = outcomes(case_lines.file("B29_stop_shapes"))
    assert found["str"].options["stop"] == ("END",)
    assert found["emptylist"].options["stop"] == ()
    assert "stop" not in found["null"].options
    assert [custom_id for custom_id, result in found.items() if isinstance(result, LineError)] == ["emptystr", "nonstring"]


@pytest.mark.parametrize("shape", case_lines.SHAPES)
def test_odd_seeds_are_refused_one_by_one(shape: str) -> None:
    found = outcomes(case_lines.file("B30_seed_odd", shape))
    assert {custom_id for custom_id, result in found.items() if isinstance(result, JobLine)} == {"zero"}
    assert "18446744073709551616" in found["big"].message
    assert found["neg"].param == found["str"].param == "seed"


def test_no_messages_is_an_error() -> None:
    found = outcomes(case_lines.file("B31_system_role", "openai"))
    assert [custom_id for custom_id, result in found.items() if isinstance(result, LineError)] == ["none"]
    assert found["none"].code == "empty_prompt"
    assert found["none"].shape == "chat"


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_options_are_parsed_and_nulls_are_absent() -> None:
    line = parse({"id": "a", "prompt": [3, 4], "top_k": None, "logit_bias": {"5": -1}, "stop_token_ids": [7], "metadata": {"row": 2**70}})
    assert line.options == {"logit_bias": ((5, -1.0),), "stop_token_ids": (7,)}
    assert (line.custom_id, line.prompt, line.shape, line.metadata) == ("a", [3, 4], "flat", {"row": 2**70})


@pytest.mark.parametrize("shape", case_lines.SHAPES)
def test_an_unknown_key_is_an_error_with_the_nearest_name(shape: str) -> None:
    error = refusal(body_of(shape, max_tokns=3))
    assert error.message == "unknown key 'max_tokns' (did you mean 'max_tokens'?)"
    assert (error.code, error.param, error.custom_id) == ("unknown_key", "max_tokns", "a")


@pytest.mark.parametrize("shape", case_lines.SHAPES)
@pytest.mark.parametrize("key", [key for key in UNBUILT_KEYS if key != "stream"])
def test_keys_that_are_not_built_are_refused_unless_they_ask_for_nothing(key: str, shape: str) -> None:
    error = refusal(body_of(shape, **{key: {"some": "thing"}}))
    assert (error.code, error.param, error.message) == ("unsupported_key", key, f"{key} is not supported yet")
    for off in (*UNBUILT_KEYS[key], None):
        assert parse(body_of(shape, **{key: off})).options == {}


def test_an_off_value_of_another_type_asks_for_something() -> None:
    assert refusal(body_of("flat", top_logprobs=False)).code == "unsupported_key"
    assert refusal(body_of("flat", stream=0)).code == "unsupported_key"


def test_stream_true_is_that_lines_error() -> None:
    error = refusal(body_of("openai", stream=True))
    assert error.message == "stream is true, allowed: false (answers of a batch are not streamed)"


def test_openai_keys_without_effect_are_recorded() -> None:
    line = parse(body_of("openai", user="u", store=False, stream_options={"include_usage": True}))
    assert line.recorded == {"model": "tiny", "user": "u", "store": False, "stream_options": {"include_usage": True}}
    assert (line.model, line.url, line.shape) == ("tiny", "/v1/completions", "completion")


def test_openai_keys_in_a_flat_line_are_told_where_they_belong() -> None:
    assert "belongs to the OpenAI shape" in refusal(body_of("flat", model="tiny")).message
    assert "belongs to the OpenAI shape" in refusal(body_of("flat", max_completion_tokens=3)).message


def test_sampling_keys_beside_body_are_told_where_they_belong() -> None:
    record = {**body_of("openai"), "temperature": 1}
    assert refusal(record).message == "unknown key 'temperature' beside body (it belongs into body)"


def test_max_completion_tokens_is_max_tokens() -> None:
    assert parse(body_of("openai", max_completion_tokens=9)).options == {"max_tokens": 9}
    assert parse(body_of("openai", max_completion_tokens=9, max_tokens=9)).options == {"max_tokens": 9}
    assert refusal(body_of("openai", max_completion_tokens=9, max_tokens=8)).code == "conflicting_fields"
    error = refusal(body_of("openai", max_completion_tokens=0))
    assert (error.param, error.message) == ("max_completion_tokens", "max_completion_tokens is 0, allowed: an integer from 1")


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"url": "/v1/embeddings"}, "url", 'url is "/v1/embeddings", allowed: /v1/chat/completions or /v1/completions'),
        ({"url": None}, "url", "url is missing"),
        ({"url": ["/v1/completions"]}, "url", "url is a list"),
        ({"method": "GET"}, "method", 'method is "GET", allowed: "POST"'),
        ({"body": None}, "body", "body is missing"),
        ({"url": "/v1/chat/completions"}, "messages", "messages is missing"),
        ({"id": "b"}, "id", "custom_id and id are both given"),
    ],
)
def test_a_wrong_envelope_names_the_field(change: dict, param: str, words: str) -> None:
    error = refusal({**body_of("openai"), **change})
    assert error.param == param
    assert error.message.startswith(words)
    assert error.shape in ("chat", "completion")


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "prompt", "prompt and messages are both given"),
        ({"prompt": {"a": 1}}, "prompt", "prompt is an object, allowed: a text or a list of token ids"),
        ({"prompt": ["a", "b"]}, "prompt", 'prompt[0] is "a", allowed: a token id (an integer); give each prompt a line of its own'),
        ({"prompt": [1, True]}, "prompt", "prompt[1] is true"),
        ({"prompt": [1, 2.0]}, "prompt", "prompt[1] is 2.0"),
        ({"metadata": [1]}, "metadata", "metadata is a list, allowed: an object"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "add_generation_prompt goes with messages"),
        ({"prompt": None, "messages": "hi"}, "messages", 'messages is "hi"'),
        ({"prompt": None, "messages": ["hi"]}, "messages", 'messages[0] is "hi"'),
        ({"prompt": None, "messages": [{"content": "hi"}]}, "messages", "messages[0].role is missing"),
        ({"prompt": None, "messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content is 5"),
        ({"top_p": "high"}, "top_p", "top_p is 'high'"),
    ],
)
def test_a_wrong_value_names_the_field(change: dict, param: str, words: str) -> None:
    error = refusal({**body_of("flat"), **change})
    assert error.param == param
    assert error.message.startswith(words)


def test_text_parts_are_joined_and_other_parts_are_refused_by_type() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    line = parse({"messages": [{"role": "user", "content": parts, "name": "n"}]})
    assert line.messages == [{"role": "user", "content": "a b", "name": "n"}]
    error = refusal({"messages": [{"role": "user", "content": [*parts, {"type": "image_url", "image_url": {"url": "x"}}]}]})
    assert error.code == "unsupported_content"
    assert error.message.startswith('messages[0].content[2] is of type "image_url"')


def test_null_content_is_left_to_the_template() -> None:
    assert parse({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}).messages[0]["content"] is None


# ---- strict JSON ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (b'{"custom_id": "a", "prompt": "x\xff"}', "invalid_utf8", None),
        (b'{"custom_id": "a", "prompt": "\xed\xa0\x80"}', "invalid_utf8", None),
        (b'{"custom_id": "a", "prompt": "\\ud800"}', "invalid_unicode", "prompt"),
        (b'{"custom_id": "a", "prompt": "x", "\\ud800": 1}', "invalid_unicode", "(a key)"),
        (b'{"custom_id": "a", "prompt": "x", "metadata": {"k": [1, NaN]}}', "invalid_value", "metadata.k[1]"),
        (b'{"custom_id": "a", "prompt": "x", "top_p": 1e999}', "invalid_value", "top_p"),
        (b'{"custom_id": "a", "prompt": "x", "top_p": -Infinity}', "invalid_value", "top_p"),
        (b'{"custom_id": "a", "prompt": "x", "top_p": 0.1, "top_p": 0.2}', "invalid_json", "top_p"),
        (b'{"custom_id": "a", "prompt": "\\u0022x\\u0022", "n": 1, "n": 2}', "invalid_json", "n"),
        (b'{"custom_id": "a", "prompt": "x", "metadata": ' + b"[" * 600 + b"]" * 600 + b"}", "invalid_json", None),
    ],
)
def test_what_json_readers_disagree_about_is_refused_and_the_id_is_kept(raw: bytes, code: str, param: str | None) -> None:
    error = refusal(raw, 5)
    assert (error.code, error.param, error.custom_id, error.shape) == (code, param, "a", "flat")


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 100_000, b"{", b'{"prompt": "x"} {}', b'{"prompt": "x",}', b"1" * 5000])
def test_broken_lines_have_the_line_number_for_an_id(raw: bytes) -> None:
    error = refusal(raw, 5)
    assert (error.custom_id, error.shape, error.has_own_id) == ("line-5", None, False)
    assert len(error.message) < 300


def test_an_escaped_quote_is_no_doubled_key() -> None:
    assert parse(b'{"prompt": "\\u0022x\\"", "n": 1}').prompt == '"x"'


def test_minus_zero_is_zero() -> None:
    assert parse(b'{"prompt": "x", "seed": -0, "temperature": -0.0}').options == {"seed": 0, "temperature": 0.0}


def test_an_id_with_damaged_bytes_is_not_taken_for_the_id() -> None:
    assert refusal(b'{"custom_id": "a\xff", "prompt": "x"}').custom_id == "line-1"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.integers(1, 3))
def test_any_bytes_are_a_line_or_a_line_error(raw: bytes, number: int) -> None:
    try:
        parse_line(raw, number)
    except LineError as error:
        assert error.line_number == number
        error.custom_id.encode()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5) | st.sampled_from(["user", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "prompt", "n"]), inner, max_size=3)
    ),
    max_leaves=8,
)
_KEYS = [
    *FIELDS,
    *UNBUILT_KEYS,
    "custom_id",
    "id",
    "method",
    "url",
    "body",
    "prompt",
    "messages",
    "metadata",
    "add_generation_prompt",
    "model",
]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=5), st.booleans())
def test_any_object_is_a_line_or_a_line_error(record: dict, in_body: bool) -> None:
    if in_body:
        record = {"custom_id": "a", "url": "/v1/chat/completions", "body": record}
    try:
        line = parse(json.dumps(record))
    except LineError as error:
        assert error.message
        assert len(error.message) < 400
    else:
        assert (line.prompt is None) != (line.messages is None)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["custom_id", "id", "prompt", "body", "top_p"]),
        st.sampled_from([None, "a", "b\ufffd", "\ud800", 7, {}, float("nan")]),
    ),
    st.sampled_from([b"", b"}", b"\xff", b' {"id": "c"}']),
)
def test_the_scan_of_a_file_keys_each_line_by_the_id_of_its_record(record: dict, garbage: bytes) -> None:
    """`scan.peek_id` looks at ids alone, at a fraction of the cost; a difference would lose or double lines."""
    raw = json.dumps(record).encode()
    for line in (raw + garbage, raw[:-1] + garbage + raw[-1:], raw.replace(b'"prompt"', b'"id"')):
        try:
            parsed: JobLine | LineError = parse_line(line, 3)
        except LineError as error:
            parsed = error
        assert (peek_id(line, 3) or "line-3") == parsed.custom_id


# ---- documentation --------------------------------------------------------------------------------------------------


def test_documented_keys_are_the_built_ones() -> None:
    text = (Path(__file__).parents[3] / "docs" / "lines.md").read_text(encoding="utf-8")
    assert options_table() in text
    for key in UNBUILT_KEYS:
        assert f"`{key}`" in text
