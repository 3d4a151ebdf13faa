"""What every checkpoint format offers: its config, its tensors one at a time, its tokenizer, and the files that it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from dspark.converters.tokenizer_files import TokenizerBundle

FLOAT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class TensorInfo:
    """dtype: a torch dtype's name, or the format's own ("Q4_1"). shape: as `read` returns it.

    packed: the tensor is the weight of a quantized module, dequantized by `read`; dtype then describes its storage.
    """

    dtype: str
    shape: tuple[int, ...]
    packed: bool = False

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class CheckpointReader(Protocol):
    """One checkpoint. Constructing a reader reads headers only; names are Hugging Face's for the family.

    path: what the user named. format: key of the table in `detect`.
    """

    path: Path
    format: str

    def config(self) -> dict[str, Any]:
        """The model as a Hugging Face config. Raises InputError when it is absent or damaged."""

    def generation_config(self) -> dict[str, Any] | None:
        """Generation defaults, or None when the checkpoint has none."""

    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor of the checkpoint by name, without reading the data. Raises InputError for a damaged or missing file."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor, lazily from the memory-mapped file. The caller must not write to it."""

    def storage_dtype(self) -> str:
        """The dtype that the tensors themselves speak for, one of FLOAT_DTYPES."""

    def tokenizer(self) -> TokenizerBundle | None:
        """The tokenizer as an engine keeps it, or None when the checkpoint has none."""

    def reference_tokenizer(self) -> Any:
        """transformers' own tokenizer of the source for the audit, or None where transformers reads this format wrongly."""

    def files(self) -> list[Path]:
        """Files that the engine derives from, for the lineage."""


def summarize(names: list[str], limit: int = 20) -> str:
    """Names joined by commas, the tail counted once there are more than `limit`."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def majority_dtype(tensors: dict[str, TensorInfo]) -> str:
    """The float dtype that holds most elements of the matrices (float32 when there is no float matrix)."""
    counts: dict[str, int] = {}
    for info in tensors.values():
        if info.dtype in FLOAT_DTYPES and len(info.shape) == 2:
            counts[info.dtype] = counts.get(info.dtype, 0) + info.num_elements
    return max(counts, key=lambda dtype: counts[dtype]) if counts else "float32"
