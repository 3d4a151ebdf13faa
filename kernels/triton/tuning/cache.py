"""What was measured on a machine, kept for its next runs: one JSON file for a GPU, a triton and a state of these kernels.

    ~/.cache/dspark/tiles/NVIDIA-H100-80GB-HBM3-sm90-triton3.7.1-1a2b3c4d5e6f.json      (or below XDG_CACHE_HOME)

No run fails for it: a file that is damaged or another's is ignored and written anew, a directory that cannot be written is said once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dspark.kernels.triton.tuning.choices import Tuned, as_json, from_json
from dspark.kernels.triton.tuning.limits import DeviceLimits

FORMAT = 1
LOCK_TIMEOUT_S = 5.0
POLL_S = 0.05


def cache_directory() -> Path:
    """Where a user's caches of dspark are."""
    from platformdirs import user_cache_path

    return user_cache_path("dspark") / "tiles"


@lru_cache
def kernel_revision() -> str:
    """12 digits of a hash of the kernels' source files: what was measured of others says nothing about these."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def triton_version() -> str:
    """Of the installed triton, which is not imported for it."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


@dataclass(frozen=True)
class TileCache:
    """The file of one GPU, triton and state of the kernels."""

    directory: Path
    device: str
    capability: tuple[int, int]
    triton: str
    kernels: str

    @classmethod
    def of(cls, limits: DeviceLimits, directory: Path | None = None) -> TileCache:
        """The file for a device with what is installed here."""
        where = cache_directory() if directory is None else directory
        return cls(where, limits.name, limits.capability, triton_version(), kernel_revision())

    @property
    def path(self) -> Path:
        name = re.sub(r"[^A-Za-z0-9.+-]+", "-", self.device).strip("-")
        return self.directory / f"{name}-sm{self.capability[0]}{self.capability[1]}-triton{self.triton}-{self.kernels}.json"

    def load(self) -> tuple[dict[str, Tuned], str | None]:
        """(entries by key, why some or all are not there or None). A file that is not there has none and no reason."""
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}, None
        except (OSError, ValueError) as error:
            return {}, f"the tile cache '{self.path}' is ignored: it cannot be read ({_first_line(error)})"
        if not isinstance(document, dict) or self._header() != {name: document.get(name) for name in self._header()}:
            return {}, f"the tile cache '{self.path}' is ignored: it is of another device, triton or state of the kernels"
        entries, odd = {}, 0
        found = document.get("entries")
        for key, entry in found.items() if isinstance(found, dict) else ():
            try:
                entries[key] = from_json(entry)
            except ValueError:
                odd += 1
        return entries, f"{odd} entries of the tile cache '{self.path}' are ignored: they are no tiles" if odd else None

    def save(self, entries: Mapping[str, Tuned]) -> str | None:
        """Add entries to the file, in the place of those of the same keys; None, or why that could not be."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                kept = {**self.load()[0], **entries}
                document = {**self._header(), "entries": {key: as_json(kept[key]) for key in sorted(kept)}}
                self._write(json.dumps(document, indent=1) + "\n")
        except (OSError, TimeoutError) as error:
            return f"the tile cache '{self.path}' is not written ({_first_line(error)})"
        return None

    def _header(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "device": self.device,
            "capability": list(self.capability),
            "triton": self.triton,
            "kernels": self.kernels,
        }

    def _write(self, text: str) -> None:
        """Whole or not at all: another run may read at any time."""
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}-", dir=self.directory)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An advisory lock, dropped by the system when its holder dies. Raises TimeoutError when another run holds it for long."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError("another run is writing it") from None
                time.sleep(POLL_S)
        yield
    finally:
        os.close(handle)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
