"""JSONL inputs that went wrong in other tools, as bytes: every file in both line shapes.

`file("B25_crlf", "flat")` is the file, `NAMES` lists them, `requests("B27_exact_limit")` gives (custom_id, body) of those that are plain
lists. They are meant for a model of 256 tokens of context (`tiny_models`), where "the river runs" is a few tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

FLAT, OPENAI = "flat", "openai"
SHAPES = (FLAT, OPENAI)
PROMPTS = ["the river runs", "count one two", "stop here please", "what is the colour of", "a small boat"]
LONG_PROMPT = " ".join(PROMPTS * 120)
KNOWN_TEXT = "Quick\U0001f642 th\u00e9 END."
"""What the chain model of B28 writes; the emoji is four tokens of one byte each in a byte-level tokenizer."""

Body = dict[str, Any]
Row = tuple[Any, Body]


def request(prompt: Any, max_tokens: Any = 8, **options: Any) -> Body:
    """A greedy request."""
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **options}


def line(shape: str, custom_id: Any, body: Body) -> bytes:
    """One request without a line end; custom_id None leaves the key out."""
    record = {} if custom_id is None else {"custom_id": custom_id}
    if shape == FLAT:
        record |= body
    else:
        url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        record |= {"method": "POST", "url": url, "body": {"model": "tiny", **body}}
    return json.dumps(record, ensure_ascii=False).encode()


def rows_file(shape: str, rows: list[Row], end: bytes = b"\n") -> bytes:
    return b"".join(line(shape, custom_id, body) + end for custom_id, body in rows)


def file(name: str, shape: str = FLAT) -> bytes:
    """The named file. Raises KeyError for an unknown name."""
    return rows_file(shape, _ROWS[name]) if name in _ROWS else _FILES[name](shape)


def requests(name: str) -> list[Row]:
    """(custom_id, body) of each line of a file that is a plain list of requests."""
    return list(_ROWS[name])


def big_lines(count: int, shape: str = FLAT, width: int = 600) -> Iterator[bytes]:
    """B39: the lines of a file to be streamed, each with its line end."""
    for index in range(count):
        yield line(shape, f"m{index}", request(f"{PROMPTS[index % 5]} {'x' * width}", 1)) + b"\n"


THREE: list[Row] = [(f"r{i}", request(PROMPTS[i])) for i in range(3)]


def _seeded(prompt: str, seed: Any = None) -> Body:
    return {"prompt": prompt, "max_tokens": 12, "temperature": 1.0, **({} if seed is None else {"seed": seed})}


def _chat(*turns: tuple[str, str], max_tokens: int = 8) -> Body:
    return {"messages": [{"role": role, "content": text} for role, text in turns], "max_tokens": max_tokens, "temperature": 0}


_STOPS = ["ick", "k\U0001f642", "\U0001f642", "\U0001f642 th", "h\u00e9", "\u00e9 END", "END.", "D", "Quick", "never", "uickk", "\u00e9"]
_B37_BASE = "Q7XKD2MZV9TB4HJ8WLN3RYG6PFC5SAU1EOI0QXZ7KVMJ4WTH"


def _one_apart() -> list[str]:
    """48 characters, one changed at a time, at the edges of blocks of 16 and inside them."""
    texts = [_B37_BASE]
    for position in (0, 1, 7, 14, 15, 16, 17, 30, 31, 32, 33, 40, 46, 47):
        other = "Z" if _B37_BASE[position] != "Z" else "Y"
        texts.append(_B37_BASE[:position] + other + _B37_BASE[position + 1 :])
    return texts


_ROWS: dict[str, list[Row]] = {
    "plain": THREE,
    "B26_duplicate_ids": [
        ("same", request(PROMPTS[0])),
        ("other", request(PROMPTS[1])),
        ("same", request(PROMPTS[2])),
        ("", request(PROMPTS[3])),
        ("", request(PROMPTS[4])),
    ],
    "B26_missing_and_odd_ids": [
        (None, request(PROMPTS[0])),
        (7, request(PROMPTS[1])),
        ("7", request(PROMPTS[2])),
        (None, request(PROMPTS[3])),
        (3.5, request(PROMPTS[4])),
        ({"a": 1}, request(PROMPTS[0])),
    ],
    "B27_long_and_empty": [
        ("ok1", request(PROMPTS[0])),
        ("long", request(LONG_PROMPT)),
        ("ok2", request(PROMPTS[1])),
        ("empty", request("")),
        ("space", request(" ")),
        ("null", request(None)),
        ("nofield", {"max_tokens": 8, "temperature": 0}),
        ("emptylist", request([])),
        ("fits_prompt_only", request(" ".join(PROMPTS * 9), 1000)),
        ("ok3", request(PROMPTS[2])),
    ],
    "B27_exact_limit": [
        ("at", request(PROMPTS[0], 251)),
        ("over", request(PROMPTS[0], 5000)),
        ("zero", request(PROMPTS[0], 0)),
        ("minus", request(PROMPTS[0], -5)),
        ("absent", {"prompt": PROMPTS[0], "temperature": 0}),
        ("null", request(PROMPTS[0], None)),
    ],
    "B28_every_cut": [(f"n{n}", request("zz", n)) for n in range(1, 19)],
    "B28_emoji_in_prompt": [
        ("e1", request("\U0001f642 zz", 18)),
        ("e2", request("e\u0301\u200d\U0001f468\u200d\U0001f469\u200d\U0001f467 zz", 18)),
        ("e3", request("\U0001f1e9\U0001f1ea zz", 18)),
    ],
    "B29_stops": [(f"s{i}", request("zz", 30, stop=[stop])) for i, stop in enumerate(_STOPS)],
    "B29_stop_shapes": [
        ("str", request("zz", 30, stop="END")),
        ("two", request("zz", 30, stop=["END", "th"])),
        ("prefix_of", request("zz", 30, stop=["th\u00e9 E", "h"])),
        ("emptystr", request("zz", 30, stop=[""])),
        ("emptylist", request("zz", 30, stop=[])),
        ("null", request("zz", 30, stop=None)),
        ("in_prompt", request("END zz", 30, stop=["END zz"])),
        ("nonstring", request("zz", 30, stop=[5])),
    ],
    "B30_seed_alone": [("x", _seeded(PROMPTS[0], 42))],
    "B30_seed_mixed": [
        ("x", _seeded(PROMPTS[0], 42)),
        ("n1", _seeded(PROMPTS[1])),
        ("n2", _seeded(PROMPTS[2])),
        ("y", _seeded(PROMPTS[3], 7)),
        ("x2", _seeded(PROMPTS[0], 42)),
    ],
    "B30_seed_last": [(f"n{i}", _seeded(PROMPTS[i])) for i in range(5)] + [("x", _seeded(PROMPTS[0], 42))],
    "B30_seed_odd": [
        ("big", _seeded(PROMPTS[0], 2**64)),
        ("neg", _seeded(PROMPTS[0], -1)),
        ("str", _seeded(PROMPTS[0], "42")),
        ("zero", _seeded(PROMPTS[0], 0)),
    ],
    "B31_system_role": [
        ("u", _chat(("user", PROMPTS[0]))),
        ("sys", _chat(("system", "be brief"), ("user", PROMPTS[0]))),
        ("alt", _chat(("user", "a"), ("user", "b"))),
        ("none", _chat(max_tokens=4)),
        ("u2", _chat(("user", PROMPTS[1]))),
    ],
    "B36_pool": [
        *((f"a{i}", request(PROMPTS[i % 5], 120)) for i in range(8)),
        ("big", request(" ".join(PROMPTS * 9), 120)),
        ("huge", request(" ".join(PROMPTS * 11), 40)),
        *((f"z{i}", request(PROMPTS[i % 5], 4)) for i in range(4)),
    ],
    "B37_prefix": [(f"q{i}", request(text, 5)) for i, text in enumerate(_one_apart())],
    "B37_prefix_twice": [(f"q{i}", request(text, 5)) for i, text in enumerate([*_one_apart()[::-1], *_one_apart()])],
    "B38_resume": [(f"k{i}", request(LONG_PROMPT if i in (2, 7) else PROMPTS[i % 5], 6)) for i in range(12)],
    "B39_one_huge_line": [("huge", request("x" * 8_000_000)), ("ok", request(PROMPTS[0]))],
}


def _blank_lines(shape: str) -> bytes:
    return b"\n  \n" + b"\n\n".join(line(shape, i, body) for i, body in THREE) + b"\n\t\n\n\n"


def _nonobject_lines(shape: str) -> bytes:
    """r0, r1, r3 and r5 are good; lines 2-6, 8, 10 and 11 are not."""

    def good(index: int, prompt: int) -> bytes:
        return line(shape, f"r{index}", request(PROMPTS[prompt]))

    lines = [
        good(0, 0),
        b"[1, 2, 3]",
        b'"hello"',
        b"null",
        b"17",
        b"true",
        good(1, 1),
        b'{"custom_id": "r2", "prompt": ',
        good(3, 3),
        b"}{",
    ]
    lines += [b'{"custom_id":"r4","body":"text, not an object","prompt":{"a":1}}', good(5, 4)]
    return b"\n".join(lines) + b"\n"


def _unicode_separators(shape: str) -> bytes:
    """Characters at which str.splitlines cuts and a JSONL file does not; the last three inside prompts go out escaped."""
    prompts = [f"river\u2028runs\u2029under\x85the{c}bridge" for c in "\x0b\x0c\x1c"]
    return rows_file(shape, [(f"r{i}", request(prompt)) for i, prompt in enumerate(prompts)])


def _nan_numbers(shape: str) -> bytes:
    """r0 and r4 are good."""
    bodies = [
        request(PROMPTS[0]),
        request(PROMPTS[1]) | {"temperature": float("nan")},
        request(PROMPTS[2], top_p=float("inf")),
        request(PROMPTS[3]) | {"temperature": -1},
        request(PROMPTS[4]),
        request(PROMPTS[0], "8"),
        request(PROMPTS[0], 2.5),
        request(PROMPTS[0], True),
    ]
    return rows_file(shape, [(f"r{i}", body) for i, body in enumerate(bodies)])


_FILES: dict[str, Callable[[str], bytes]] = {
    "B24_bom": lambda shape: b"\xef\xbb\xbf" + rows_file(shape, THREE),
    "B24_bom_only": lambda shape: b"\xef\xbb\xbf",
    "B24_utf16": lambda shape: "\r\n".join(line(shape, i, body).decode() for i, body in THREE).encode("utf-16"),
    "B25_crlf": lambda shape: rows_file(shape, THREE, b"\r\n"),
    "B25_no_final_newline": lambda shape: rows_file(shape, THREE)[:-1],
    "B25_blank_lines": _blank_lines,
    "B25_empty_file": lambda shape: b"",
    "B25_nonobject_lines": _nonobject_lines,
    "B25_unicode_line_separators": _unicode_separators,
    "B25_nan_numbers": _nan_numbers,
}

NAMES = sorted([*_ROWS, *_FILES])
