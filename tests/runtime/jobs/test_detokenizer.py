"""Tokens to text: characters cut between tokens, stop texts at any token boundary."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import case_lines
import pytest
import tiny_models
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from dspark.runtime.jobs.detokenizer import IncrementalDetokenizer, final_text, first_stop
from dspark.runtime.jobs.tokenizer import TextCodec, load_codec
from dspark.runtime.spec.sampling_params import SamplingParams

EOS = 2


class PieceCodec:
    """A stand-in whose token i is the i-th piece of bytes; any cut of a text is a sequence of its tokens. EOS is special."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = [b"", b"", b"<eos>", *pieces]
        self.special_ids = frozenset([EOS])
        self.num_decoded = 0

    @property
    def ids(self) -> list[int]:
        return list(range(3, len(self.pieces)))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        kept = (i for i in token_ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(self.pieces[i] for i in kept).decode("utf-8", "replace")


def cut(data: bytes, points: Sequence[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(p % (len(data) + 1) for p in points)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def run(codec: object, token_ids: Sequence[int], params: SamplingParams) -> tuple[int, str | None]:
    """(tokens taken, stop text) of an answer that ends at its first stop text."""
    detokenizer = IncrementalDetokenizer(codec, params)  # type: ignore[arg-type]
    for count, token in enumerate(token_ids, 1):
        stop = detokenizer.append(token)
        if stop is not None:
            return count, stop
    return len(token_ids), None


def expected(codec: object, token_ids: Sequence[int], params: SamplingParams) -> tuple[int, str | None]:
    """The same from the definition: decode everything after every token."""
    before = 0
    for count in range(1, len(token_ids) + 1):
        text = codec.decode(token_ids[:count], params.skip_special_tokens).rstrip("\ufffd")  # type: ignore[attr-defined]
        if count >= params.min_tokens:
            found = first_stop(text, params.stop, before)
            if found is not None and found[1] > before:
                return count, found[2]
        before = max(before, len(text))
    return len(token_ids), None


@pytest.fixture(scope="module")
def byte_codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    directory = tmp_path_factory.mktemp("byte-level")
    tiny_models.save_tokenizer(directory)
    return load_codec(directory)


@pytest.fixture(scope="module")
def fallback_codec() -> TextCodec:
    """Like Llama 2's: pieces with U+2581 for the blank, bytes as <0xNN> tokens, one leading blank taken off a text."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "\u2581b", "ab"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return TextCodec(tokenizer, {}, None)


def byte_ids(codec: TextCodec, text: str) -> list[int]:
    """One token per byte."""
    ids = [codec.token_to_id(char) for byte in text.encode() for char in byte_chars()[byte]]
    assert codec.decode(ids) == text
    return ids


def byte_chars() -> dict[int, str]:
    """GPT-2's printable stand-ins for the bytes."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in keep}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(keep))
    return table


_TEXT = st.text(st.sampled_from("ab é€\U0001f642\U0001f468\u200d"), min_size=1, max_size=12)


@settings(max_examples=400, deadline=None)
@given(
    _TEXT,
    st.lists(st.integers(0, 60)),
    st.lists(_TEXT.filter(lambda s: len(s) < 5), min_size=1, max_size=3),
    st.integers(0, 6),
    st.booleans(),
)
@example("ab\U0001f642a", [1, 2, 3, 4, 5, 6], ["\U0001f642"], 0, False)
def test_a_stop_is_found_at_any_cut_of_the_text(text: str, points: list[int], stops: list[str], min_tokens: int, keep: bool) -> None:
    codec = PieceCodec(cut(text.encode(), points))
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=keep)
    count, stop = run(codec, codec.ids, params)
    assert (count, stop) == expected(codec, codec.ids, params)
    answer = final_text(codec, codec.ids[:count], params, stop)
    if min_tokens <= 1:
        # Whatever the cuts: as if the text came character by character.
        found = first_stop(text, stops)
        assert answer == (text if found is None else text[: found[1] if keep else found[0]])
    elif stop is None:
        assert answer == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([b"\xf0", b"\x9f", b"\x99", b"\x82", b"\x99\x82\xf0\x9f", b"a", b"\xff", b"ab"]), max_size=90))
def test_bytes_that_are_no_text_never_break_the_window(pieces: list[bytes]) -> None:
    codec = PieceCodec(pieces)
    params = SamplingParams(stop=("aba", "\U0001f642a"))
    count, stop = run(codec, codec.ids, params)
    assert (count, stop) == expected(codec, codec.ids, params)
    assert final_text(codec, codec.ids, params) == codec.decode(codec.ids)


@settings(max_examples=150, deadline=None)
@given(_TEXT, st.lists(_TEXT.filter(lambda s: len(s) < 4), min_size=1, max_size=2))
def test_byte_fallback_and_a_dropped_leading_blank(fallback_codec: TextCodec, text: str, stops: list[str]) -> None:
    ids = fallback_codec.encode(text.replace(" ", "\u2581"))
    params = SamplingParams(stop=tuple(stops))
    count, stop = run(fallback_codec, ids, params)
    assert (count, stop) == expected(fallback_codec, ids, params)
    whole = fallback_codec.decode(ids)
    found = first_stop(whole, stops)
    assert final_text(fallback_codec, ids[:count], params, stop) == (whole if found is None else whole[: found[0]])


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_without_a_stop_the_text_is_the_plain_decoding(byte_codec: TextCodec, text: str) -> None:
    ids = byte_codec.encode(text)
    assert final_text(byte_codec, ids, SamplingParams()) == byte_codec.decode(ids) == text


