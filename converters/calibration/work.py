"""What a quantization has done so far, on disk beside its target: finished layers, and activations that do not fit the memory.

`.NAME.quantize` holds `plan.json` (what the work depends on), a pair `layer-NNNNN.safetensors`, `layer-NNNNN.json` for each finished layer
(the JSON file last, by a rename, so a pair with one is whole), and `activations-*` while a layer is in work. A run that is killed leaves it
behind; with --resume the next one takes the layers over when everything that the work depends on is the same.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import save_file

from dspark.converters.calibration.layer_quantizer import LayerResult
from dspark.converters.readers.safetensors import open_safetensors
from dspark.converters.writer import hash_file, sync
from dspark.runtime.spec.errors import LockedError, UsageError

PLAN_NAME, LOCK_NAME = "plan.json", "lock"
_SHOWN_VALUE = 40


class WorkDirectory:
    """Use as a context manager around a quantization; `discard` when the engine is published.

    target: of the engine. plan: everything that a layer's result depends on, JSON-ready. resume: take over what an interrupted run left.
    Raises LockedError when another run works on the target, UsageError when what is to be resumed was made with another plan.
    """

    def __init__(self, target: Path, plan: dict[str, Any], resume: bool) -> None:
        path = Path(os.path.realpath(target))
        self.directory = path.parent / f".{path.name}.quantize"
        self._plan: dict[str, Any] = json.loads(json.dumps(plan))
        self._resume = resume
        self._num_files = 0

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise LockedError(f"another run is quantizing to this place ('{self.directory}' is locked)", "wait for it") from None
        try:
            self._take_over() if self._resume else self._clear()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for path in self.directory.glob("activations-*"):
            path.unlink()
        if not any(self.directory.glob("layer-*.json")):
            shutil.rmtree(self.directory, ignore_errors=True)  # nothing was done that could be resumed
        os.close(self._lock)

    @property
    def num_done(self) -> int:
        """Finished layers; they are the first ones."""
        count = 0
        while self._record(count).is_file():
            count += 1
        return count

    def save(self, index: int, result: LayerResult) -> None:
        """Bring one layer's result to disk."""
        tensors = self.directory / f"layer-{index:05d}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in result.tensors.items()}, tensors)
        sync(tensors)
        record = {"names": list(result.tensors), "report": result.report, "xxh3": hash_file(tensors)}
        self._write(self._record(index), record)

    def load(self, index: int) -> LayerResult:
        """A finished layer. Raises UsageError when its file is not what was written."""
        record = json.loads(self._record(index).read_text(encoding="utf-8"))
        path = self.directory / f"layer-{index:05d}.safetensors"
        if not path.is_file() or hash_file(path) != record["xxh3"]:
            raise UsageError(f"'{path}' of the interrupted run is damaged", "start anew: leave --resume out")
        handle = open_safetensors(path)
        return LayerResult({name: handle.get_tensor(name) for name in record["names"]}, record["report"])

    def allocate(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised matrix in a file of its own, which the system may write out whenever memory is short."""
        self._num_files += 1
        path = self.directory / f"activations-{self._num_files:05d}"
        matrix = torch.from_file(str(path), shared=True, size=rows * columns, dtype=dtype).view(rows, columns)
        path.unlink()  # the mapping keeps it; a killed run leaves nothing behind
        return matrix

    def discard(self) -> None:
        """The work is published: remove it."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _record(self, index: int) -> Path:
        return self.directory / f"layer-{index:05d}.json"

    def _clear(self) -> None:
        for path in self.directory.iterdir():
            if path.name != LOCK_NAME:
                path.unlink()
        self._write(self.directory / PLAN_NAME, self._plan)

    def _take_over(self) -> None:
        path = self.directory / PLAN_NAME
        if not path.is_file():
            self._clear()
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key in {**before, **self._plan} if before.get(key) != self._plan.get(key)]
        if changed:
            shown = ", ".join(f"{key} (then {_short(before.get(key))}, now {_short(self._plan.get(key))})" for key in changed)
            hint = "type the old settings again, or start anew: leave --resume out"
            raise UsageError(f"--resume: the interrupted run had other settings: {shown}", hint)

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        sync(draft)
        draft.rename(path)
        sync(self.directory)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_VALUE else text[: _SHOWN_VALUE - 3] + "..."
