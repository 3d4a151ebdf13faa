"""What numba compiled is taken again only while nothing that it was made of has changed."""

from __future__ import annotations

from pathlib import Path

import numba
import pytest

from dspark.kernels import compile_cache
from dspark.kernels.compile_cache import COMPILED_FOLDERS, sources_digest
from dspark.kernels.cpu import elementwise
from dspark.runtime.sampling import draw


def stamp_of(function: object) -> object:
    return function._cache._impl.locator.get_source_stamp()  # type: ignore[attr-defined]


def test_a_digest_tells_of_any_file(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text("a = 1\n")
    (tmp_path / "rounding.py").write_text("b = 2\n")
    found = [sources_digest([tmp_path])]
    (tmp_path / "rounding.py").write_text("b = 3\n")
    found.append(sources_digest([tmp_path]))
    (tmp_path / "rounding.py").rename(tmp_path / "other.py")
    found.append(sources_digest([tmp_path]))
    (tmp_path / "notes.txt").write_text("no code")
    assert len(set(found)) == 3 and sources_digest([tmp_path]) == found[-1]


@pytest.mark.parametrize("function", [elementwise._rms_norm_serial, draw.argmax_rows], ids=["kernel", "sampling"])
def test_a_change_in_a_neighbour_makes_compiled_code_stale(function: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that happened: an inner loop was mended in its own file, and the kernel around it went on as it had been compiled."""
    before = stamp_of(function)
    assert stamp_of(function) == before
    monkeypatch.setattr(compile_cache, "_own_digest", lambda: b"another")
    assert stamp_of(function) != before


def test_other_peoples_functions_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    @numba.njit(cache=True)
    def theirs(x: int) -> int:
        return x

    before = stamp_of(theirs)
    monkeypatch.setattr(compile_cache, "_own_digest", lambda: b"another")
    assert stamp_of(theirs) == before


def test_every_folder_with_compiled_functions_counts() -> None:
    root = Path(compile_cache.__file__).parents[1]
    files = [file for name in ("kernels", "runtime", "converters") for file in (root / name).rglob("*.py")]
    assert {file.parent for file in files if "cache=True" in file.read_text()} <= set(COMPILED_FOLDERS)