@pytest.mark.parametrize(("custom_id", "body"), case_lines.requests("B29_stops"))
def test_known_text_is_cut_just_before_the_stop(byte_codec: TextCodec, custom_id: str, body: dict) -> None:
    text = case_lines.KNOWN_TEXT
    for ids in (byte_codec.encode(text), byte_ids(byte_codec, text)):
        params = SamplingParams(stop=tuple(body["stop"]))
        count, stop = run(byte_codec, [*ids, EOS], params)
        place = text.find(body["stop"][0])
        assert (stop is None) == (place < 0)
        assert final_text(byte_codec, [*ids, EOS][:count], params, stop) == (text if place < 0 else text[:place])


def test_an_answer_cut_inside_a_character_ends_in_one_replacement_character(byte_codec: TextCodec) -> None:
    ids = byte_ids(byte_codec, "k\U0001f642")
    assert [final_text(byte_codec, ids[:n], SamplingParams(max_tokens=n)) for n in range(1, 6)] == [
        "k", "k\ufffd", "k\ufffd", "k\ufffd", "k\U0001f642"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("stops", "text", "answer"),
    [
        (("th\u00e9 E", "h"), "Quick th\u00e9 END", "Quick t"),  # the short one is complete first
        (("abcd", "bc"), "xabcd", "xa"),
        (("ab", "abc"), "xabc", "x"),
        (("bc", "abc"), "xabc", "x"),  # complete at the same character: the one that begins first
        (("aa",), "baaa", "b"),
    ],
)
def test_overlapping_stops_give_one_text_whatever_the_tokens(stops: tuple[str, ...], text: str, answer: str) -> None:
    for points in ([], [1], [2], [3], list(range(30))):
        codec = PieceCodec(cut(text.encode(), points))
        params = SamplingParams(stop=stops)
        count, stop = run(codec, codec.ids, params)
        assert final_text(codec, codec.ids[:count], params, stop) == answer


def test_a_stop_that_begins_before_min_tokens_counts_and_one_that_ends_before_does_not() -> None:
    codec = PieceCodec([b"a", b"b", b"a", b"b", b"c"])
    params = SamplingParams(stop=("ab",), min_tokens=3)
    assert run(codec, codec.ids, params) == (4, "ab")
    assert final_text(codec, codec.ids[:4], params, "ab") == "ab"
    assert run(codec, codec.ids, SamplingParams(stop=("bab",), min_tokens=4)) == (4, "bab")


def test_special_tokens_do_not_break_a_stop_and_are_not_in_the_text() -> None:
    codec = PieceCodec([b"a", b"b", b"c"])
    ids = [3, EOS, EOS, 4, EOS, 5, EOS]
    assert run(codec, ids, SamplingParams(stop=("abc",))) == (6, "abc")
    assert final_text(codec, ids, SamplingParams()) == "abc"
    assert final_text(codec, [3, EOS], SamplingParams(skip_special_tokens=False)) == "a<eos>"
    assert run(codec, ids, SamplingParams(stop=("abc",), skip_special_tokens=False))[1] is None


def test_a_stop_token_id_is_cut_off_unless_it_is_asked_for() -> None:
    codec = PieceCodec([b"a", b"b"])
    assert final_text(codec, [3, 4], SamplingParams(stop_token_ids=(4,)), 4) == "a"
    assert final_text(codec, [3, 4], SamplingParams(stop_token_ids=(4,), include_stop_str_in_output=True), 4) == "ab"


@pytest.mark.parametrize("piece", [b"a", b"\x80", b"\x99\x82\xf0\x9f", b""], ids=["text", "invalid", "always open", "nothing"])
def test_one_append_decodes_a_bounded_number_of_tokens(piece: bytes) -> None:
    codec = PieceCodec([b"\xf0\x9f", *[piece] * 2000])
    run(codec, codec.ids, SamplingParams(stop=("never",)))
    assert codec.num_decoded < 2001 * 50


def test_nothing_is_decoded_without_stop_texts() -> None:
    codec = PieceCodec([b"a"] * 50)
    run(codec, codec.ids, SamplingParams())
    assert codec.num_decoded == 0


def test_a_stop_in_text_whose_every_token_ends_inside_a_character() -> None:
    codec = PieceCodec(cut("\U0001f642".encode() * 60 + b"END", range(2, 240, 4)))
    params = SamplingParams(stop=("\U0001f642END",))
    count, stop = run(codec, codec.ids, params)
    assert final_text(codec, codec.ids[:count], params, stop) == "\U0001f642" * 59


def test_the_prompt_is_no_part_of_the_search(byte_codec: TextCodec, tmp_path: Path) -> None:
    """B29 in_prompt: only appended tokens are looked at, so a stop over the seam of prompt and answer is none."""
    assert run(byte_codec, byte_codec.encode(" zz"), SamplingParams(stop=("END zz",))) == (3, None)
