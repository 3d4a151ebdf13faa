"""Output lines: shapes, key order, ids that do not depend on luck, strict JSON whatever the text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.runtime.jobs.lines import JobLine, LineError, parse_line
from dspark.runtime.jobs.responses import dump_record, expired_record, failure_record, success_record
from dspark.runtime.spec.errors import RequestError
from dspark.runtime.spec.request import Completion, RequestOutput

CREATED = 1_700_000_000


def line(shape: str, **body: object) -> JobLine:
    content = {"messages": [{"role": "user", "content": "hi"}]} if shape == "chat" else {"prompt": "hi"}
    record = {"custom_id": "a", **content, **body}
    if shape != "flat":
        url = "/v1/chat/completions" if shape == "chat" else "/v1/completions"
        record = {"custom_id": "a", "method": "POST", "url": url, "body": {**content, "model": "asked", **body}}
    return parse_line(json.dumps(record).encode(), 4)


def output(*texts: str) -> RequestOutput:
    return RequestOutput(4, 3, [Completion(i, [5, 6], text, "stop" if i == 0 else "length") for i, text in enumerate(texts)])


def answer(job_line: JobLine, *texts: str) -> dict:
    return read(success_record(job_line, output(*texts), CREATED, "tiny"))


def read(record: bytes) -> dict:
    assert record.endswith(b"\n")
    assert record.count(b"\n") == 1

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(record.decode(), parse_constant=refuse)


def test_flat_answer() -> None:
    assert success_record(line("flat"), output("Hé"), CREATED, "tiny") == (
        '{"custom_id":"a","text":"Hé","finish_reason":"stop","usage":{"prompt_tokens":3,"completion_tokens":2},"error":null}\n'.encode()
    )


def test_flat_answer_with_several_texts_and_metadata() -> None:
    record = answer(line("flat", metadata={"row": 2**80}), "x", "y")
    assert list(record) == ["custom_id", "text", "finish_reason", "usage", "choices", "metadata", "error"]
    assert record["text"] == "x"
    assert record["choices"] == [{"index": 0, "text": "x", "finish_reason": "stop"}, {"index": 1, "text": "y", "finish_reason": "length"}]
    assert record["usage"]["completion_tokens"] == 4
    assert record["metadata"] == {"row": 2**80}


@pytest.mark.parametrize(
    ("shape", "prefix", "kind"), [("chat", "chatcmpl-", "chat.completion"), ("completion", "cmpl-", "text_completion")]
)
def test_openai_answers(shape: str, prefix: str, kind: str) -> None:
    record = answer(line(shape, n=2, metadata={"k": "v"}), "x", "y")
    assert list(record) == ["id", "custom_id", "response", "error"]
    assert record["id"].startswith("batch_req_")
    assert (record["custom_id"], record["error"], record["response"]["status_code"]) == ("a", None, 200)
    assert record["response"]["request_id"].startswith("req_")
    body = record["response"]["body"]
    assert list(body) == ["id", "object", "created", "model", "choices", "usage", "metadata"]
    assert body["id"].startswith(prefix)
    assert (body["object"], body["created"], body["model"]) == (kind, CREATED, "tiny")
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    if shape == "chat":
        assert body["choices"][1]["message"] == {"role": "assistant", "content": "y", "refusal": None}
    else:
        assert body["choices"][1]["text"] == "y"


def test_ids_depend_on_the_lines_content_only() -> None:
    def ids(raw: bytes, number: int) -> str:
        return answer(parse_line(raw, number), "x")["id"]

    raw = json.dumps({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "hi"}}).encode()
    assert ids(raw, 1) == ids(raw + b"\r\n", 2) == ids(b"\xef\xbb\xbf" + raw, 1)
    assert ids(raw.replace(b"hi", b"ho"), 1) != ids(raw, 1)
    nameless = raw.replace(b'"custom_id": "a", ', b"")
    assert ids(nameless, 1) != ids(nameless, 2)


def test_flat_failure() -> None:
    with pytest.raises(LineError) as caught:
        parse_line(b'{"custom_id": "a", "prompt": "x", "metadata": {"row": 1}, "top_k": 1.5}', 4)
    assert read(failure_record(caught.value)) == {
        "custom_id": "a",
        "metadata": {"row": 1},
        "error": {"code": "invalid_value", "message": "top_k is 1.5, allowed: an integer from -1", "param": "top_k", "line": 4},
    }


def test_openai_failure_is_a_400_with_an_error_body() -> None:
    error = LineError.at(line("chat"), RequestError("no room", "kv_pool_too_small"))
    record = read(failure_record(error))
    assert record["id"] == answer(line("chat"), "x")["id"]
    assert (record["custom_id"], record["error"], record["response"]["status_code"]) == ("a", None, 400)
    assert record["response"]["body"] == {
        "error": {"message": "no room", "type": "invalid_request_error", "param": None, "code": "kv_pool_too_small", "line": 4}
    }


def test_a_line_that_is_no_json_gets_a_flat_record() -> None:
    with pytest.raises(LineError) as caught:
        parse_line(b"{", 9)
    record = read(failure_record(caught.value))
    assert (record["custom_id"], record["error"]["code"], record["error"]["line"]) == ("line-9", "invalid_json", 9)


def test_expired_lines() -> None:
    flat = read(expired_record(line("flat")))
    assert (flat["error"]["code"], flat["error"]["line"]) == ("batch_expired", 4)
    batch = read(expired_record(line("chat")))
    assert (batch["response"], batch["error"]["code"]) == (None, "batch_expired")


@given(st.text(st.characters()), st.sampled_from(["flat", "chat", "completion"]))
def test_any_text_becomes_one_line_of_strict_json(text: str, shape: str) -> None:
    record = answer(line(shape), text)
    shown = record["text"] if shape == "flat" else record["response"]["body"]["choices"][0]
    shown = shown if shape == "flat" else shown["message"]["content"] if shape == "chat" else shown["text"]
    assert shown == "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)


def test_both_writers_write_the_same_bytes() -> None:
    record = {"a": 'é\u2028\x00"\\/', "b": [1, 2.5, None, True], "c": {}}
    slow = dump_record({**record, "d": "\ud800"})
    assert slow == dump_record({**record, "d": "\ufffd"})
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump_record({"big": 2**80, "nan": float("nan")})
