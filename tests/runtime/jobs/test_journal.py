"""The log of results: nothing that was written whole is lost, nothing that was not is taken for a result."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dspark.runtime.jobs.index import LINE, SLOT, STATE_FAILED, STATE_NONE, STATE_OK, FixedFile
from dspark.runtime.jobs.journal import Journal, LineKey, decode_record, encode_record
from dspark.runtime.jobs.resume import place_records

KEY = LineKey(5, 6, 0xABC << 100, 0x123)


def test_a_record_is_readable_json_and_comes_back() -> None:
    out = orjson.dumps({"custom_id": 'tricky ,"out":{"sum": ', "text": "é\n"})
    raw, lead = encode_record(KEY, True, out)
    assert raw.endswith(b"\n") and raw.count(b"\n") == 1
    data = json.loads(raw)
    assert (data["at"], data["line"], data["ok"], data["out"]) == (5, 6, True, orjson.loads(out))
    assert data["key"] == f"{KEY.key:032x}" and data["id"] == f"{KEY.id:016x}"
    record = decode_record(raw, 1000)
    assert record is not None and record.line == KEY and record.out == out
    assert (record.out_offset, record.out_length) == (1000 + lead, len(out))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_a_flipped_byte_is_noticed(position: int, value: int) -> None:
    raw, _ = encode_record(KEY, True, b'{"text":"some answer"}')
    position %= len(raw) - 1
    damaged = raw[:position] + bytes([value]) + raw[position + 1 :]
    assert (decode_record(damaged, 0) is None) == (damaged != raw)


def test_damage_further_up_costs_only_its_own_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    for at in range(5):
        journal.append(encode_record(LineKey(at, at + 1, at, at), True, b'{"n":%d}' % at)[0])
    data = bytearray((tmp_path / "j").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "j").write_bytes(data + b'{"at":5,"line"')
    journal = Journal(tmp_path / "j")
    assert [record.line.at for record in journal.read()] == [0, 1, 3, 4]
    assert journal.num_damaged == 1
    assert journal.size == len(data) == (tmp_path / "j").stat().st_size


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "j")
    journal.append(encode_record(KEY, True, b"{}")[0])
    size = journal.size

    def full(fd: int, data: bytes, offset: int) -> None:
        os.pwrite(fd, data[:7], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dspark.runtime.jobs.journal.write_all", full)
    with pytest.raises(OSError, match="No space") as raised:
        journal.append(b"x" * 100)
    assert raised.value.filename == str(tmp_path / "j")
    assert journal.size == size == (tmp_path / "j").stat().st_size


class JournalMachine(RuleBasedStateMachine):
    """Append, crash with a torn tail, reopen: what was written whole is there, in order, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "j"
        self.journal: Journal | None = Journal(self.path)
        self.model: list[tuple[int, bytes]] = []
        self.next = 0

    def record(self, text: str) -> tuple[bytes, tuple[int, bytes]]:
        out = orjson.dumps({"text": text})
        self.next += 1
        return encode_record(LineKey(self.next, self.next + 1, self.next * 7, self.next), True, out)[0], (self.next, out)

    @precondition(lambda self: self.journal is not None)
    @rule(texts=st.lists(st.text(max_size=30), min_size=1, max_size=4))
    def append(self, texts: list[str]) -> None:
        made = [self.record(text) for text in texts]
        assert self.journal is not None
        self.journal.append(b"".join(raw for raw, _ in made))
        self.model += [entry for _, entry in made]

    @precondition(lambda self: self.journal is not None)
    @rule(texts=st.lists(st.text(max_size=30), min_size=1, max_size=4), share=st.floats(0, 1))
    def crash_in_a_write(self, texts: list[str], share: float) -> None:
        """A batch of which only a beginning reached the disk."""
        made = [self.record(text) for text in texts]
        whole = b"".join(raw for raw, _ in made)
        cut = whole[: int(len(whole) * share)]
        assert self.journal is not None
        self.journal.append(cut)
        length = 0
        for raw, entry in made:
            length += len(raw)
            if length <= len(cut):
                self.model.append(entry)
        self.journal.close()
        self.journal = None

    @precondition(lambda self: self.journal is not None)
    @rule()
    def close(self) -> None:
        assert self.journal is not None
        self.journal.sync()
        self.journal.close()
        self.journal = None

    @precondition(lambda self: self.journal is None)
    @rule()
    def reopen(self) -> None:
        self.journal = Journal(self.path)
        assert [(record.line.at, record.out) for record in self.journal.read()] == self.model
        assert self.journal.num_damaged == 0

    @invariant()
    def every_record_lies_where_it_says(self) -> None:
        if self.journal is None:
            return
        data = self.path.read_bytes()
        for record in Journal(self.path).read():
            assert data[record.out_offset : record.out_offset + record.out_length] == record.out

    def teardown(self) -> None:
        self.directory.cleanup()


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None, derandomize=True)


def index_of(directory: Path, keys: list[tuple[int, int]]) -> FixedFile:
    """An index whose lines have (key, line number)."""
    index = FixedFile(directory / "lines.bin", LINE, create=True)
    for key, number in keys:
        index.append(np.array([(0, number, 1, 0, 0, key, key * 3)], LINE))
    return index


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    before=st.lists(st.integers(1, 30), min_size=1, max_size=12, unique=True),
    after=st.lists(st.integers(1, 30), max_size=12, unique=True),
    failed=st.sets(st.integers(1, 30)),
)
def test_results_find_their_lines_wherever_they_moved(before: list[int], after: list[int], failed: set[int]) -> None:
    """Answers follow their content; an error record, which names its line number, serves only a line of that number."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        journal = Journal(directory / "j")
        for at, key in enumerate(before):
            journal.append(encode_record(LineKey(at, at + 1, key, key * 3), key not in failed, b'{"k":%d}' % key)[0])
        index = index_of(directory, [(key, at + 1) for at, key in enumerate(after)])
        slots = FixedFile(directory / "slots.bin", SLOT, create=True)
        slots.resize(len(index))
        unused = place_records(journal.read(), index, slots, directory / "spill", drop_failed=False)
        data = (directory / "j").read_bytes()
        num_used = 0
        for at, key in enumerate(after):
            offset, length, state = slots.read(at, 1)[0].tolist()
            usable = key in before and (key not in failed or before.index(key) == at)
            assert state == (STATE_NONE if not usable else STATE_FAILED if key in failed else STATE_OK)
            if usable:
                num_used += 1
                assert data[offset : offset + length] == b'{"k":%d}' % key
        assert unused == len(before) - num_used
        assert not (directory / "spill").exists()


def test_the_last_record_of_a_line_counts_and_failures_can_be_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    for text, ok in ((b'"old"', False), (b'"new"', True)):
        journal.append(encode_record(LineKey(0, 1, 4, 12), ok, text)[0])
    journal.append(encode_record(LineKey(1, 2, 5, 15), False, b'"bad"')[0])
    index = index_of(tmp_path, [(4, 1), (5, 2)])
    slots = FixedFile(tmp_path / "slots.bin", SLOT, create=True)
    slots.resize(2)
    assert place_records(journal.read(), index, slots, tmp_path / "s", drop_failed=False) == 0
    assert slots.read(0, 2)["state"].tolist() == [STATE_OK, STATE_FAILED]
    slots.resize(0)
    slots.resize(2)
    assert place_records(journal.read(), index, slots, tmp_path / "s", drop_failed=True) == 2
    assert slots.read(0, 2)["state"].tolist() == [STATE_OK, STATE_NONE]
