"""Commands from dataclasses: each field is a flag, a key of the configuration file and a row of the help, declared once.

    @dataclass(frozen=True)
    class InspectOptions:
        path: Path = argument("checkpoint, adapter or engine directory")
        depth: int = flag(2, "levels to show", low=1, high=9)

    def inspect(console: Console, options: InspectOptions) -> int | None:
        '''What PATH is.'''          # the help text
        ...                          # data to console.data / console.document, the rest to console.note; return the exit code

    def register(app: typer.Typer) -> None:
        add_command(app, inspect, InspectOptions)

Every command also gets --config, --json, --quiet, --verbose and --log-file. A flag wins over the configuration file, and that over the
default. This module imports the standard library, typer and the specs only: help must not wait for torch.
"""

# ruff: noqa: RUF009 - flag() and argument() return fields of frozen dataclasses
from __future__ import annotations

import inspect as introspect
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

import typer

from dspark.runtime.spec.engine_config import check_setting
from dspark.runtime.spec.errors import RequestError, UsageError
from dspark.runtime.spec.sampling_params import SamplingParams, parse_option
from dspark_cli.config_file import read_config
from dspark_cli.console import Console, guarded


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] = (),
    low: float | None = None,
    high: float | None = None,
    metavar: str = "",
    names: str = "",
) -> Any:
    """An option field. names: the flag's own spelling where it is not the field's, such as "--resume/--fresh"."""
    return field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high, "metavar": metavar, "names": names})


def argument(help: str, *, default: Any = MISSING, metavar: str = "") -> Any:
    """A positional field; required unless it has a default. Never read from the configuration file."""
    metadata = {"help": help, "argument": True, "metavar": metavar}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass(frozen=True)
class OutputOptions:
    """Flags of every command."""

    config: Path | None = flag(None, "configuration file; keys are flag names (default: ./dspark.toml if it is there)", metavar="FILE.toml")
    json: bool = flag(False, "one JSON document on stdout", names="--json")
    quiet: bool = flag(False, "problems only", names="--quiet")
    verbose: bool = flag(False, "more lines on stderr", names="--verbose")
    log_file: Path | None = flag(None, "append a full log to FILE", metavar="FILE")


@dataclass(frozen=True)
class Kind:
    """A field's value: its element type and whether it may be absent or repeated."""

    element: type
    repeated: bool = False


def kind_of(cls: type, spec: Field[Any]) -> Kind:
    """Kind of a dataclass field, from its annotation: T, T | None or tuple[T, ...]."""
    hint = typing.get_type_hints(cls)[spec.name]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        element = typing.get_args(hint)[0]
        return Kind(element if isinstance(element, type) else str, True)
    return Kind(hint)


def flag_names(spec: Field[Any], kind: Kind) -> str:
    """The flag as it is typed; a switch has a negative, so that it can win over the configuration file."""
    if spec.metadata.get("names"):
        return str(spec.metadata["names"])
    dashed = spec.name.replace("_", "-")
    return f"--{dashed}/--no-{dashed}" if kind.element is bool else f"--{dashed}"


def _help(spec: Field[Any], kind: Kind) -> str:
    text = str(spec.metadata["help"])
    default = spec.default
    if kind.repeated:
        text += " (may be repeated)"
    if "default:" in text or default is None or default is False or default is MISSING or default == ():
        return text
    if default is True:
        default = "on"
    return f"{text} (default: {default})"


def _parameter(cls: type, spec: Field[Any]) -> introspect.Parameter:
    """A typer parameter whose value is None unless it was typed. Values arrive as text: `parse_text` names what is allowed."""
    kind = kind_of(cls, spec)
    meta = spec.metadata
    choices = tuple(str(choice) for choice in meta.get("choices") or ())
    hint: Any = list[str] if kind.repeated else bool if kind.element is bool else str
    common: dict[str, Any] = {"help": _help(spec, kind), "show_default": False}
    if kind.element is not bool:
        common["metavar"] = meta.get("metavar") or "|".join(choices) or METAVARS.get(spec.name) or METAVARS[kind.element]
    if choices:
        common["autocompletion"] = lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]
    if meta.get("argument"):
        common["metavar"] = meta.get("metavar") or spec.name.upper()
        required = spec.default is MISSING
        info: Any = typer.Argument(... if required else None, **common)
        hint = hint if required else hint | None
    else:
        info = typer.Option(None, flag_names(spec, kind), **common)
        hint = hint | None
    return introspect.Parameter(spec.name, introspect.Parameter.KEYWORD_ONLY, default=info, annotation=hint)


