"""Text to token ids and back, and chat templates: the tokenizer of an engine directory.

Reads `tokenizer.json` with the `tokenizers` package, as transformers does, without importing transformers (which costs a second)
until a chat template is to be rendered.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from dspark.runtime.spec.errors import InputError, RequestError

NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextCodec:
    """A tokenizer with its special tokens and chat template. Made by `load_codec`.

    special_tokens: name ("bos_token", ...) to text. chat_template: Jinja text, or None. clock: what `strftime_now` in a chat
    template takes for now; None refuses such templates, since answers must not depend on the day of the run.
    """

    def __init__(
        self, tokenizer: Tokenizer, special_tokens: dict[str, str], chat_template: str | None, clock: datetime | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self.special_tokens = special_tokens
        self.chat_template = chat_template
        self.clock = clock

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens the tokenizer knows, added ones among them. The model may have more rows, or (a fault) fewer."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Token string -> id, added tokens among them."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode(skip_special_tokens=True)` leaves out."""
        return frozenset(i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token; in byte-level vocabularies a character stands for a byte."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of the text; special tokens in it are read as such. add_special_tokens: BOS and the like, as the tokenizer says."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the tokens, as transformers' decode with clean_up_tokenization_spaces=False. Incomplete characters become U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def warm_up(self) -> None:
        """Import the renderer and compile the template: a second that the first conversation would wait for."""
        if self.chat_template is not None:
            with contextlib.suppress(RequestError):  # a template may refuse this one
                self.render_chat([{"role": "user", "content": ""}])

    def render_chat(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """The prompt text of a conversation: transformers' sandboxed renderer, special tokens in scope.

        tools: JSON schemas of functions, as transformers' apply_chat_template takes them; many templates ignore them.
        Raises RequestError "no_chat_template", or "template_refused" with the template's own words.
        """
        if self.chat_template is None:
            raise RequestError(
                "messages need a chat template and this engine has none; give the whole text as prompt instead, "
                "or put a chat_template.jinja into the checkpoint and convert again",
                "no_chat_template",
                "messages",
            )
        from transformers.utils.chat_template_utils import render_jinja_template

        in_scope: dict[str, Any] = {**self.special_tokens, "tools": tools}
        self.pin_clock(self.chat_template)
        # transformers drops null fields (content, tool_calls) before a template sees them; templates rely on it.
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            rendered = render_jinja_template(
                conversations=[chat],
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                **in_scope,
            )
        except (MemoryError, ImportError):
            raise
        except Exception as error:  # a template may raise anything: its own sentence, or whatever its Jinja code stumbles over
            words = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(f"the chat template refuses these messages: {words}", "template_refused", "messages") from error
        return str(rendered[0][0])  # of one conversation: (texts, spans of the assistant)

    def pin_clock(self, template: str) -> None:
        """Templates with `strftime_now` write today's date into the prompt: give this one the engine's date instead.

        The renderer takes no callable from outside, so the global of its compiled (and cached) template is replaced.
        """
        if "strftime_now" not in template:
            return
        from transformers.utils import chat_template_utils

        compiled = chat_template_utils._compile_jinja_template(template)
        compiled.environment.globals["strftime_now"] = self._strftime_now

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._tokenizer.token_to_id(token)

    def _strftime_now(self, format: str) -> str:
        if self.clock is None:
            raise ValueError("it asks for today's date, and this engine directory has no engine.json with a build date")
        return self.clock.strftime(format)


def load_codec(engine_dir: Path | str) -> TextCodec:
    """The codec of an engine or checkpoint directory. Raises InputError when a file is missing or broken.

    Whether BOS is added is the post-processor's word in tokenizer.json; add_bos_token in tokenizer_config.json is not asked,
    as in transformers 5.
    """
    directory = Path(engine_dir)
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"{directory} has no tokenizer.json", "convert the checkpoint again with its tokenizer files")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise InputError(f"{path} cannot be read: {error}", "convert the checkpoint again") from error
    # A tokenizer.json may carry the padding and truncation of somebody's training run: neither is for us.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = {**_read_json(directory / "special_tokens_map.json"), **_read_json(directory / "tokenizer_config.json")}
    specials = {name: token.content for name in NAMED_SPECIALS if (token := _added_token(config.get(name))) is not None}
    _add_special_tokens(tokenizer, config)
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return TextCodec(tokenizer, specials, _chat_template(directory, config), _build_date(directory))


def _add_special_tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows, or that it alone calls special, as transformers adds them."""
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for _, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        token = _added_token(entry)
        if token is not None and token.content not in known:
            tokenizer.add_tokens([token])
            known[token.content] = token
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = [config.get(name) for name in NAMED_SPECIALS] + list(extra.values() if isinstance(extra, dict) else extra)
    for token in map(_added_token, named):
        if token is not None and not getattr(known.get(token.content), "special", False):
            tokenizer.add_special_tokens([token])


def _added_token(value: Any) -> AddedToken | None:
    """A special token of tokenizer_config.json: a text, or an object as transformers writes it."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {key: bool(value[key]) for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in value}
        return AddedToken(value["content"], **flags)
    return None


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else the one in tokenizer_config.json; of several named ones the one called "default"."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        if "default" not in template:
            raise InputError(
                f"{directory / 'tokenizer_config.json'} has the chat templates {sorted(template)} and none called default",
                f"save the one to use as {path.name}",
            )
        template = template["default"]
    return template


def _build_date(directory: Path) -> datetime | None:
    created = _read_json(directory / "engine.json").get("created")
    return datetime.fromtimestamp(created, UTC) if isinstance(created, int) else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file; {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path} holds no JSON object")
    return data
