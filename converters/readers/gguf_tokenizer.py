"""The tokenizer in a GGUF file's metadata, as the fast tokenizer that the model was trained with.

`tokenizer.ggml.pre` names how text is split before the merges. A wrong split gives other ids only here and there (where white space meets
a digit, say), which nobody notices, so a name that is not in the table is refused rather than guessed. Patterns: llama.cpp
`src/llama-vocab.cpp` and the tokenizer.json files of the models themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.converters.readers.gguf_sentencepiece import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, build_sentencepiece
from dspark.converters.tokenizer_files import TokenizerBundle
from dspark.runtime.spec.errors import InputError, UnsupportedError

_LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# Tekken and GPT-4o cut words where a capital begins one; Tekken has no contractions and single digits
_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN_SPLIT = rf"{_WORD}*{_LOWER}+|{_WORD}+{_LOWER}*|\p{{N}}{_TAIL}"
_GPT4O_SPLIT = rf"{_WORD}*{_LOWER}+{_CONTRACTION}|{_WORD}+{_LOWER}*{_CONTRACTION}|\p{{N}}{{1,3}}{_TAIL}"
_LISTS: dict[str, Any] = {"tokens": str, "merges": str, "scores": (int, float), "token_type": int}
_INSTEAD = "convert the model's Hugging Face checkpoint"


@dataclass(frozen=True)
class _Pre:
    """How one `tokenizer.ggml.pre` splits text. add_bos: llama.cpp's default where the file does not say."""

    split: Callable[[], Any]
    normalizer: str | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _byte_level() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_byte_level() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _pattern(pattern: str) -> Callable[[], Any]:
    def split() -> Any:
        from tokenizers import Regex, pre_tokenizers

        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return split


_LLAMA3 = _Pre(_pattern(_LLAMA3_SPLIT), ignore_merges=True, add_bos=True)
PRE_TOKENIZERS: dict[str, _Pre] = {
    "gpt-2": _Pre(_byte_level),
    "smollm": _Pre(_digits_then_byte_level),
    "starcoder": _Pre(_digits_then_byte_level),
    "refact": _Pre(_digits_then_byte_level),  # Granite 3 too
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _Pre(_pattern(_LLAMA3_SPLIT)),  # cl100k: Phi-4, OLMo 2
    "smaug-bpe": _Pre(_pattern(_LLAMA3_SPLIT)),
    "qwen2": _Pre(_pattern(_QWEN2_SPLIT), normalizer="NFC"),
    "tekken": _Pre(_pattern(_TEKKEN_SPLIT), ignore_merges=True, add_bos=True),
    "gpt-4o": _Pre(_pattern(_GPT4O_SPLIT)),
}


def bundle_from_metadata(metadata: dict[str, Any], path: Path) -> TokenizerBundle | None:
    """The tokenizer of GGUF metadata, or None when the file has none.

    Raises UnsupportedError for a tokenizer model or `pre` that is not known (naming it), InputError for a damaged table.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "none":
        return None
    _check_kinds(metadata, path)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise InputError(f"'{path}' has a tokenizer without tokens", "download it again")
    if kind == "gpt2":
        tokenizer, default_bos = _byte_level_bpe(metadata, tokens, path)
    elif kind in ("llama", "gemma"):
        tokenizer, default_bos = _sentencepiece(metadata, tokens, path), True
    else:
        what = f"'{path}' has tokenizer.ggml.model '{kind}'"
        raise UnsupportedError(f"{what}, supported: gpt2 (byte-level BPE), llama (SentencePiece BPE)", _INSTEAD)
    special = {
        "bos_token": _token(metadata, tokens, "bos_token_id"),
        "eos_token": _token(metadata, tokens, "eos_token_id"),
        "unk_token": _token(metadata, tokens, "unknown_token_id"),
        "pad_token": _token(metadata, tokens, "padding_token_id"),
    }
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", default_bos))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    _add_ends(tokenizer, special["bos_token"] if add_bos else None, special["eos_token"] if add_eos else None)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {key: value for key, value in special.items() if value is not None}
    config["clean_up_tokenization_spaces"] = False
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if context:
        config["model_max_length"] = int(context)
    others = sorted(key.removeprefix("tokenizer.chat_template.") for key in metadata if key.startswith("tokenizer.chat_template."))
    notes = (f"chat templates left out: {', '.join(others)} (only the default one is kept)",) if others else ()
    return TokenizerBundle(tokenizer.to_str(), config, metadata.get("tokenizer.chat_template"), notes)


def _check_kinds(metadata: dict[str, Any], path: Path) -> None:
    """Raise InputError naming the first key of the tokenizer with a value of the wrong kind."""
    for name, kind in _LISTS.items():
        value = metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise InputError(f"'{path}' has a tokenizer.ggml.{name} that is no list of the right kind", "download it again")
    for key, value in metadata.items():
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id") and not isinstance(value, int):
            raise InputError(f"'{path}' has {key} {value!r:.40}, a token id is needed", "download it again")
    if not isinstance(metadata.get("tokenizer.chat_template", ""), str):
        raise InputError(f"'{path}' has a tokenizer.chat_template that is no text", "download it again")


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str], path: Path) -> tuple[Any, bool]:
    """The tokenizer, and whether it adds BOS where the file does not say."""
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(f"'{path}' has tokenizer.ggml.pre '{name}', supported: {', '.join(PRE_TOKENIZERS)}", _INSTEAD)
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise InputError(f"'{path}' has a tokenizer without merges", "download it again")
    pre = PRE_TOKENIZERS[name]
    return _build(tokens, merges, _types(metadata, tokens), pre, path), pre.add_bos


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], path: Path) -> Any:
    merges = metadata.get("tokenizer.ggml.merges")
    pairs = _pairs(merges, set(tokens), path) if isinstance(merges, list) else None
    vocabulary = Vocabulary(tokens, _types(metadata, tokens), metadata.get("tokenizer.ggml.scores") or [], pairs, path)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return build_sentencepiece(vocabulary, str(metadata.get("general.architecture")), prefix)


def _types(metadata: dict[str, Any], tokens: list[str]) -> list[int]:
    return metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)


def _pairs(merges: list[str], known: set[str], path: Path) -> list[tuple[str, str]]:
    """Merges as pairs. Raises InputError for one whose parts or result the vocabulary does not have."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    broken = [(left, right) for left, right in pairs if not {left, right, left + right} <= known]
    if broken:
        raise InputError(f"'{path}' has merges of tokens that are not in its vocabulary, such as {broken[0]}", "download it again")
    return pairs


def _build(tokens: list[str], merges: list[str], types: list[int], pre: _Pre, path: Path) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise InputError(f"'{path}' has a token list with repeats, or another number of token types", "download it again")
    pairs = _pairs(merges, set(vocabulary), path)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False, ignore_merges=pre.ignore_merges))
    if pre.normalizer:
        tokenizer.normalizer = getattr(normalizers, pre.normalizer)()
    tokenizer.pre_tokenizer = pre.split()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer


def _add_ends(tokenizer: Any, bos: str | None, eos: str | None) -> None:
    """Put a beginning and an end of text around every text that asks for special tokens."""
    from tokenizers import processors

    ends = [token for token in (bos, eos) if token is not None]
    if ends:
        single = " ".join(part for part in (bos, "$A", eos) if part is not None)
        pair = f"{single} {single.replace('$A', '$B')}"
        special = [(token, tokenizer.token_to_id(token)) for token in ends]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _token(metadata: dict[str, Any], tokens: list[str], key: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{key}")
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None
