"""What a model is measured on: token ids cut from a text, or from a job's own lines.

Text. It is tokenized as one piece and cut into windows that do not overlap. A window begins with what the tokenizer puts before a prompt
(BOS, or nothing) and goes on with text up to the context length; what is left behind the last whole window is not used. So every window is
scored at the stated context length, and as the model sees a prompt when it serves. (llama.cpp's `perplexity` and the scripts of the GPTQ
paper cut alike; the former scores the second half of a window only, the latter puts BOS before the first window alone.)

Lines. Each is one sample, as calibration reads it: the prompt, or the conversation through the chat template, with the opening of an answer
unless its last message is the assistant's. Lines longer than the context length are cut.

Every token but the first of a sample is scored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from dspark.converters.calibration.samples import sample_of_line
from dspark.runtime.jobs.lines import is_blank
from dspark.runtime.jobs.prompts import PromptBuilder
from dspark.runtime.jobs.tokenizer import TextCodec
from dspark.runtime.spec.errors import InputError, RequestError, UsageError
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.sampling_params import SamplingParams

DEFAULT_CONTEXT = 2048
CHARACTERS_PER_TOKEN = 8
"""How much of a long text is tokenized at first when only so many tokens of it are wanted."""


@dataclass(frozen=True)
class TokenSet:
    """Samples out of one file. kind: "text", "prompts" or "held-out" (see `held_out_samples`). xxh3: of the file's bytes.

    notes: what the user should know of the choice.
    """

    path: Path
    kind: str
    xxh3: str
    context_length: int
    samples: list[list[int]]
    notes: tuple[str, ...] = ()

    @property
    def num_scored(self) -> int:
        return sum(len(sample) - 1 for sample in self.samples)

    def describe(self) -> str:
        """In words, such as "12 windows of 2048 tokens"."""
        count = len(self.samples)
        if self.kind == "text":
            return f"{count} {'window' if count == 1 else 'windows'} of {self.context_length} tokens"
        if self.kind == "held-out":
            return f"{count} {'sample' if count == 1 else 'samples'} that the quantizer was not shown"
        return f"{count} {'line' if count == 1 else 'lines'} of up to {self.context_length} tokens"


def resolve_context(config: ModelConfig, wanted: int | None) -> int:
    """The context length of an evaluation. Raises UsageError when more is wanted than the model has."""
    if wanted is not None and wanted > config.context_length:
        raise UsageError(f"--context-length is {wanted}, the model's context is {config.context_length}", "type less")
    return wanted or min(DEFAULT_CONTEXT, config.context_length)


def text_windows(path: Path, codec: TextCodec, config: ModelConfig, context_length: int, max_tokens: int | None = None) -> TokenSet:
    """Windows of a UTF-8 text file. max_tokens: of all windows together.

    Raises InputError for a file that cannot be read or decoded, or has too few tokens for one window; UsageError when max_tokens is less
    than one window.
    """
    if max_tokens is not None and max_tokens < context_length:
        raise UsageError(
            f"at most {max_tokens} tokens are wanted, one window has {context_length}",
            f"type --context-length {max(max_tokens, 2)} or less",
        )
    data = _read(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"text '{path}' is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}", "convert it first"
        ) from error
    prefix = leading_tokens(codec)
    step = context_length - len(prefix)
    if step < 1:
        raise UsageError(f"--context-length is {context_length}, of which the tokenizer takes {len(prefix)} itself", "type more")
    wanted = None if max_tokens is None else max_tokens // context_length * step
    ids = _beginning(codec, text, wanted)
    if len(ids) < step:
        what = f"text '{path}' has {len(ids)} tokens, one window of {context_length} needs {step}"
        shorter = len(ids) + len(prefix)
        raise InputError(what, f"give more text, or type --context-length {shorter} or less" if shorter > 1 else "give more text")
    samples = [prefix + ids[start : start + step] for start in range(0, len(ids) - step + 1, step)]
    left = len(ids) - len(samples) * step
    _check_ids(samples, codec, config, path)
    notes = (f"{left} tokens behind the last whole window are not used",) if left and wanted is None else ()
    return TokenSet(path, "text", xxhash.xxh3_128_hexdigest(data), context_length, samples, notes)


def line_samples(path: Path, codec: TextCodec, config: ModelConfig, context_length: int, max_tokens: int | None = None) -> TokenSet:
    """A sample per line of a batch file. Lines that a job could not serve are left out and counted. max_tokens: of all samples together.

    Raises InputError when no line can be used.
    """
    data = _read(path)
    builder = PromptBuilder(codec, SamplingParams(), config.context_length, config.vocab_size)
    samples: list[list[int]] = []
    refused: list[str] = []
    num_cut, room = 0, max_tokens if max_tokens is not None else len(data) * context_length
    for number, raw in _lines(data):
        if room < 2:
            break
        try:
            ids, _ = sample_of_line(raw, number, builder)
            if len(ids) < 2:
                raise RequestError(f"{len(ids)} tokens, at least 2 are needed to score one")
        except RequestError as error:
            refused.append(f"line {number}: {error.message}")
            continue
        taken = ids[: min(context_length, room)]
        num_cut += len(taken) < len(ids)
        room -= len(taken)
        samples.append(taken)
    if not samples:
        reason = f" ({refused[0]})" if refused else ": it is empty"
        raise InputError(f"no line of '{path}' can be used{reason}", "give a JSONL file in the batch format: docs/lines.md")
    notes = [f"{num_cut} {'line is' if num_cut == 1 else 'lines are'} longer and cut"] if num_cut else []
    if refused:
        notes.append(f"{len(refused)} that cannot be served left out, the first is {refused[0]}")
    return TokenSet(path, "prompts", xxhash.xxh3_128_hexdigest(data), context_length, samples, tuple(notes))


def held_out_samples(path: Path, samples: list[list[int]], context_length: int, max_tokens: int) -> TokenSet:
    """Samples of a calibration file that the quantizer was not shown, as calibration reads them. max_tokens: of all together."""
    taken: list[list[int]] = []
    room = max_tokens
    for sample in samples:
        piece = sample[: min(context_length, room)]
        if len(piece) > 1:
            taken.append(piece)
            room -= len(piece)
    return TokenSet(path, "held-out", xxhash.xxh3_128_hexdigest(_read(path)), context_length, taken)


def leading_tokens(codec: TextCodec) -> list[int]:
    """What the tokenizer puts before a prompt: BOS, or nothing."""
    bare, full = codec.encode("a"), codec.encode("a", add_special_tokens=True)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise InputError(f"'{path}' is a directory", "give a file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"'{path}' cannot be read ({error.strerror})", "check the path") from error
    if not data.strip():
        raise InputError(f"'{path}' is empty", "give a file with text in it")
    return data


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of the lines that are not blank; only a line feed ends a line."""
    for number, raw in enumerate(data.split(b"\n"), 1):
        if not is_blank(raw, number):
            yield number, raw


def _beginning(codec: TextCodec, text: str, wanted: int | None) -> list[int]:
    """The first `wanted` token ids of a text, without tokenizing all of a long one: where it is cut, the last few tokens are spoiled."""
    if wanted is None:
        return codec.encode(text)
    size = CHARACTERS_PER_TOKEN * wanted
    while size < len(text):
        ids = codec.encode(text[:size])
        if len(ids) >= wanted + 4 * codec.longest_token:
            return ids[:wanted]
        size *= 2
    return codec.encode(text)[:wanted]


def _check_ids(samples: list[list[int]], codec: TextCodec, config: ModelConfig, path: Path) -> None:
    worst = max(map(max, samples))
    if worst >= config.vocab_size:
        known = f"the tokenizer knows {codec.vocab_size} tokens, the model {config.vocab_size}"
        raise InputError(f"'{path}' holds token {worst}, which the model does not have: {known}", "use another text")
