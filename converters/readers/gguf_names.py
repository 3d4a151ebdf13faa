"""Where the tensors of a Hugging Face checkpoint stand in a GGUF file: their names, and the experts that a file holds as one tensor.

Names are those of the `gguf` package's `MODEL_TENSOR` table. A layer's experts are three stacks `ffn_{gate,up,down}_exps` [E, N, K] or, in
Mixtral files from before April 2024, a tensor for each expert, `ffn_{gate,up,down}.E` (llama.cpp, pull request 6387).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dspark.converters.readers.gguf_families import ARCHITECTURES, TOP_NAMES
from dspark.converters.readers.gguf_file import GgufTensor
from dspark.runtime.spec.errors import InputError

_LAYER_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_STACK = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
_ONE_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
_SHARED_GATE = "mlp.shared_expert_gate.weight"


@dataclass(frozen=True)
class Place:
    """Where a tensor stands: in the tensor `source` of the file, from its row first_row on. shape: as Hugging Face has it.

    Rows are counted over all dimensions but the last, so that an expert's rows in a stack lie behind each other.
    """

    source: str
    shape: tuple[int, ...]
    first_row: int = 0

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])


def place_tensors(tensors: Mapping[str, GgufTensor], architecture: str, path: Path) -> dict[str, Place]:
    """Hugging Face name -> place. A tensor that is not known keeps its name, so that the check of names reports it.

    Raises InputError for a tensor that the file holds twice (in a stack and by itself, say).
    """
    places: dict[str, Place] = {}
    for source, tensor in tensors.items():
        for name, place in _places_in(source, tensor.shape, architecture):
            if name in places:
                raise InputError(f"'{path}' holds {name} twice, in {places[name].source} and in {source}", "download it again")
            places[name] = place
    return places


def hugging_face_name(name: str, architecture: str = "llama") -> str:
    """Hugging Face name of a GGUF tensor that stands for one of theirs; an unknown name stays."""
    stem, _, leaf = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{leaf}"
    single = _ONE_EXPERT.fullmatch(name)
    if single:
        return _expert_name(single[1], int(single[3]), single[2])
    match = _LAYER_NAME.fullmatch(name)
    names = ARCHITECTURES[architecture].layer_names()
    if match and match[2] in names:
        return f"model.layers.{int(match[1])}.{names[match[2]]}.{match[3]}"
    return name


def _places_in(source: str, shape: tuple[int, ...], architecture: str) -> Iterator[tuple[str, Place]]:
    stack = _STACK.fullmatch(source)
    if stack and len(shape) == 3 and 0 not in shape:
        num_experts, *matrix = shape
        for expert in range(num_experts):
            yield _expert_name(stack[1], expert, stack[2]), Place(source, tuple(matrix), expert * matrix[0])
        return
    name = hugging_face_name(source, architecture)
    row = (1, *shape) if name.endswith(_SHARED_GATE) and len(shape) == 1 else shape  # llama.cpp drops the dimension of 1
    yield name, Place(source, row)


def _expert_name(layer: str, expert: int, part: str) -> str:
    return f"model.layers.{int(layer)}.mlp.experts.{expert}.{part}_proj.weight"
