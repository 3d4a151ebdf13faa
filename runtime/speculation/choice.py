"""From `--speculative` and `--draft` to what a run speculates with. No tensors: a wrong flag is known before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.manifest import MANIFEST_NAME
from dspark.runtime.speculation.pairing import DRAFT_FOLDER, DRAFT_METHODS, Pairing, drafter_of, load_pairing, with_ngrams

HEADS_NAME = "draft.json"


@dataclass(frozen=True)
class Choice:
    """method: as in `Pairing`. draft: directory of its draft, None where it needs none. pairing: the engine's, if it has one."""

    method: str
    draft: Path | None = None
    pairing: Pairing | None = None

    @property
    def drafter(self) -> str | None:
        """The method of its drafter, None where it needs none."""
        return drafter_of(self.method)

    @property
    def has_ngrams(self) -> bool:
        """Whether it drafts from text, alone or before a drafter."""
        return self.method not in ("off", self.drafter)


def choose_speculation(config: EngineConfig, engine_dir: Path | None) -> Choice:
    """What this run speculates with; "auto" is the engine's pairing, else n-grams, before the draft where one is named.

    Raises UsageError for flags that do not go together, InputError for a draft that is none.
    """
    _check_rule(config)
    choice = _choose(config, engine_dir)
    if config.speculative_tree and choice.drafter is not None:
        raise UsageError(
            f"--speculative-tree is given, but drafts of {choice.method} are chains",
            "type --speculative ngram, or leave --speculative-tree out",
        )
    return choice


def _check_rule(config: EngineConfig) -> None:
    """Raise UsageError when trees or the rejection rule are asked for beside what excludes them."""
    rejection = config.speculative_sampling == "rejection"
    asked = "--speculative-sampling is rejection" if rejection else "--speculative-tree is given"
    if config.speculative == "off" and (rejection or config.speculative_tree):
        raise UsageError(f"{asked}, but --speculative is off", "type --speculative auto, or leave it out")
    if rejection and config.speculative_tree:
        raise UsageError(f"{asked}, which verifies chains, and --speculative-tree is given", "leave one of them out")
    if rejection and config.deterministic:
        raise UsageError(f"{asked}, so texts depend on the drafts, and --deterministic is given", "leave one of them out")


def _choose(config: EngineConfig, engine_dir: Path | None) -> Choice:
    wanted = config.speculative
    if config.draft_memory is not None and wanted not in ("auto", "ngram"):
        raise UsageError(f"--draft-memory is given, but --speculative is {wanted}", "type --speculative ngram, or leave --draft-memory out")
    if wanted in ("off", "ngram"):
        if config.draft is not None:
            raise UsageError(f"--draft is given, but --speculative is {wanted}", "type --speculative auto, or leave --draft out")
        return Choice(wanted, pairing=load_pairing(engine_dir) if engine_dir is not None and wanted != "off" else None)
    pairing = load_pairing(engine_dir) if engine_dir is not None else None
    directory = _directory(config, engine_dir, pairing)
    if wanted == "auto":
        if directory is None:
            return Choice(pairing.method if pairing is not None else "ngram", None, pairing)
        found = draft_method(directory)
        is_measured = pairing is not None and drafter_of(pairing.method) == found
        return Choice(pairing.method if pairing is not None and is_measured else with_ngrams(found), directory, pairing)
    if directory is None:
        raise UsageError(
            f"--speculative is {wanted}, but the engine has no draft", "type --draft DIR, or pair one: dspark pair ENGINE --draft DIR"
        )
    found = draft_method(directory)
    if found != wanted:
        raise UsageError(f"--speculative is {wanted}, the draft in '{directory}' is for {found}", f"type --speculative {found}")
    return Choice(found, directory, pairing)


def _directory(config: EngineConfig, engine_dir: Path | None, pairing: Pairing | None) -> Path | None:
    """The draft that was named, else the paired one; without a wish for a method only if it has won."""
    if config.draft is not None:
        return Path(config.draft).expanduser()
    if engine_dir is None or pairing is None:
        return engine_dir / DRAFT_FOLDER if engine_dir is not None and _is_draft(engine_dir / DRAFT_FOLDER) and _names(config) else None
    if pairing.draft is not None and (_names(config) or drafter_of(pairing.method) is not None):
        return engine_dir / pairing.draft
    return None


def _names(config: EngineConfig) -> bool:
    return config.speculative in DRAFT_METHODS


def _is_draft(directory: Path) -> bool:
    return (directory / MANIFEST_NAME).is_file() or (directory / HEADS_NAME).is_file()


def draft_method(directory: Path) -> str:
    """What drafts with the content of a directory: an engine is a draft model, stored heads say what they are. Raises InputError."""
    if (directory / MANIFEST_NAME).is_file():
        return "draft-model"
    path = directory / HEADS_NAME
    if not path.is_file():
        what = "is no directory" if not directory.is_dir() else f"has neither {MANIFEST_NAME} nor {HEADS_NAME}"
        raise InputError(
            f"'{directory}' {what}, so it is no draft", "name an engine, or pair a published draft: dspark pair ENGINE --draft DIR"
        )
    try:
        method = str(json.loads(path.read_text(encoding="utf-8"))["config"]["method"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"'{path}' is damaged ({error})", "pair the engine with the draft again") from error
    if method not in DRAFT_METHODS:
        raise InputError(
            f"'{path}' has method '{method[:40]}', allowed: {', '.join(DRAFT_METHODS)}", "pair the engine with the draft again"
        )
    return method