def parse_text(name: str, text: str, kind: Kind) -> Any:
    """A typed value as the field's type. Raises UsageError."""
    if kind.element in (int, float):
        try:
            return kind.element(text)
        except ValueError:
            wanted = "an integer" if kind.element is int else "a number"
            raise UsageError(f"--{name.replace('_', '-')} is '{text}', allowed: {wanted}") from None
    return Path(text).expanduser() if kind.element is Path else text


def _typed_value(name: str, value: Any, kind: Kind) -> Any:
    if isinstance(value, bool):
        return value
    if kind.repeated:
        return tuple(parse_text(name, text, kind) for text in value)
    return parse_text(name, value, kind)


def parse_bias_flag(entries: list[str]) -> dict[str, float]:
    """--logit-bias ID=NUMBER, repeated, as the JSON key's object."""
    pairs: dict[str, float] = {}
    for entry in entries:
        token, separator, bias = entry.partition("=")
        try:
            pairs[token.strip()] = float(bias)
        except ValueError:
            separator = ""
        if not separator:
            raise UsageError(f"--logit-bias is '{entry}', allowed: ID=NUMBER", "such as --logit-bias 11=-100")
    return pairs


def sampling_values(given: dict[str, Any]) -> dict[str, Any]:
    """Checked sampling defaults that were typed or configured; the others are the engine's to say. Raises UsageError."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        try:
            values[name] = parse_option(name, value)
        except RequestError as error:
            raise UsageError(f"--{name.replace('_', '-')}: {error.message}") from error
    return values


def build(cls: type, given: dict[str, Any]) -> Any:
    """An instance from the values that were given; SamplingParams as a dict of just those. Raises UsageError."""
    if cls is SamplingParams:
        return sampling_values(given)
    for spec in fields(cls):
        if spec.name in given and not spec.metadata.get("argument"):
            check_setting(spec.name, given[spec.name], spec.metadata)
    return cls(**given)


METAVARS: dict[type | str, str] = {int: "N", float: "X", str: "TEXT", Path: "FILE", "logit_bias": "ID=NUMBER"}

COMMANDS: dict[str, tuple[type, ...]] = {}
"""Registered commands and their option classes; a configuration file may hold the keys of all of them."""


def command_fields(command: str) -> list[tuple[type, Field[Any]]]:
    """Every field of a command. Of two with one name the first is meant: --seed is the job's, not a line's."""
    found: dict[str, tuple[type, Field[Any]]] = {}
    for cls in COMMANDS[command]:
        for spec in fields(cls):
            found.setdefault(spec.name, (cls, spec))
    return list(found.values())


def config_keys(command: str) -> dict[str, Kind]:
    """Keys that a command reads from a configuration file."""
    return {
        spec.name: kind_of(cls, spec)
        for cls, spec in command_fields(command)
        if not spec.metadata.get("argument") and spec.name != "config"
    }


def resolve(command: str, typed: dict[str, Any]) -> list[Any]:
    """One object per option class, from flags, configuration file and defaults."""
    kinds = {spec.name: kind_of(cls, spec) for cls, spec in command_fields(command)}
    typed = {name: _typed_value(name, value, kinds[name]) for name, value in typed.items() if value is not None and value != []}
    if typed.get("logit_bias"):
        typed["logit_bias"] = parse_bias_flag(typed["logit_bias"])
    configured = read_config(typed.get("config"), command, {name: config_keys(name) for name in COMMANDS})
    given = {**configured, **typed}
    values: dict[type, dict[str, Any]] = {cls: {} for cls in COMMANDS[command]}
    for cls, spec in command_fields(command):
        if spec.name in given:
            values[cls][spec.name] = given[spec.name]
    return [build(cls, chosen) for cls, chosen in values.items()]


def add_command(app: typer.Typer, function: Callable[..., int | None], *classes: type) -> None:
    """Register `function(console, *objects)` as a command named like it, with the flags of the classes."""
    name = function.__name__.replace("_", "-")
    COMMANDS[name] = (*classes, OutputOptions)

    def callback(**typed: Any) -> None:
        def body() -> int | None:
            *objects, output = resolve(name, typed)
            console.configure(output.json, output.quiet, output.verbose, output.log_file)
            return function(console, *objects)

        console = Console(name)
        raise typer.Exit(guarded(console, body))

    parameters = [_parameter(cls, spec) for cls, spec in command_fields(name)]
    parameters.sort(key=lambda p: not isinstance(p.default, typer.models.ArgumentInfo))
    callback.__signature__ = introspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {p.name: p.annotation for p in parameters}
    callback.__doc__ = function.__doc__
    app.command(name, help=introspect.cleandoc(function.__doc__ or ""))(callback)
