"""Writes an engine directory that is either whole or not there; the exporters write their checkpoints the same way.

Everything goes to a sibling directory `.NAME.tmp-PID`, is brought to disk, gets its manifest last and is renamed: a process killed at any
moment leaves nothing under the engine's name that loads. What dead processes left is removed by the next one with the same target.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import xxhash

from dspark.converters.safetensors_stream import SafetensorsStream, tensor_bytes
from dspark.converters.tokenizer_files import TokenizerBundle
from dspark.runtime.spec.errors import MachineError, UsageError
from dspark.runtime.spec.manifest import MANIFEST_NAME, SHARD_PATTERN, EngineManifest, TensorRecord
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import QuantConfig

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2 * 10**9
_HASH_BLOCK = 1 << 20
_DISK_ERRORS = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "a file may not grow further"}
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


class ShardedWriter:
    """Use as a context manager: `add` every tensor, close the shards under their names (`name_shards`), then `publish` puts the directory
    in place.

    Leaving the block without `publish` removes what was written. names: every tensor that may be added.
    marker: the file by which a directory is known as one that dspark made; noun: what messages call it.
    Raises UsageError when the target exists (without `force`), or is something that dspark did not make (even with it); MachineError
    when the disk is full.
    """

    marker = MANIFEST_NAME
    noun = "engine"

    def __init__(self, target: str | Path, names: Iterable[str], force: bool = False, shard_bytes: int = SHARD_BYTES) -> None:
        self.target = Path(os.path.realpath(target))  # a symbolic link is followed: the engine goes where it points
        check_target(self.target, force, self.marker, self.noun)
        self._names, self._force, self._shard_bytes = list(names), force, shard_bytes
        self.directory = self.target.parent / f".{self.target.name}.tmp-{os.getpid()}"
        self._stream: SafetensorsStream | None = None
        self._num_shards = 0
        self.tensors: dict[str, TensorRecord] = {}
        self.files: dict[str, str] = {}

    def __enter__(self) -> Self:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(self.target)
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._stream is not None:
            self._stream.abort()
        shutil.rmtree(self.directory, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            what = f"'{self.target}' cannot be written: {_DISK_ERRORS[error.errno]}"
            raise MachineError(what, "make room or name a directory on another disk; nothing was left behind") from error

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor; a new shard begins when this one would grow past its size."""
        tensor = tensor.detach().cpu().contiguous()
        data = tensor_bytes(tensor)
        if self._stream is not None and self._stream.num_bytes + data.nbytes > self._shard_bytes:
            self._close_shard()
        if self._stream is None:
            self._num_shards += 1
            self._stream = SafetensorsStream(self.directory / _shard_draft(self._num_shards), self._names)
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest = xxhash.xxh3_128(data).hexdigest()
        self.tensors[name] = TensorRecord(_shard_draft(self._num_shards), dtype, tuple(tensor.shape), digest)
        self._stream.add(name, tensor)

    def add_tokenizer(self, bundle: TokenizerBundle) -> None:
        """Write the tokenizer's files and the chat template."""
        for name in bundle.write(self.directory):
            self.files[name] = hash_file(self.directory / name)

    def add_json(self, name: str, value: dict[str, Any]) -> None:
        """Write a side file, such as generation_config.json."""
        (self.directory / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        self.files[name] = hash_file(self.directory / name)

    def name_shards(self, pattern: str) -> None:
        """Close the shards and give them their final names. pattern: with `index` and `total`."""
        if self._stream is not None:
            self._close_shard()
        final = {}
        for index in range(1, self._num_shards + 1):
            final[_shard_draft(index)] = pattern.format(index=index, total=self._num_shards)
            (self.directory / _shard_draft(index)).rename(self.directory / final[_shard_draft(index)])
        self.tensors = {name: TensorRecord(final[r.shard], r.dtype, r.shape, r.xxh3) for name, r in self.tensors.items()}

    def publish(self) -> None:
        """Bring everything to disk and put the directory in place."""
        for path in self.directory.iterdir():
            sync(path)
        sync(self.directory)
        replace_directory(self.directory, self.target, self._force, self.marker, self.noun)
        sync(self.target.parent)

    def _close_shard(self) -> None:
        assert self._stream is not None
        self._stream.close()
        self._stream = None


class EngineWriter(ShardedWriter):
    """Writes an engine: after the last tensor `finish` writes the manifest."""

    def finish(self, model: ModelConfig, quant: QuantConfig | None, lineage: dict[str, Any], **results: Any) -> EngineManifest:
        """Name the shards and write the manifest. results: audit, quality, notes."""
        self.name_shards(SHARD_PATTERN)
        manifest = EngineManifest(
            model=model, tensors=self.tensors, quant=quant, lineage=lineage, files=self.files, created=int(time.time()), **results
        )
        manifest.save(self.directory)
        return manifest


def _shard_draft(index: int) -> str:
    return f"weights-{index:05d}.part"


def check_target(target: Path, force: bool, marker: str = MANIFEST_NAME, noun: str = "engine") -> None:
    """Raise UsageError when an engine (or what else `marker` and `noun` say) may not be written there."""
    if not target.exists():
        return
    if not target.is_dir():
        raise UsageError(f"'{target}' exists and is a file", "name a directory that does not exist yet")
    if not any(target.iterdir()):
        return
    if not (target / marker).is_file():
        raise UsageError(f"'{target}' exists and is no {noun}, so it is not replaced", "name a directory that does not exist yet")
    if not force:
        raise UsageError(f"{noun} '{target}' exists", "type --force to replace it, or name another directory")


def replace_directory(source: Path, target: Path, force: bool, marker: str = MANIFEST_NAME, noun: str = "engine") -> None:
    """Rename a directory into place; one of its kind already there is swapped with it in one step where the system can, and removed.

    Raises UsageError when the target has come into being meanwhile.
    """
    check_target(target, force, marker, noun)
    try:
        os.rename(source, target)  # also takes the place of an empty directory
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if _exchange(source, target):
        shutil.rmtree(source, ignore_errors=True)
        return
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    os.rename(target, old)
    try:
        os.rename(source, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths atomically (Linux renameat2). False where the system has no such call."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0)


def remove_stale(target: Path) -> None:
    """Remove temporary directories that processes which are gone left beside this target."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(tmp|old)-(\d+)")
    for entry in target.parent.iterdir():
        match = pattern.fullmatch(entry.name)
        if match is None or is_alive(int(match[2])):
            continue
        if match[1] == "old" and not target.exists():  # killed between the two renames of a swap: the old engine is the engine
            os.rename(entry, target)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def sync(path: Path) -> None:
    """Bring a file or directory to disk; a directory that cannot be synced (some network file systems) is left to the system."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode) or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """Hex xxh3_128 of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()
