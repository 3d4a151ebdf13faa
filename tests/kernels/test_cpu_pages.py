"""Large pages are a wish: values stay, memory that does not fill a page is left alone, and the system grants them where it can."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dspark.kernels.cpu.pages import LARGE_PAGE, in_large_pages, moved_to_large_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("size", [0, 1, LARGE_PAGE - 1, LARGE_PAGE, 3 * LARGE_PAGE + 5])
def test_values_stay(size: int) -> None:
    drawn = torch.randint(0, 255, (size,), dtype=torch.uint8)
    moved = moved_to_large_pages(drawn)
    assert torch.equal(moved, drawn) and (moved is drawn) == (size < LARGE_PAGE)
    assert in_large_pages(moved) is moved and torch.equal(moved, drawn)


def test_a_transposed_tensor_is_laid_out_anew() -> None:
    drawn = torch.randn(1024, 1024).t()
    moved = moved_to_large_pages(drawn)
    assert torch.equal(moved, drawn) and moved.is_contiguous()


@pytest.mark.skipif(sys.platform != "linux" or not SETTING.is_file() or "[never]" in SETTING.read_text(), reason="no large pages here")
def test_the_system_is_asked() -> None:
    """`hg` stands among the flags of the mapping that was asked for (proc(5), smaps)."""
    room = in_large_pages(torch.empty(9 * LARGE_PAGE, dtype=torch.uint8))
    inside = -(-room.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    entry, found = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and ":" not in line.split(" ")[0]:
            entry = line.split(" ")[0]
        elif line.startswith("VmFlags") and entry:
            first, end = (int(part, 16) for part in entry.split("-"))
            if first <= inside < end:
                found = " hg" in line
    assert found
