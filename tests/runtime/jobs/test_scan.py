"""The pass over the input: what a line is, what it is keyed by, which files are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.runtime.jobs import scan as scan_module
from dspark.runtime.jobs.index import FLAG_TOO_LONG, LINE, FixedFile
from dspark.runtime.jobs.lines import LineError, parse_line
from dspark.runtime.jobs.scan import check_duplicates, digest_of, find_duplicates, peek_id, read_line, scan_input
from dspark.runtime.spec.errors import InputError, MachineError


def scanned(tmp_path: Path, data: bytes, limit: int | None = None) -> tuple[list[tuple[int, bytes]], FixedFile, Path]:
    """([(line number, line)], index, path)"""
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    index = FixedFile(tmp_path / "lines.bin", LINE, create=True)
    facts = scan_input(path, index, limit)
    assert facts.num_lines == len(index)
    assert facts.digest == digest_of(path, limit)
    with open(path, "rb") as file:
        rows = index.read(0, len(index))
        return [(int(row["number"]), read_line(file.fileno(), row)) for row in rows], index, path


def test_bom_crlf_blank_lines_and_a_missing_last_line_feed_are_fine(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n\t{"prompt": "b"} \n\n{"prompt": "c\xe2\x80\xa8d"}'
    lines, _, _ = scanned(tmp_path, data)
    assert lines == [(1, b'{"prompt": "a"}'), (4, b'{"prompt": "b"}'), (6, b'{"prompt": "c\xe2\x80\xa8d"}')]


@pytest.mark.parametrize("data", [b"", b"\n \n\r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n\n"])
def test_a_file_without_lines_is_an_empty_job(tmp_path: Path, data: bytes) -> None:
    assert scanned(tmp_path, data)[0] == []


def test_the_key_does_not_depend_on_line_ends_or_mark(tmp_path: Path) -> None:
    keys = []
    for data in (b'{"prompt": "a"}', b'{"prompt": "a"}\n', b'\xef\xbb\xbf {"prompt": "a"}\r\n'):
        row = scanned(tmp_path, data)[1].read(0, 1)[0]
        keys.append((int(row["key_hi"]) << 64) | int(row["key_lo"]))
    assert set(keys) == {xxhash.xxh3_128_intdigest(b'{"prompt": "a"}')}
    assert f"{keys[0]:032x}" == parse_line(b'\xef\xbb\xbf{"prompt": "a"}\r\n', 1).content_hash


def test_limit_counts_lines_that_are_not_blank(tmp_path: Path) -> None:
    data = b'\n{"prompt": "a"}\n\n{"prompt": "b"}\n{"prompt": "c"}\n'
    assert [number for number, _ in scanned(tmp_path, data, limit=2)[0]] == [2, 4]
    assert digest_of(tmp_path / "in.jsonl", 2) != digest_of(tmp_path / "in.jsonl")
    (tmp_path / "in.jsonl").write_bytes(data + b'{"prompt": "d"}\n')
    changed_after_the_limit = digest_of(tmp_path / "in.jsonl", 2)
    (tmp_path / "in.jsonl").write_bytes(data)
    assert changed_after_the_limit == digest_of(tmp_path / "in.jsonl", 2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")), max_size=12), st.integers(5, 60))
def test_lines_are_those_between_line_feeds_even_when_read_in_pieces(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cap: int
) -> None:
    """Lines over the cap keep their number and take no memory; all others come out as they went in."""
    tmp_path = tmp_path_factory.mktemp("scan")
    lines = [b'{"prompt": "so that the file is text"}', *lines]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_module, "MAX_LINE_BYTES", cap)
        path = tmp_path / "in.jsonl"
        path.write_bytes(b"\n".join(lines))
        index = FixedFile(tmp_path / "lines.bin", LINE, create=True)
        if path.read_bytes()[:2] in scan_module.UTF16_MARKS:
            return
        try:
            scan_input(path, index)
        except InputError:
            assert len(lines[0]) + 1 > cap
            return
        found = {int(row["number"]): row for row in index.read(0, len(index))}
        with open(path, "rb") as file:
            for number, line in enumerate(lines, 1):
                whole = line + (b"\n" if number < len(lines) else b"")
                if len(whole) > cap:
                    assert found[number]["flags"] == FLAG_TOO_LONG
                elif line.strip(b" \t\r\n"):
                    assert read_line(file.fileno(), found[number]) == line.strip(b" \t\r\n")
                else:
                    assert number not in found


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ('{"prompt": "x"}\n'.encode("utf-16"), "is UTF-16"),
        ('{"prompt": "x"}\n'.encode("utf-16-le"), "is not UTF-8 text"),
        (b"\x1f\x8b" + os.urandom(50), "is a gzip file"),
        (b"PK\x03\x04" + os.urandom(50), "is a zip file"),
        (b"\x7fELF" + bytes(range(256)) * 4, "is not UTF-8 text"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, data: bytes, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        scanned(tmp_path, data)


def test_one_bad_line_among_good_ones_is_no_reason_to_refuse(tmp_path: Path) -> None:
    lines, _, _ = scanned(tmp_path, b'\xff\xfa bad bytes\n{"prompt": "x"}\nnull\n')
    assert len(lines) == 3


def test_short_text_is_text(tmp_path: Path) -> None:
    assert len(scanned(tmp_path, b"null\n7\n")[0]) == 2


@pytest.mark.parametrize(
    "line",
    [
        b'{"custom_id": "a", "prompt": "x"}',
        b'{"id": "b", "prompt": "x"}',
        b'{"custom_id": null, "id": "b", "prompt": "x"}',
        b'{"custom_id": "a", "id": "b", "prompt": "x"}',
        b'{"custom_id": 7, "prompt": "x"}',
        b'{"custom_id": {"a": 1}, "prompt": "x"}',
        b'{"prompt": "x"}',
        b'{"custom_id": "nan", "prompt": "x", "temperature": NaN}',
        b'{"custom_id": "cut", "prompt": "x',
        b"[1, 2]",
        b"null",
        b"\xff",
        b'{"custom_id": "deep", "prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    ],
)
def test_the_id_seen_is_the_id_of_the_record(line: bytes) -> None:
    """Duplicates are found by it, and results are keyed by it."""
    try:
        parsed = parse_line(line, 3)
        expected = parsed.custom_id if parsed.has_own_id else None
    except LineError as error:
        expected = error.custom_id if error.has_own_id else None
    assert peek_id(line, 3) == expected


def test_a_changed_input_is_noticed_when_the_line_is_read_again(tmp_path: Path) -> None:
    _, index, path = scanned(tmp_path, b'{"prompt": "a"}\n')
    path.write_bytes(b'{"prompt": "b"}\n')
    with open(path, "rb") as file, pytest.raises(MachineError, match="input changed at line 1"):
        read_line(file.fileno(), index.read(0, 1)[0])


def test_duplicates_are_found_in_buckets_and_hash_collisions_are_not_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "DUPLICATE_SORT", 10)
    ids = [f"id{i}" for i in range(100)]
    data = "".join(json.dumps({"custom_id": i, "prompt": "x"}) + "\n" for i in ids)
    _, index, path = scanned(tmp_path, data.encode())
    assert find_duplicates(path, index) is None
    rows = index.read(0, len(index))
    rows["id"][40] = rows["id"][7]  # as if two ids had one hash
    index.write(0, rows)
    assert find_duplicates(path, index) is None
    ids[90] = "id13"
    ids[95] = "id2"
    data = "".join(json.dumps({"custom_id": i, "prompt": "x"}) + "\n" for i in ids)
    _, index, path = scanned(tmp_path, data.encode())
    assert find_duplicates(path, index) == ("id13", 14, 91)
    with pytest.raises(InputError, match="custom_id 'id13' stands in line 14 and in line 91"):
        check_duplicates(path, index)


def test_fixed_files_read_what_was_written(tmp_path: Path) -> None:
    file = FixedFile(tmp_path / "f", np.dtype([("a", "<u4")]), create=True)
    file.append(np.array([(1,), (2,)], file.dtype))
    file.resize(5)
    file.write(4, np.array([(9,)], file.dtype))
    assert file.read(0, 100)["a"].tolist() == [1, 2, 0, 0, 9]
    assert [(start, window["a"].tolist()) for start, window in file.windows(2)] == [(0, [1, 2]), (2, [0, 0]), (4, [9])]
    assert file.read(7, 3).tolist() == []
    file.close()
