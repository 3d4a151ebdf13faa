"""The configuration file: a flat TOML file whose keys are flag names, with dashes or underscores.

Keys at the top serve every command that has such a flag; a table named like a command serves that command alone and wins.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.sampling_params import did_you_mean

if TYPE_CHECKING:
    from dspark_cli.options import Kind

DEFAULT_CONFIG = "dspark.toml"


def read_config(path: Path | None, command: str, keys: dict[str, dict[str, Kind]]) -> dict[str, Any]:
    """Values for one command. path None: ./dspark.toml if it is there. keys: what each command knows.

    Relative paths are resolved against the file's directory. Raises InputError for a file that cannot be read and UsageError for a key
    that no command has or a value of the wrong type.
    """
    if path is None:
        path = Path(DEFAULT_CONFIG)
        if not path.exists():
            return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"configuration file '{path}' cannot be read ({error.strerror})", "check --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"configuration file '{path}' is not valid TOML ({error})", 'write lines such as: temperature = 0.7, engine = "DIR"'
        ) from error
    values: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    everything = {name for known in keys.values() for name in known}
    for key, value in document.items():
        name = key.replace("-", "_")
        if isinstance(value, dict) and key in keys:
            tables = value if key == command else tables
            _check_table(path, key, value, keys[key])
        elif name not in everything:
            raise _unknown(path, key, sorted(everything))
        elif name in keys[command]:
            values[name] = _value(path, key, value, keys[command][name])
    for key, value in tables.items():
        name = key.replace("-", "_")
        values[name] = _value(path, key, value, keys[command][name])
    return values


def _unknown(path: Path, key: str, known: list[str]) -> UsageError:
    near = did_you_mean(key.replace("-", "_"), known).replace("_", "-")
    return UsageError(f"'{path}' has the key '{key}', which is no flag{near}", "keys are flag names: see dspark generate --help")


def _check_table(path: Path, table: str, content: dict[str, Any], known: dict[str, Kind]) -> None:
    for key in content:
        if key.replace("-", "_") not in known:
            raise _unknown(path, f"{table}.{key}", [f"{table}.{name}" for name in known])


def _value(path: Path, key: str, value: Any, kind: Kind) -> Any:
    """A TOML value as the field's type; sampling values are checked by the caller as JSONL values are."""
    if kind.repeated:
        return value if isinstance(value, dict) else tuple(value) if isinstance(value, list) else (value,)
    wanted = kind.element
    if wanted is Path and isinstance(value, str):
        return path.parent / Path(value).expanduser()
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", Path: "a text"}
        raise UsageError(f"'{path}': {key} is {value!r}, allowed: {names.get(wanted, wanted.__name__)}")
    return value
