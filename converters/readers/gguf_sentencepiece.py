"""SentencePiece tokenizers in GGUF (`tokenizer.ggml.model` "llama"): tokens with scores, byte tokens `<0x00>` to `<0xFF>`, `▁` for a space.

SentencePiece's BPE joins the pair whose result has the highest score; a fast tokenizer has a ranked list of pairs. The list follows from
the scores: every way to cut a token in two known ones, in order of its score. What is done with spaces is the family's, not in the file:

    llama    one `▁` before a text that does not begin with a space, none after a special token (what transformers does with such a file)
    phi3     one before every piece of text between special tokens, and white space after a special token is dropped (Phi-3's own files)
    gemma    none; tokens of several spaces are stored as spaces, and the merges follow the order of the tokens, not the scores
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.runtime.spec.errors import InputError

SPACE = "▁"
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's special tokens that leave the white space after them alone


@dataclass(frozen=True)
class Vocabulary:
    """The token table of a file. types: as `tokenizer.ggml.token_type`; scores may be empty where merges are given."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[tuple[str, str]] | None
    path: Path

    def unknown(self) -> str | None:
        return next((token for token, kind in zip(self.tokens, self.types, strict=True) if kind == UNKNOWN), None)


def build_sentencepiece(vocabulary: Vocabulary, architecture: str, add_space_prefix: bool) -> Any:
    """A `tokenizers.Tokenizer`, without what goes around a text (BOS, EOS). Raises InputError for a damaged table."""
    from tokenizers import AddedToken, Tokenizer, models

    gemma, phi3 = architecture.startswith("gemma"), architecture == "phi3"
    tokens = [_spell_spaces(token) for token in vocabulary.tokens] if gemma else vocabulary.tokens
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens) or len(vocabulary.types) != len(tokens):
        raise InputError(f"'{vocabulary.path}' has a token list with repeats, or another number of token types", "download it again")
    merges = vocabulary.merges
    if merges is None:
        if not gemma and len(vocabulary.scores) != len(tokens):
            raise InputError(f"'{vocabulary.path}' has {len(vocabulary.scores)} scores for {len(tokens)} tokens", "download it again")
        scores = [-float(index) for index in range(len(tokens))] if gemma else vocabulary.scores
        whole = {CONTROL, UNKNOWN, BYTE}
        merges = ranked_merges(ids, scores, {token for token, kind in zip(tokens, vocabulary.types, strict=True) if kind in whole})
    model = models.BPE(vocab=ids, merges=merges, unk_token=vocabulary.unknown(), fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    _set_spaces(tokenizer, gemma, phi3, add_space_prefix)
    for token, spelled, kind in zip(vocabulary.tokens, tokens, vocabulary.types, strict=True):
        if kind in (CONTROL, UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False, rstrip=phi3 and token not in _KEEPS_SPACE)])
        elif kind == USER_DEFINED and token == spelled:  # runs of spaces are reached by merges
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False, rstrip=phi3 and token == "</s>")])
    return tokenizer


def ranked_merges(ids: dict[str, int], scores: list[float], whole: set[str]) -> list[tuple[str, str]]:
    """Every pair of tokens whose join is a token, best score of the join first.

    whole: tokens that are never put together (control, unknown and byte tokens) nor parts of others. Ties go to the longer left part, then
    to the smaller ids, as in transformers.
    """
    found = []
    for token, index in ids.items():
        if token in whole:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids and left not in whole and right not in whole:
                found.append((-scores[index], -cut, cut - len(token), index, ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _spell_spaces(token: str) -> str:
    return SPACE * len(token) if token and not token.strip(" ") else token


def _set_spaces(tokenizer: Any, gemma: bool, phi3: bool, add_prefix: bool) -> None:
    from tokenizers import decoders, normalizers, pre_tokenizers

    if gemma:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
        add_prefix = False
    elif phi3:
        prefix = [normalizers.Prepend(SPACE)] if add_prefix else []
        tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    else:
        scheme = "first" if add_prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if add_prefix else []))
