"""What the model is shown while it is quantized: a text file, or the very lines of a batch job.

A `.jsonl` file is read as `dspark generate` reads it, each line rendered through the model's chat template, one sample a line; lines
`{"text": ...}` are plain text. Any other file is UTF-8 text, cut into windows. Which samples are taken and in which order they are computed
depends on their content alone, so that the same lines in another order give the same statistics to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson
import xxhash

from dspark.converters.readers.base import summarize
from dspark.runtime.jobs.lines import JobLine, is_blank, parse_line
from dspark.runtime.jobs.prompts import PromptBuilder
from dspark.runtime.jobs.tokenizer import TextCodec
from dspark.runtime.spec.errors import InputError, RequestError
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.sampling_params import SamplingParams

NUM_SAMPLES, SAMPLE_TOKENS = 128, 512
MIN_TOKENS = 32
"""Fewer tokens than this are refused: the statistics of a layer would be those of a few words."""
FEW_TOKENS = 4096
"""Fewer than this are used with a warning."""
_READ_CHARACTERS_PER_TOKEN = 16  # of a text: more than any tokenizer puts into its tokens on average
_STRETCHES = 64  # a text longer than what is needed is read in this many places, so that its beginning does not stand for all of it


@dataclass(frozen=True)
class SampleRequest:
    """What to take from a file. num_samples: at most; sample_tokens: longer samples are cut there (a text makes windows of it).

    self_generate: lines without an answer get the model's own greedy one.
    """

    path: Path
    num_samples: int = NUM_SAMPLES
    sample_tokens: int = SAMPLE_TOKENS
    self_generate: bool = False


Answer = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, most tokens of prompt and answer together) -> each prompt with the model's greedy answer behind it"""


@dataclass(frozen=True)
class Found:
    """A sample of a file. number: its line or window, from 1. open: it is a prompt, and nothing answers it."""

    number: int
    tokens: list[int]
    open: bool = False


@dataclass(frozen=True)
class CalibrationSet:
    """Token ids of each sample, in an order that only their content decides; what the user should know of them.

    held_out: as many further samples of the file as there were, not shown to the quantizer: what its result is measured on.
    """

    samples: list[list[int]]
    notes: tuple[str, ...]
    source: str
    held_out: list[list[int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.samples))

    @property
    def digest(self) -> str:
        """Hex xxh3_128 of all samples."""
        digest = xxhash.xxh3_128()
        for sample in self.samples:
            digest.update(_content_key(sample).to_bytes(16, "little"))
        return digest.hexdigest()

    def record(self) -> dict[str, object]:
        """For the manifest."""
        return {"file": self.source, "samples": len(self.samples), "tokens": self.num_tokens, "digest": self.digest}


def load_samples(request: SampleRequest, codec: TextCodec, config: ModelConfig, answer: Answer | None = None) -> CalibrationSet:
    """Read, check and choose the samples. answer: for a request with self_generate.

    Raises InputError when the file cannot be read, has no usable sample, or fewer than MIN_TOKENS tokens.
    """
    limit = min(request.sample_tokens, config.context_length)
    notes: list[str] = []
    if request.path.suffix == ".jsonl":
        found = _from_lines(request.path, codec, config, limit, notes)
    else:
        found = _from_text(request.path, codec, limit, request.num_samples, notes)
    chosen = choose(found, request, notes)
    if request.self_generate and answer is not None:
        chosen = _answered(chosen, {_content_key(sample.tokens) for sample in found if sample.open}, answer, limit)
    return chosen


def _answered(chosen: CalibrationSet, open_keys: set[int], answer: Answer, limit: int) -> CalibrationSet:
    """The same samples, those that nothing answers with the model's own answers."""

    def complete(samples: list[list[int]]) -> list[list[int]]:
        places = [place for place, tokens in enumerate(samples) if _content_key(tokens) in open_keys and len(tokens) < limit]
        answered = dict(zip(places, answer([samples[place] for place in places], limit) if places else [], strict=True))
        return [answered.get(place, tokens) for place, tokens in enumerate(samples)]

    samples, held_out = complete(chosen.samples), complete(chosen.held_out)
    changed = sum(before is not after for before, after in zip(chosen.samples, samples, strict=True))
    notes = (*chosen.notes, f"calibration: {changed} samples got the model's own answers")
    return replace(chosen, samples=samples, held_out=held_out, notes=notes)


