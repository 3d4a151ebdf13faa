"""Drafts from text: the index, the proposer, the memory of other lines."""

import random
from pathlib import Path

import numpy as np
import pytest

from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.ngram import NgramProposer, load_memory, save_memory
from dspark.runtime.speculation.suffix_index import KEY_TOKENS, MAX_MATCH, MAX_PLACES, SuffixIndex


def sequence(tokens: list[int], prompt_len: int | None = None) -> Sequence:
    seq = Sequence(Request(0, tokens[: prompt_len or len(tokens)], SamplingParams()), 0, 0)
    seq.token_ids += tokens[prompt_len or len(tokens) :]
    return seq


def slow_find(tokens: list[int], text: list[int], end: int) -> tuple[int, int]:
    """The longest match by trying every place, the latest of equally long ones."""
    best, longest = -1, 0
    for place in range(1, min(end, len(tokens) + 1)):
        length = 0
        while length < min(MAX_MATCH, place, len(text)) and tokens[place - 1 - length] == text[-1 - length]:
            length += 1
        if length >= KEY_TOKENS and length >= longest:
            best, longest = place, length
    return best, longest


def test_the_longest_match_is_found_and_of_equals_the_latest() -> None:
    dice = random.Random(1)
    for _ in range(300):
        tokens = [dice.randrange(4) for _ in range(dice.randint(0, 24))]
        index = SuffixIndex()
        cut = dice.randint(0, len(tokens))
        index.extend(tokens[:cut])
        index.extend(tokens[cut:])
        end = len(tokens)
        expected = slow_find(tokens, tokens, end)
        places = sum(tokens[p - 2 : p] == tokens[-2:] for p in range(2, end)) if len(tokens) >= 2 else 0
        if places <= MAX_PLACES:
            assert index.find(tokens, end) == expected


def test_a_match_overlapping_its_own_continuation_repeats_it() -> None:
    index = SuffixIndex()
    index.extend([5, 6, 5, 6, 5, 6])
    assert index.find([5, 6, 5, 6, 5, 6], 6) == (4, 4)


def test_capacity_drops_the_oldest_half() -> None:
    index = SuffixIndex(capacity=10)
    index.extend([1, 2, 3])
    index.extend(range(100, 108))
    assert len(index) == 6 and index.tokens[-1] == 107
    assert index.find([0, 1, 2])[1] == 0
    assert index.find([0, 105, 106]) == (5, 2)


def test_the_draft_continues_the_line_itself() -> None:
    seq = sequence([1, 2, 3, 4, 9, 8, 1, 2, 3])
    draft = NgramProposer(4).propose([seq], [3])[0]
    assert draft is not None and draft.token_ids == (4, 9, 8) and draft.source == "ngram-3"
    assert NgramProposer(2).propose([seq], [9])[0].token_ids == (4, 9)
    assert NgramProposer().propose([sequence([1, 2, 3, 4])], [5]) == [None]


def test_lines_share_what_they_answered() -> None:
    """A finished answer serves the next line; a preempted one, which goes on, is not remembered twice."""
    proposer = NgramProposer()
    first, second = sequence([1, 2, 3, 30, 31, 32, 33, 34], 3), sequence([7, 30, 31, 32])
    assert proposer.propose([first, second], [4, 4])[1] is None
    proposer.forget(first)
    assert len(proposer.memory) == 0
    proposer.propose([first], [4])
    first.finish_reason = "stop"
    proposer.forget(first)
    draft = proposer.propose([second], [4])[0]
    assert draft is not None and draft.token_ids == (33, 34) and draft.source == "memory-3"


def test_the_memory_is_kept_between_nights(tmp_path: Path) -> None:
    memory = load_memory(tmp_path / "memory.npy", 100)
    assert len(memory) == 0
    memory.extend([1, 2, 3, 4])
    save_memory(tmp_path / "memory.npy", memory)
    assert load_memory(tmp_path / "memory.npy", 100).tokens == [1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["memory.npy"]


@pytest.mark.parametrize("content", [b"junk", None, np.array([1, 200], np.int32), np.array([[1]], np.int32), np.array([1.5])])
def test_a_foreign_memory_is_refused(tmp_path: Path, content: object) -> None:
    path = tmp_path / "memory.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content if content is not None else np.array([{}], object), allow_pickle=True)
    with pytest.raises(InputError, match=r"draft memory .* (cannot be read|is not one of this model's vocabulary)"):
        load_memory(path, 100)
