"""JSON without what readers of JSON disagree about: NaN, infinities, doubled keys, half surrogate pairs, deep nesting."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import orjson

from dspark.runtime.spec.errors import RequestError


class StrictJsonError(RequestError):
    """Bytes that are no strict JSON. partial: what a lenient reader makes of them, or None; to find the line's id with."""

    def __init__(self, message: str, code: str = "invalid_json", param: str | None = None, partial: Any = None) -> None:
        super().__init__(message, code, param)
        self.partial = partial


def loads(raw: bytes) -> Any:
    """The value. Raises StrictJsonError, whose param is the path of the field at fault where one is; a message begins with it."""
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        _explain(raw, str(error))
    try:
        # A doubled key is lost in reading. Every text costs two quotes, so counting quotes finds it without a hook per object.
        if orjson.dumps(data).count(b'"') != raw.count(b'"') or rb"\u0022" in raw:
            json.loads(raw, object_pairs_hook=_refuse_doubled)
        # orjson reads integers beyond 64 bits as floats; what is handed through is to come out as it went in.
        if _LONG_NUMBER in raw.translate(_ALL_DIGITS_ZERO):
            data = json.loads(raw)
    except StrictJsonError as error:
        error.partial = data
        raise
    except (TypeError, RecursionError):
        raise StrictJsonError("the line is nested too deeply, allowed: 250 levels", partial=data) from None
    except ValueError as error:
        raise StrictJsonError(f"the line is not valid JSON: {error}", partial=data) from None
    return data


_ALL_DIGITS_ZERO = bytes(ord("0") if chr(byte) in "0123456789" else byte for byte in range(256))
_LONG_NUMBER = b"0" * 19


def is_unicode(text: str) -> bool:
    """False when the text holds half of a surrogate pair: it then has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _refuse_doubled(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise StrictJsonError(f"key '{shorten(name)}' stands twice in one object, allowed: once", param=shorten(name))
    return result


def _explain(raw: bytes, reason: str) -> NoReturn:
    """Why the strict reader refused, with the field at fault when the lenient one of the standard library finds it."""
    if not raw:
        raise StrictJsonError("the line is empty, allowed: a JSON object")
    bad_byte = None
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        bad_byte = error.start
        text = raw.decode(errors="replace")
    try:
        partial = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        partial = None
    if bad_byte is not None:
        message = f"byte {raw[bad_byte]:#04x} at offset {bad_byte} of the line is not UTF-8"
        raise StrictJsonError(message, "invalid_utf8", partial=partial)
    for path, value in _walk(partial):
        if isinstance(value, float) and not math.isfinite(value):
            name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
            message = f"{path} is {name} (or beyond the range of a double), allowed: a finite number"
            raise StrictJsonError(message, "invalid_value", path, partial)
        if isinstance(value, str) and not is_unicode(value):
            message = f"{path} holds half of a surrogate pair, which is not a character"
            raise StrictJsonError(message, "invalid_unicode", path, partial)
    raise StrictJsonError(f"the line is not valid JSON: {reason}", partial=partial)


def _walk(data: Any) -> list[tuple[str, Any]]:
    """(path, value) of every key and scalar, in the order of the text. Iterative: depth must not matter."""
    found, stack = [], [("", data)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            for key, item in reversed(value.items()):
                shown = shorten(key) if is_unicode(key) else "(a key)"
                inner = f"{path}.{shown}" if path else shown
                stack += [(inner, item), (inner, key)]
        elif isinstance(value, list):
            stack += [(f"{path}[{index}]", item) for index, item in reversed(list(enumerate(value)))]
        else:
            found.append((path or "the line", value))
    return found