def choose(found: Sequence[Found], request: SampleRequest, notes: list[str]) -> CalibrationSet:
    """Drop repeated and degenerate samples, take the first num_samples by content."""
    usable: dict[int, list[int]] = {}
    repeated, flat = [], []
    for sample in found:
        key = _content_key(sample.tokens)
        if key in usable:
            repeated.append(str(sample.number))
        elif len(sample.tokens) > 1 and len(set(sample.tokens)) == 1:
            flat.append(str(sample.number))
        else:
            usable[key] = sample.tokens
    if repeated:
        notes.append(f"calibration: {len(repeated)} samples repeat an earlier one and are left out: numbers {summarize(repeated)}")
    if flat:
        notes.append(f"calibration: {len(flat)} samples are one token repeated and are left out: numbers {summarize(flat)}")
    in_order = [usable[key] for key in sorted(usable)]
    samples, held_out = in_order[: request.num_samples], in_order[request.num_samples : 2 * request.num_samples]
    total = sum(map(len, samples))
    if total < MIN_TOKENS:
        held = f"{len(samples)} usable samples with {total} tokens" if samples else "no usable sample"
        raise InputError(f"calibration file '{request.path}' has {held}, needed: at least {MIN_TOKENS} tokens", "give it more text")
    if total < FEW_TOKENS:
        notes.append(f"calibration: only {total} tokens in {len(samples)} samples; fewer than {FEW_TOKENS} leave layers badly known")
    return CalibrationSet(samples, tuple(notes), request.path.name, held_out)


def _content_key(tokens: Sequence[int]) -> int:
    return xxhash.xxh3_128_intdigest(b"".join(token.to_bytes(4, "little") for token in tokens))


def _from_lines(path: Path, codec: TextCodec, config: ModelConfig, limit: int, notes: list[str]) -> list[Found]:
    """Every line that can be used; what is wrong with the others goes to the notes, by number."""
    builder = PromptBuilder(codec, SamplingParams(), config.context_length, config.vocab_size)
    found: list[Found] = []
    refused: list[str] = []
    for number, raw in _lines(path):
        try:
            tokens, is_open = sample_of_line(raw, number, builder)
            found.append(Found(number, tokens[:limit], is_open))
        except RequestError as error:
            refused.append(f"line {number} ({error.message})")
    if refused:
        notes.append(f"calibration: {len(refused)} lines cannot be used: {summarize(refused, 3)}")
    return found


def sample_of_line(raw: bytes, number: int, builder: PromptBuilder) -> tuple[list[int], bool]:
    """Token ids of one line, and whether it lacks an answer: the conversation as the template writes it, the text of a plain one.

    Raises RequestError.
    """
    line, is_text = job_line(raw, number)
    answered = line.messages is not None and line.messages[-1].get("role") == "assistant"
    if answered:
        line = replace(line, add_generation_prompt=False)
    return builder.build(line, 0).prompt_token_ids, not answered and not is_text


def job_line(raw: bytes, number: int) -> tuple[JobLine, bool]:
    """A line of the batch format, or of a text collection ({"text": ...}) as a prompt, and whether it is that. Raises RequestError."""
    try:
        plain = orjson.loads(raw)
    except orjson.JSONDecodeError:
        plain = None  # parse_line says what is wrong
    if isinstance(plain, dict) and isinstance(plain.get("text"), str) and "prompt" not in plain and "messages" not in plain:
        return parse_line(orjson.dumps({"prompt": plain["text"]}), number), True
    return parse_line(raw, number), False


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of the lines that are not blank. Raises InputError when the file cannot be read."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not is_blank(raw, number):
                    yield number, raw.rstrip(b"\r\n")
    except OSError as error:
        raise InputError(f"calibration file '{path}' cannot be read ({error.strerror})", "check the path") from error


def _from_text(path: Path, codec: TextCodec, limit: int, num_samples: int, notes: list[str]) -> list[Found]:
    """Windows of `limit` tokens; a shorter last window counts too."""
    windows: list[list[int]] = []
    for text in _stretches(path, num_samples * limit * _READ_CHARACTERS_PER_TOKEN, notes):
        tokens = codec.encode(text, add_special_tokens=False)
        room = limit - len(begin := _begin(codec))
        windows += [begin + tokens[start : start + room] for start in range(0, len(tokens), room)]
    return [Found(number, tokens) for number, tokens in enumerate(windows, 1)]


def _begin(codec: TextCodec) -> list[int]:
    """What the tokenizer puts before a text: a window begins as a prompt does."""
    return codec.encode("", add_special_tokens=True)[:1]


def _stretches(path: Path, wanted: int, notes: list[str]) -> Iterator[str]:
    """The text, or evenly spread parts of a longer one, cut at line ends. Raises InputError when it is no readable UTF-8."""
    try:
        size = os.stat(path).st_size
        with path.open("rb") as file:
            if size <= wanted:
                yield _decoded(file.read(), path)
                return
            notes.append(f"calibration: {wanted} of the {size} bytes of '{path.name}' are read, in {_STRETCHES} places")
            for index in range(_STRETCHES):
                file.seek(size * index // _STRETCHES)
                if index:
                    file.readline()
                yield _decoded(file.read(wanted // _STRETCHES) + file.readline(), path)
    except OSError as error:
        raise InputError(f"calibration file '{path}' cannot be read ({error.strerror})", "check the path") from error


def _decoded(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "give a UTF-8 text, or a .jsonl file in the batch format"
        raise InputError(f"calibration file '{path}' is no UTF-8 text ({error.reason} at byte {error.start})", hint) from error
