"""Results -> output lines (bytes ending in a line feed), in the shape of the input line.

Nothing here depends on the clock or on luck: ids derive from the line's content, `created` is handed in.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
import xxhash

from dspark.runtime.jobs.lines import JobLine, LineError
from dspark.runtime.spec.request import Completion, RequestOutput

BAD_REQUEST = 400
EXPIRED_MESSAGE = "the run stopped before this line was served; the same command continues"


def success_record(line: JobLine, output: RequestOutput, created: int, model_name: str) -> bytes:
    """The output line of an answered request. created: seconds since 1970, stands in OpenAI bodies as does model_name."""
    completion_tokens = sum(len(c.token_ids) for c in output.completions)
    usage = {"prompt_tokens": output.num_prompt_tokens, "completion_tokens": completion_tokens}
    if line.shape == "flat":
        return dump_record(_flat_success(line, output.completions, usage))
    usage["total_tokens"] = output.num_prompt_tokens + completion_tokens
    digest = _digest(line.content_hash, line.custom_id)
    is_chat = line.shape == "chat"
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{digest}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model_name,
        "choices": [_chat_choice(c) if is_chat else _text_choice(c) for c in output.completions],
        "usage": usage,
    }
    if line.metadata is not None:
        body["metadata"] = line.metadata
    return dump_record(_envelope(line, {"status_code": 200, "request_id": f"req_{digest}", "body": body}))


def failure_record(error: LineError) -> bytes:
    """The output line of a refused line. A line whose shape is not known gets the flat one."""
    detail: dict[str, Any] = {"code": error.code, "message": error.message, "param": error.param, "line": error.line_number}
    if error.shape in ("chat", "completion"):
        digest = _digest(error.content_hash, error.custom_id)
        body: dict[str, Any] = {
            "error": {
                "message": error.message,
                "type": "invalid_request_error",
                "param": error.param,
                "code": error.code,
                "line": error.line_number,
            }
        }
        if error.metadata is not None:
            body["metadata"] = error.metadata
        return dump_record(_envelope(error, {"status_code": BAD_REQUEST, "request_id": f"req_{digest}", "body": body}))
    return dump_record(_flat_failure(error, detail))


def expired_record(line: JobLine) -> bytes:
    """The output line of a request that the run's time limit left out."""
    if line.shape == "flat":
        detail = {"code": "batch_expired", "message": EXPIRED_MESSAGE, "param": None, "line": line.line_number}
        return dump_record(_flat_failure(line, detail))
    return dump_record(_envelope(line, None, {"code": "batch_expired", "message": EXPIRED_MESSAGE}))


def dump_record(record: dict[str, Any]) -> bytes:
    """Strict JSON in valid UTF-8 and a line feed. Half surrogate pairs become U+FFFD."""
    try:
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        # Half surrogate pairs, integers beyond 64 bits or deep nesting in what is handed through: rare, so slow will do.
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return re.sub("[\ud800-\udfff]", "\ufffd", text).encode() + b"\n"


def _flat_success(line: JobLine, completions: list[Completion], usage: dict[str, int]) -> dict[str, Any]:
    first = completions[0]
    record: dict[str, Any] = {"custom_id": line.custom_id, "text": first.text, "finish_reason": first.finish_reason, "usage": usage}
    if len(completions) > 1:
        record["choices"] = [{"index": c.index, "text": c.text, "finish_reason": c.finish_reason} for c in completions]
    if line.metadata is not None:
        record["metadata"] = line.metadata
    record["error"] = None
    return record


def _flat_failure(line: JobLine | LineError, detail: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = {"custom_id": line.custom_id}
    if line.metadata is not None:
        record["metadata"] = line.metadata
    record["error"] = detail
    return record


def _envelope(line: JobLine | LineError, response: dict[str, Any] | None, error: dict[str, Any] | None = None) -> dict[str, Any]:
    digest = _digest(line.content_hash, line.custom_id)
    return {"id": f"batch_req_{digest}", "custom_id": line.custom_id, "response": response, "error": error}


def _chat_choice(c: Completion) -> dict[str, Any]:
    message = {"role": "assistant", "content": c.text, "refusal": None}
    return {"index": c.index, "message": message, "logprobs": None, "finish_reason": c.finish_reason}


def _text_choice(c: Completion) -> dict[str, Any]:
    return {"index": c.index, "text": c.text, "logprobs": None, "finish_reason": c.finish_reason}


def _digest(content_hash: str, custom_id: str) -> str:
    """Two lines with the same content but no id of their own differ in "line-N", so the id takes part."""
    return xxhash.xxh3_128_hexdigest(f"{content_hash}\0{custom_id}".encode(errors="replace"))
