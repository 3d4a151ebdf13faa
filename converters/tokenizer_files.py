"""The tokenizer of an engine: files that give the ids of transformers' AutoTokenizer without its source, and the chat template.

tokenizer.json          the fast tokenizer exactly as AutoTokenizer runs it, without truncation or padding
tokenizer_config.json   special tokens as strings, model_max_length, clean_up_tokenization_spaces
chat_template.jinja     the default chat template, when there is one
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.runtime.spec.errors import InputError, UnsupportedError

TOKENIZER_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_SOURCES = (TOKENIZER_NAME, CONFIG_NAME, "tokenizer.model", "vocab.json", "tekken.json")
_NO_LIMIT = 10**9  # transformers writes 1e30 for "no limit"


@dataclass(frozen=True)
class TokenizerBundle:
    """Everything that an engine keeps of a tokenizer. notes: what the user should know of it."""

    tokenizer_json: str
    config: dict[str, Any]
    chat_template: str | None = None
    notes: tuple[str, ...] = field(default=())

    def size(self) -> int:
        """Largest token id + 1."""
        from tokenizers import Tokenizer

        vocabulary = Tokenizer.from_str(self.tokenizer_json).get_vocab(with_added_tokens=True)
        return max(vocabulary.values(), default=-1) + 1

    def write(self, directory: Path) -> list[str]:
        """Write the files and return their names."""
        texts = {TOKENIZER_NAME: self.tokenizer_json, CONFIG_NAME: json.dumps(self.config, indent=1, ensure_ascii=False) + "\n"}
        if self.chat_template is not None:
            texts[TEMPLATE_NAME] = self.chat_template
        for name, text in texts.items():
            with (directory / name).open("w", encoding="utf-8", newline="") as file:  # a template's line ends are part of the prompt
                file.write(text)
        return list(texts)


def has_tokenizer_files(directory: Path) -> bool:
    """Whether a checkpoint directory has any tokenizer."""
    return any((directory / name).is_file() for name in _SOURCES)


def load_transformers_tokenizer(directory: Path) -> Any:
    """AutoTokenizer of a local directory; no code of the checkpoint is run. Raises InputError when transformers cannot read it."""
    from transformers import AutoTokenizer

    try:
        options = {"config": config} if (config := _class_hints(directory)) is not None else {}
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # transformers raises whatever the file made it stumble over
        raise InputError(f"the tokenizer in '{directory}' cannot be read ({error})", "check its tokenizer files") from error


def load_gguf_tokenizer(path: Path) -> Any:
    """AutoTokenizer of a GGUF file. Raises InputError when transformers cannot read it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise InputError(f"the tokenizer in '{path}' cannot be read by transformers ({error})", "type --no-audit to go on") from error


def _class_hints(directory: Path) -> Any:
    """What AutoTokenizer asks of the model's config (its type, and a tokenizer class), or None without a config.json.

    Given apart, so that a config whose other keys transformers stumbles over (a dtype "torch.bfloat16") does not cost the tokenizer.
    """
    from transformers import AutoConfig

    try:
        described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config = AutoConfig.for_model(described["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    config.tokenizer_class = described.get("tokenizer_class")
    config._name_or_path = str(directory)
    return config


def bundle_from_transformers(tokenizer: Any) -> TokenizerBundle:
    """The files of a transformers tokenizer. Raises UnsupportedError for one without a fast implementation."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        kind = type(tokenizer).__name__
        raise UnsupportedError(f"tokenizer class {kind} has no fast (tokenizer.json) form", "save the checkpoint with a fast tokenizer")
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {name: str(getattr(tokenizer, name)) for name in _SPECIAL_TOKENS if getattr(tokenizer, name, None) is not None}
    config["clean_up_tokenization_spaces"] = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
    limit = getattr(tokenizer, "model_max_length", None)
    if isinstance(limit, int) and limit < _NO_LIMIT:
        config["model_max_length"] = limit
    template, notes = default_template(getattr(tokenizer, "chat_template", None))
    return TokenizerBundle(copy.to_str(), config, template, notes)


def default_template(templates: Any) -> tuple[str | None, tuple[str, ...]]:
    """The template used when none is named, of one template or a table of them."""
    if templates is None or isinstance(templates, str):
        return templates, ()
    others = sorted(name for name in templates if name != "default")
    notes = (f"chat templates left out: {', '.join(others)} (only the default one is kept)",) if others else ()
    return templates.get("default"), notes


def read_bundle(directory: Path) -> TokenizerBundle | None:
    """The bundle of an engine directory, byte for byte, or None when it has no tokenizer."""
    path = directory / TOKENIZER_NAME
    if not path.is_file():
        return None
    template = directory / TEMPLATE_NAME
    try:
        config = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
        text = template.read_bytes().decode("utf-8") if template.is_file() else None
        return TokenizerBundle(path.read_text(encoding="utf-8"), config, text)
    except (OSError, ValueError) as error:
        raise InputError(f"the tokenizer in '{directory}' is damaged ({error})", "convert the checkpoint again") from error
