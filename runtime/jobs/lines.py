"""One input line: bytes -> `JobLine`, or the reason why not.

Everything that can be said about a line without a tokenizer is said here: JSON, shape, keys, types and ranges.
docs/lines.md is the reference for users.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NoReturn

import xxhash

from dspark.runtime.jobs import strict_json
from dspark.runtime.jobs.strict_json import is_unicode, shorten
from dspark.runtime.spec.errors import RequestError
from dspark.runtime.spec.sampling_params import FIELDS, did_you_mean, parse_option

BOM = b"\xef\xbb\xbf"
SHAPES = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}

FLAT_KEYS = ("custom_id", "id", "prompt", "messages", "add_generation_prompt", "metadata")
BODY_KEYS = ("prompt", "messages", "add_generation_prompt", "metadata", "max_completion_tokens")
ENVELOPE_KEYS = ("custom_id", "id", "method", "url", "body")
ENVELOPE_MARKS = ("method", "url", "body")
RECORDED_KEYS = ("model", "user", "store", "service_tier", "stream_options", "safety_identifier")

# Keys that stand in the interface or in the OpenAI API and are not built. A value that switches the feature off asks for
# nothing, so it is accepted; any other value is that line's error.
UNBUILT_KEYS: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "beam_width": (1,),
    "best_of": (1,),
    "choice": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": (),
    "length_penalty": (1, 1.0),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (False,),
    "reasoning_effort": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "web_search_options": (),
}


@dataclass(frozen=True)
class JobLine:
    """One request as the file gives it, checked as far as that goes without a tokenizer.

    line_number: 1-based. custom_id: the line's own id, else "line-N". shape: "flat", "chat" or "completion", the shape of the
    answer. Exactly one of prompt (text or token ids, never empty) and messages (never empty; content parts joined) is given.
    options: the line's sampling values by SamplingParams field, parsed; absent and null keys are not in it. recorded: OpenAI
    keys without effect here, as given. content_hash: 32 hexadecimal digits of the line's bytes without white space around them.
    """

    line_number: int
    custom_id: str
    has_own_id: bool
    shape: str
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    metadata: dict[str, Any] | None = None
    recorded: dict[str, Any] = field(default_factory=dict)
    url: str | None = None
    model: str | None = None
    content_hash: str = ""


class LineError(RequestError):
    """A line that cannot be served, with what is known of it; becomes the line's error record.

    shape is None when the line is not even a JSON object; custom_id is then "line-N".
    """

    def __init__(
        self,
        message: str,
        code: str = "invalid_request",
        param: str | None = None,
        *,
        line_number: int,
        custom_id: str | None = None,
        shape: str | None = None,
        content_hash: str = "",
        metadata: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, code, param)
        self.line_number = line_number
        self.has_own_id = custom_id is not None
        self.custom_id = default_id(line_number) if custom_id is None else custom_id
        self.shape = shape
        self.content_hash = content_hash
        self.metadata = metadata

    @classmethod
    def at(cls, line: JobLine, error: RequestError) -> LineError:
        """The error of a later stage (template, tokenizer, engine), as this line's error."""
        if isinstance(error, LineError):
            return error
        own_id = line.custom_id if line.has_own_id else None
        return cls(
            error.message,
            error.code,
            error.param,
            line_number=line.line_number,
            custom_id=own_id,
            shape=line.shape,
            content_hash=line.content_hash,
            metadata=line.metadata,
        )


def default_id(line_number: int) -> str:
    """The id of a line that gives none."""
    return f"line-{line_number}"


def is_blank(raw: bytes, line_number: int) -> bool:
    """Whether the line is to be skipped: nothing but white space (and a byte order mark on line 1)."""
    return not _strip(raw, line_number)


