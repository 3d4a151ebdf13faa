"""A GGUF checkpoint of one file, or of the parts NAME-00001-of-0000N.gguf that llama.cpp's llama-gguf-split writes.

The first part holds the metadata of the model, every part some of the tensors, all of them `split.no` (from 0) and `split.count`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from dspark.converters.readers.base import summarize
from dspark.converters.readers.gguf_file import GgufFile, GgufTensor
from dspark.runtime.spec.errors import InputError

PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_paths(path: Path) -> list[Path]:
    """All parts of the checkpoint that a file belongs to by its name; the file alone when its name is no part's."""
    match = PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


class GgufParts:
    """Metadata and tensors of a checkpoint, whatever the number of its files. path: any part.

    Raises InputError naming the parts that are missing, that belong to another checkpoint, or that hold a tensor twice.
    """

    def __init__(self, path: Path) -> None:
        first = GgufFile(path)
        count = first.metadata.get("split.count", 1)
        if not isinstance(count, int) or count <= 1:
            self._parts = [first]
        else:
            self._parts = [GgufFile(part) for part in self._locate(path, count)]
            self._check()
        self.paths = [part.path for part in self._parts]
        self.metadata: dict[str, Any] = self._parts[0].metadata
        self._part_of = {name: part for part in self._parts for name in part.tensors}
        self.tensors: dict[str, GgufTensor] = {name: part.tensors[name] for name, part in self._part_of.items()}

    def decode(self, name: str) -> np.ndarray:
        """A tensor as float32 in its shape."""
        return self._part_of[name].decode(name)

    def decode_rows(self, name: str, first_row: int, num_rows: int) -> np.ndarray:
        """Rows of a tensor as float32, as `GgufFile.decode_rows`."""
        return self._part_of[name].decode_rows(name, first_row, num_rows)

    def _locate(self, path: Path, count: int) -> list[Path]:
        paths = part_paths(path)
        if len(paths) != count:
            what = f"'{path}' is one of {count} parts, but its name does not end in -0000X-of-{count:05d}.gguf"
            raise InputError(what, "give the parts the names that they were made with")
        absent = [part.name for part in paths if not part.is_file()]
        if absent:
            raise InputError(f"'{path}' is one of {count} parts, missing: {summarize(absent)}", "download the missing parts")
        return paths

    def _check(self) -> None:
        count = len(self._parts)
        for number, part in enumerate(self._parts):
            says = (part.metadata.get("split.no"), part.metadata.get("split.count"))
            if says != (number, count):
                what = f"'{part.path}' says that it is part {says[0]} (from 0) of {says[1]}, its name says {number} of {count}"
                raise InputError(what, "the parts of two checkpoints are mixed up: download them again")
        names = [name for part in self._parts for name in part.tensors]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise InputError(f"the parts of '{self._parts[0].path}' hold tensors twice: {summarize(twice)}", "download them again")
        total = self._parts[0].metadata.get("split.tensors.count")
        if total is not None and total != len(names):
            raise InputError(f"the parts of '{self._parts[0].path}' hold {len(names)} tensors instead of {total}", "download them again")
