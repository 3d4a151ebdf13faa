"""The engine's rendering of a few conversations against transformers' apply_chat_template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dspark.converters.audit.verdict import refusal
from dspark.converters.tokenizer_files import default_template

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Probe:
    """A conversation, and the tools that it may use."""

    name: str
    messages: Messages
    tools: list[dict[str, Any]] | None = None


WEATHER: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city today.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "its name"}, "unit": {"type": "string", "enum": ["C", "F"]}},
                "required": ["city"],
            },
        },
    }
]
_ASKED: Messages = [{"role": "user", "content": "Is it warm in Lyon?"}]
_BRIEF: Messages = [{"role": "system", "content": "Be brief."}]


def _tool_turns(arguments: Any, content: str | None) -> Messages:
    """A question, the call of a tool, what it returned."""
    call = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": '{"celsius": 21}'}
    return [*_ASKED, {"role": "assistant", "content": content, "tool_calls": [call]}, answer]


PROBES: tuple[Probe, ...] = (
    Probe("a question", [{"role": "user", "content": "What is 2 + 2?"}]),
    Probe("a system turn", [*_BRIEF, {"role": "user", "content": "Hello\n\nthere"}]),
    Probe(
        "several turns",
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": " 1. List  "}],
    ),
    Probe("a question with tools", _ASKED, WEATHER),
    Probe("a system turn with tools", [*_BRIEF, *_ASKED], WEATHER),
    Probe("a tool's answer", _tool_turns({"city": "Lyon", "unit": "C"}, ""), WEATHER),
    Probe("a call whose arguments are text", _tool_turns('{"city": "Lyon"}', None), WEATHER),
    Probe("a tool's answer without the tools", _tool_turns({"city": "Lyon"}, "")),
)


def check_chats(codec: Any, source: Any) -> dict[str, Any]:
    """Every probe rendered by an engine's codec and by transformers' tokenizer of the source; "summary" says the result.

    What one side refuses, the other must refuse. Of several named templates the default one counts on both sides: an engine keeps no
    other. A template that writes today's date gets the engine's. Raises QualityError naming the first conversation that differs.
    """
    if codec.chat_template is None:
        return {"summary": "no chat template"}
    template, _ = default_template(getattr(source, "chat_template", None))
    if template is not None:
        codec.pin_clock(template)
    refused = []
    for probe in PROBES:
        got = _rendered(partial(codec.render_chat, probe.messages, tools=probe.tools))
        want = _rendered(partial(_apply, source, template, probe))
        if got != want:
            place = next((i for i, (a, b) in enumerate(zip(got or "", want or "")) if a != b), 0)
            raise refusal(f"the chat template gives {_shown(got, place)} instead of {_shown(want, place)} for {probe.name}")
        if got is None:
            refused.append(probe.name)
    return {"summary": "chat template equal", "conversations": len(PROBES), "refused_on_both_sides": refused}


def _apply(source: Any, template: str | None, probe: Probe) -> str:
    return str(
        source.apply_chat_template(probe.messages, tools=probe.tools, chat_template=template, tokenize=False, add_generation_prompt=True)
    )


def _rendered(render: Callable[[], str]) -> str | None:
    """The text, or None when the template refuses this conversation: a template may raise anything, its own sentence or a stumble."""
    try:
        return render()
    except (MemoryError, ImportError):
        raise
    except Exception:
        return None


def _shown(text: str | None, place: int) -> str:
    """The text around the first difference."""
    if text is None:
        return "an error"
    start = max(0, place - 20)
    return repr(("..." if start else "") + text[start : start + 60])
