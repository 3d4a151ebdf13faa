"""Conversations with and without a system turn, tools, calls and their answers read the same on both sides, or are refused on both."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tiny_models import CHAT_TEMPLATE, NO_SYSTEM_TEMPLATE, save_tokenizer

from dspark.converters.audit.template import PROBES, check_chats
from dspark.converters.tokenizer_files import load_transformers_tokenizer
from dspark.runtime.jobs.tokenizer import TextCodec, load_codec
from dspark.runtime.spec.errors import QualityError

TOOLS_TEMPLATE = (
    "{%- if tools %}TOOLS:{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{%- for m in messages %}{% if m.tool_calls %}CALL:{% for call in m.tool_calls %}{{ call.function.name }}"
    "({{ call.function.arguments | tojson }}){% endfor %}"
    "{% elif m.role == 'tool' %}RESULT:{{ m.content }}\n{% else %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
DATED_TEMPLATE = "{{ strftime_now('%d %b %Y') }} " + TOOLS_TEMPLATE
NO_TOOLS_TEMPLATE = "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}" + CHAT_TEMPLATE
DICT_TEMPLATE = "{% for m in messages %}{% for call in m.tool_calls %}{{ call.function.arguments.items() | list }}{% endfor %}{% endfor %}x"


def sides(directory: Path, template: Any, other: Any = None) -> tuple[TextCodec, Any]:
    """The codec of a directory with one template, and transformers' tokenizer of one with another (or the same)."""
    save_tokenizer(directory / "ours", chat_template=template)
    save_tokenizer(directory / "theirs", chat_template=other or template)
    return load_codec(directory / "ours"), load_transformers_tokenizer(directory / "theirs")


@pytest.mark.parametrize(
    ("template", "refused"),
    [
        (CHAT_TEMPLATE, []),
        (TOOLS_TEMPLATE, []),
        (NO_SYSTEM_TEMPLATE, ["a system turn", "a system turn with tools"]),
        (NO_TOOLS_TEMPLATE, [probe.name for probe in PROBES if probe.tools]),
        (DICT_TEMPLATE, ["a call whose arguments are text"]),
    ],
)
def test_what_is_refused_is_refused_on_both_sides(tmp_path: Path, template: str, refused: list[str]) -> None:
    """A template that ignores tools is as good as one that writes or refuses them."""
    record = check_chats(*sides(tmp_path, template))
    assert record == {"summary": "chat template equal", "conversations": len(PROBES), "refused_on_both_sides": refused}


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (CHAT_TEMPLATE.replace("\n", ""), CHAT_TEMPLATE, "for a question"),
        (TOOLS_TEMPLATE.replace("{%- if tools %}", "{%- if false %}"), TOOLS_TEMPLATE, "'TOOLS:.*for a question with tools"),
        (TOOLS_TEMPLATE.replace("RESULT", "ANSWER"), TOOLS_TEMPLATE, "ANSWER.*RESULT.*for a tool's answer"),
        (NO_SYSTEM_TEMPLATE, CHAT_TEMPLATE, "an error instead of .*for a system turn"),
        (CHAT_TEMPLATE, NO_TOOLS_TEMPLATE, "instead of an error for a question with tools"),
    ],
)
def test_a_difference_names_the_conversation(tmp_path: Path, ours: str, theirs: str, words: str) -> None:
    with pytest.raises(QualityError, match=f"the chat template gives (.*){words}"):
        check_chats(*sides(tmp_path, ours, theirs))


def test_tools_that_do_not_reach_the_template_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = TextCodec.render_chat
    monkeypatch.setattr(TextCodec, "render_chat", lambda self, messages, tools=None: genuine(self, messages))
    assert check_chats(*sides(tmp_path / "a", CHAT_TEMPLATE))["summary"] == "chat template equal"
    with pytest.raises(QualityError, match="for a question with tools"):
        check_chats(*sides(tmp_path / "b", TOOLS_TEMPLATE))


def test_a_template_that_writes_the_date_is_compared_on_the_engines_date(tmp_path: Path) -> None:
    """Today's date would make any two renderings differ once a day, and the engine writes its build date."""
    codec, source = sides(tmp_path, DATED_TEMPLATE)
    codec.clock = datetime(2023, 11, 14, tzinfo=UTC)
    assert check_chats(codec, source)["summary"] == "chat template equal"
    codec, source = sides(tmp_path, DATED_TEMPLATE.replace("RESULT", "ANSWER"), DATED_TEMPLATE)
    codec.clock = datetime(2023, 11, 14, tzinfo=UTC)
    with pytest.raises(QualityError, match="for a tool's answer"):
        check_chats(codec, source)


def test_of_several_named_templates_the_default_one_counts(tmp_path: Path) -> None:
    """transformers takes `tool_use` where there are tools; an engine keeps the default template alone, and a note says so."""
    named = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tool_use", "template": TOOLS_TEMPLATE}]
    assert check_chats(*sides(tmp_path, CHAT_TEMPLATE, named))["summary"] == "chat template equal"


def test_without_a_template_there_is_nothing_to_compare(tmp_path: Path) -> None:
    assert check_chats(*sides(tmp_path, None))["summary"] == "no chat template"