def parse_line(raw: bytes, line_number: int) -> JobLine:
    """The request of one line (with or without its line end). Raises LineError, and nothing else, whatever the bytes."""
    raw = _strip(raw, line_number)
    content_hash = xxhash.xxh3_128_hexdigest(raw)
    known: dict[str, Any] = {"line_number": line_number, "content_hash": content_hash}
    try:
        data = strict_json.loads(raw)
        if not isinstance(data, dict):
            raise RequestError(f"the line is {_kind(data)}, allowed: a JSON object", "not_an_object")
        return _Reader(data, known).read()
    except RequestError as error:
        message, param = error.message, error.param
        if isinstance(error, strict_json.StrictJsonError):
            _remember(error, known)
            if param is not None and param.startswith("body."):
                message, param = message.removeprefix("body."), param.removeprefix("body.")
        raise LineError(message, error.code, param, **known) from None


def options_table() -> str:
    """The Markdown table of the sampling keys; docs/lines.md holds a copy and a test compares them."""
    rows = ["| key | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    names = {"int": "integer", "float": "number", "bool": "true, false", "strings": "text or list of texts", "ints": "list of token ids"}
    for name, f in FIELDS.items():
        meta = f.metadata
        low, high = meta["low"], meta["high"]
        bounds = [] if low is None else [f"{'above' if meta['low_open'] else 'from'} {low:g}"]
        bounds += [] if high is None else [f"to {high:g}" if high < 1e15 else f"to {high}"]
        default = "none" if f.default is None or f.default == () else json.dumps(f.default)
        kind = names.get(meta["kind"], "object: token id to number")
        rows.append(f"| `{name}` | {kind} | {default} | {' '.join(bounds)} | {meta['help']} |")
    return "\n".join(rows) + "\n"


class _Reader:
    """Reads one decoded object. `known` collects what an error may say about the line before the reading is through."""

    def __init__(self, data: dict[str, Any], known: dict[str, Any]) -> None:
        # A null key means the same as an absent one, at both levels.
        self.data = {key: value for key, value in data.items() if value is not None}
        self.known = known

    def read(self) -> JobLine:
        data = self.data
        is_envelope = not data.keys().isdisjoint(ENVELOPE_MARKS)
        self.known["shape"] = _guess_shape(data) if is_envelope else "flat"
        custom_id = self._custom_id()
        if custom_id is not None:
            self.known["custom_id"] = custom_id
        url = None
        body = data
        if is_envelope:
            url, body = self._open_envelope()
        self._check_keys(body, is_envelope)
        metadata = self._typed(body, "metadata", dict, "an object")
        self.known["metadata"] = metadata
        prompt, messages = self._content(body, self.known["shape"])
        generation_prompt = self._typed(body, "add_generation_prompt", bool, "true or false")
        if generation_prompt is not None and messages is None:
            _fail("add_generation_prompt goes with messages, not with prompt", "conflicting_fields", "add_generation_prompt")
        return JobLine(
            line_number=self.known["line_number"],
            custom_id=default_id(self.known["line_number"]) if custom_id is None else custom_id,
            has_own_id=custom_id is not None,
            shape=self.known["shape"],
            prompt=prompt,
            messages=messages,
            options=_options(body),
            add_generation_prompt=True if generation_prompt is None else generation_prompt,
            metadata=metadata,
            recorded={key: body[key] for key in RECORDED_KEYS if key in body} if is_envelope else {},
            url=url,
            model=self._typed(body, "model", str, "a text") if is_envelope else None,
            content_hash=self.known["content_hash"],
        )

    def _custom_id(self) -> str | None:
        if "custom_id" in self.data and "id" in self.data:
            _fail("custom_id and id are both given, allowed: one of them", "conflicting_fields", "id")
        key = "id" if "id" in self.data else "custom_id"
        value = self.data.get(key)
        if value is not None and not isinstance(value, str):
            # 7 and "7" would be one id in some readers of OUT and two in others.
            hint = f', such as "{value}"' if isinstance(value, int) and not isinstance(value, bool) else ""
            _fail(f"{key} is {_show(value)}, allowed: a text{hint}", "invalid_value", key)
        return value

    def _open_envelope(self) -> tuple[str, dict[str, Any]]:
        data = self.data
        body = data.get("body")
        if not isinstance(body, dict):
            _fail(f"body is {_show(body)}, allowed: an object", "missing_field" if body is None else "invalid_value", "body")
        url = data.get("url")
        if not isinstance(url, str) or url not in SHAPES:
            _fail(f"url is {_show(url)}, allowed: {' or '.join(SHAPES)}", "missing_field" if url is None else "invalid_value", "url")
        if data.get("method", "POST") != "POST":
            _fail(f'method is {_show(data["method"])}, allowed: "POST"', "invalid_value", "method")
        for key in data:
            if key not in ENVELOPE_KEYS:
                where = " (it belongs into body)" if key in FIELDS or key in BODY_KEYS else did_you_mean(key, list(ENVELOPE_KEYS))
                _fail(f"unknown key '{shorten(key)}' beside body{where}", "unknown_key", shorten(key))
        return url, {key: value for key, value in body.items() if value is not None}

    @staticmethod
    def _check_keys(body: dict[str, Any], is_envelope: bool) -> None:
        own = (*BODY_KEYS, *RECORDED_KEYS) if is_envelope else FLAT_KEYS
        for key, value in body.items():
            if key in FIELDS or key in own:
                continue
            if key in UNBUILT_KEYS:
                # False == 0 in Python, but `"top_logprobs": false` is not the integer 0: compare the types as well.
                if any(type(value) is type(off) and value == off for off in UNBUILT_KEYS[key]):
                    continue
                if key == "stream":
                    _fail(f"stream is {_show(value)}, allowed: false (answers of a batch are not streamed)", "unsupported_key", "stream")
                _fail(f"{key} is not supported yet", "unsupported_key", key)
            if not is_envelope and (key in RECORDED_KEYS or key in BODY_KEYS):
                _fail(f"unknown key '{key}' (it belongs to the OpenAI shape, inside body)", "unknown_key", key)
            _fail(f"unknown key '{shorten(key)}'{did_you_mean(key[:100], [*FIELDS, *own])}", "unknown_key", shorten(key))

    @staticmethod
    def _typed(body: dict[str, Any], key: str, kind: type, allowed: str) -> Any:
        value = body.get(key)
        if value is not None and not isinstance(value, kind):
            _fail(f"{key} is {_show(value)}, allowed: {allowed}", "invalid_value", key)
        return value

    @staticmethod
    def _content(body: dict[str, Any], shape: str) -> tuple[str | list[int] | None, list[dict[str, Any]] | None]:
        prompt, messages = body.get("prompt"), body.get("messages")
        if prompt is not None and messages is not None:
            _fail("prompt and messages are both given, allowed: one of them", "conflicting_fields", "prompt")
        if shape == "chat" and messages is None:
            _fail("messages is missing; /v1/chat/completions takes messages", "missing_field", "messages")
        if shape == "completion" and prompt is None:
            _fail("prompt is missing; /v1/completions takes prompt", "missing_field", "prompt")
        if messages is not None:
            return None, _messages(messages)
        if prompt is None:
            _fail("prompt is missing, allowed: prompt (a text or a list of token ids) or messages", "missing_field", "prompt")
        return _prompt(prompt), None


def _prompt(prompt: Any) -> str | list[int]:
    if not isinstance(prompt, (str, list)):
        _fail(f"prompt is {_show(prompt)}, allowed: a text or a list of token ids", "invalid_value", "prompt")
    if not prompt:
        _fail("prompt is empty, allowed: at least one token", "empty_prompt", "prompt")
    if isinstance(prompt, list):
        for index, token in enumerate(prompt):
            if type(token) is not int:
                hint = "; give each prompt a line of its own" if isinstance(token, (str, list)) else ""
                _fail(f"prompt[{index}] is {_show(token)}, allowed: a token id (an integer){hint}", "invalid_value", "prompt")
    return prompt


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        _fail(f"messages is {_show(messages)}, allowed: a list of objects with role and content", "invalid_value", "messages")
    if not messages:
        _fail("messages is empty, allowed: at least one message", "empty_prompt", "messages")
    checked = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            _fail(f"{where} is {_show(message)}, allowed: an object with role and content", "invalid_value", "messages")
        if not isinstance(message.get("role"), str):
            _fail(f'{where}.role is {_show(message.get("role"))}, allowed: a text such as "user"', "invalid_value", "messages")
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": _join_parts(content, f"{where}.content")}
        elif content is not None and not isinstance(content, str):
            _fail(f"{where}.content is {_show(content)}, allowed: a text or a list of text parts", "invalid_value", "messages")
        checked.append(message)
    return checked


def _join_parts(parts: list[Any], where: str) -> str:
    """Many templates take only texts, so OpenAI's list of text parts becomes one text, joined without a separator."""
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
            continue
        what = f"of type {_show(kind)}" if kind is not None and kind != "text" else _show(part)
        _fail(f'{where}[{index}] is {what}, allowed: {{"type": "text", "text": "..."}}', "unsupported_content", "messages")
    return "".join(texts)


def _options(body: dict[str, Any]) -> dict[str, Any]:
    options = {name: parse_option(name, body[name]) for name in FIELDS if name in body}
    if "max_completion_tokens" in body:
        value = body["max_completion_tokens"]
        try:
            parsed = parse_option("max_tokens", value)
        except RequestError as error:
            message = error.message.replace("max_tokens", "max_completion_tokens", 1)
            raise RequestError(message, error.code, "max_completion_tokens") from None
        if options.setdefault("max_tokens", parsed) != parsed:
            message = f"max_tokens is {options['max_tokens']} and max_completion_tokens is {parsed}, allowed: one of them"
            _fail(message, "conflicting_fields", "max_completion_tokens")
    return options


def _guess_shape(data: dict[str, Any]) -> str:
    """The shape of an OpenAI line, also of one whose url is wrong or missing."""
    url, body = data.get("url"), data.get("body")
    if isinstance(url, str) and url in SHAPES:
        return SHAPES[url]
    return "chat" if isinstance(body, dict) and "messages" in body else "completion"


def _strip(raw: bytes, line_number: int) -> bytes:
    raw = raw.strip(b" \t\r\n")
    if line_number == 1 and raw.startswith(BOM):
        raw = raw[len(BOM) :].lstrip(b" \t\r\n")
    return raw


def _remember(error: strict_json.StrictJsonError, known: dict[str, Any]) -> None:
    """Keep id and shape of a line that is refused for its JSON, as `_Reader` would read them."""
    data = error.partial
    if not isinstance(data, dict):
        return
    is_envelope = any(data.get(key) is not None for key in ENVELOPE_MARKS)
    known["shape"] = _guess_shape(data) if is_envelope else "flat"
    ids = [data[key] for key in ("custom_id", "id") if data.get(key) is not None]
    # A lenient reader puts U+FFFD where bytes are wrong: that is not the id as given.
    damaged = error.code == "invalid_utf8" and "\ufffd" in str(ids)
    if len(ids) == 1 and isinstance(ids[0], str) and is_unicode(ids[0]) and not damaged:
        known["custom_id"] = ids[0]


def _fail(message: str, code: str, param: str | None = None) -> NoReturn:
    raise RequestError(message, code, param)


def _show(value: Any) -> str:
    """A value in a message: as JSON, cut short."""
    if value is None:
        return "missing"
    if isinstance(value, (dict, list)) and value:
        return _kind(value)
    return shorten(json.dumps(value[:80] if isinstance(value, str) else value, ensure_ascii=False))


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
