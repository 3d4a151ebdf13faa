"""PyTorch pickles (.bin, .pt, .pth, .ckpt): one file, or shards that `pytorch_model.bin.index.json` names.

A pickle is a program. It is only ever opened with torch's `weights_only` loader, which builds tensors and plain containers and refuses
the rest; there is no switch that turns this off. Tensors of the zip form (torch >= 1.6) are views of a memory map; the older form is read
whole.

Trainers wrap and rename: `{"epoch": 3, "model": {"module.model.layers...": ...}}`. A wrapper is opened when exactly one of its entries
holds weights, a prefix is taken off when every tensor has it; anything else is refused, since a half recognised checkpoint is a half random
model.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.converters.readers.base import TensorInfo, majority_dtype, summarize
from dspark.converters.readers.pickle_names import INDEX_NAME, pickled_weights
from dspark.converters.readers.safetensors import SIDE_FILES, check_not_lfs_pointer, read_json_object, read_weight_map
from dspark.converters.tokenizer_files import TokenizerBundle, bundle_from_transformers, has_tokenizer_files, load_transformers_tokenizer
from dspark.runtime.spec.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    import torch

WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "model_state", "weights")
_PREFIXES = ("module", "model", "_orig_mod", "_forward_module", "state_dict", "net")
_ANCHOR = "model.embed_tokens.weight"
_MAX_WRAPPERS = 3
_ZIP_MAGIC = b"PK\x03\x04"
_SAVE_AS = "load it where you trust its origin and save the weights alone, as safetensors: model.save_pretrained(DIR)"


class TorchBinReader:
    """A directory with config.json and pickled weights, or one such file beside its config.json.

    Raises InputError for a damaged or ambiguous checkpoint, UnsupportedError for one that holds more than weights; nothing in it is run.
    """

    format = "pytorch"

    def __init__(self, path: Path) -> None:
        self.path = path.parent if path.is_file() else path
        names, file_of = self._locate(path)
        states = {name: load_state(self.path / name) for name in names}
        if file_of is None:
            found = states[names[0]]
        else:
            lost = [f"{tensor} (not in {name})" for tensor, name in file_of.items() if tensor not in states[name]]
            if lost:
                raise InputError(f"{INDEX_NAME} of '{self.path}' names tensors that are not there: {summarize(lost)}", "download it again")
            found = {tensor: states[name][tensor] for tensor, name in file_of.items()}
        self._files = names
        packed = sorted(name for name in found if name.endswith((".qweight", ".qzeros", ".g_idx")))
        if packed:
            what = f"'{self.path}' holds quantized weights in a pickle ({summarize(packed, 2)})"
            raise UnsupportedError(f"{what}, which is not supported", "save the quantized model as safetensors")
        self._weights = strip_prefix(found, self.path)
        self._tensors = {
            name: TensorInfo(str(weight.dtype).removeprefix("torch."), tuple(weight.shape)) for name, weight in self._weights.items()
        }

    def config(self) -> dict[str, Any]:
        return read_json_object(self.path / "config.json")

    def generation_config(self) -> dict[str, Any] | None:
        path = self.path / "generation_config.json"
        return read_json_object(path) if path.is_file() else None

    def tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> torch.Tensor:
        return self._weights[name].contiguous()

    def storage_dtype(self) -> str:
        return majority_dtype(self._tensors)

    def tokenizer(self) -> TokenizerBundle | None:
        tokenizer = self.reference_tokenizer()
        return bundle_from_transformers(tokenizer) if tokenizer is not None else None

    def reference_tokenizer(self) -> Any:
        return load_transformers_tokenizer(self.path) if has_tokenizer_files(self.path) else None

    def files(self) -> list[Path]:
        side = [self.path / name for name in (*SIDE_FILES, INDEX_NAME) if (self.path / name).is_file()]
        return side + [self.path / name for name in self._files]

    def _locate(self, path: Path) -> tuple[list[str], dict[str, str] | None]:
        """The files of the weights and, for a sharded checkpoint, tensor name -> file."""
        if path.is_file():
            return [path.name], None
        names = pickled_weights(frozenset(entry.name for entry in path.iterdir()))
        if len(names) != 1:
            what = f"'{path}' holds {len(names)} pickles that can be its weights ({summarize(names, 4)})"
            raise InputError(what, f"name one, such as {path / names[0]}" if names else "give a checkpoint directory")
        if names[0] != INDEX_NAME:
            return names, None
        file_of = read_weight_map(path, INDEX_NAME)
        return sorted(set(file_of.values())), file_of


def load_state(path: Path) -> dict[str, torch.Tensor]:
    """The state dict in one pickle, out of its trainer wrappers, names as they are.

    Raises InputError for a damaged file, UnsupportedError naming what it holds besides tensors.
    """
    state = _unwrap(_load(path), path, ())
    odd = {name: _describe(value) for name, value in state.items() if _fault(value) is not None}
    if odd:
        listed = summarize([f"{name} ({what})" for name, what in odd.items()], 5)
        raise UnsupportedError(f"'{path}' holds more than weights: {listed}", _SAVE_AS)
    return {name: value.detach() for name, value in state.items()}


def strip_prefix(state: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """The state without the prefix that a trainer put before every name (`module.`, `model.`, `_orig_mod.` ...).

    Raises InputError when only some names have it, or when the embedding stands there twice.
    """
    anchors = [name for name in state if name == _ANCHOR or name.endswith("." + _ANCHOR)]
    if len(anchors) > 1:
        raise InputError(f"'{path}' holds more than one model: {summarize(anchors, 4)}", "save the weights of one model alone")
    prefix = anchors[0].removesuffix(_ANCHOR) if anchors else ""
    if not prefix or any(part not in _PREFIXES for part in prefix.rstrip(".").split(".")):
        return state  # the check of names reports whatever else it is
    others = [name for name in state if not name.startswith(prefix)]
    if others:
        what = f"'{path}' has the prefix '{prefix}' before some tensors and not before {summarize(others, 5)}"
        raise InputError(what, "save the model's state_dict alone")
    return {name.removeprefix(prefix): weight for name, weight in state.items()}


def _load(path: Path) -> Any:
    import pickle
    import warnings

    import torch

    check_not_lfs_pointer(path)
    try:
        with path.open("rb") as file:
            zipped = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
        with warnings.catch_warnings(action="ignore"):  # on the pickle's protocol: an error says what matters
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        refused = _unsafe_names(path, str(error))
        if refused:
            raise UnsupportedError(f"'{path}' is a pickle with objects that are no tensors: {summarize(refused, 5)}", _SAVE_AS) from error
        raise InputError(f"'{path}' is no checkpoint that torch can load safely ({_first_line(error)})", _SAVE_AS) from error
    except OSError as error:
        raise InputError(f"'{path}' cannot be read ({error.strerror or error})", "check the checkpoint directory") from error
    except Exception as error:  # the unpickler stumbles in as many ways as a file can be damaged; nothing was run
        raise InputError(f"'{path}' is damaged, not complete or no PyTorch checkpoint ({_first_line(error)})", "get it again") from error


def _unsafe_names(path: Path, message: str) -> list[str]:
    """The functions and classes that a pickle asks for and that are not allowed, found without running it."""
    from torch.serialization import get_unsafe_globals_in_checkpoint

    try:
        found = sorted(get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:  # only the zip form can be listed; the loader's own message names the first one
        found = []
    return found or sorted(set(re.findall(r"GLOBAL ([\w.]+)", message)))


def _unwrap(value: Any, path: Path, outer: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict) or not value or not all(isinstance(key, str) for key in value):
        inside = f" in its entry {'.'.join(outer)}" if outer else ""
        raise UnsupportedError(f"'{path}' holds {_describe(value)}{inside}, a state dict is needed", _SAVE_AS)
    if any(_is_tensor(entry) for entry in value.values()):
        return value
    holders = [key for key, entry in value.items() if _holds_weights(entry)]
    if len(holders) == 1 and holders[0] in WRAPPERS and len(outer) < _MAX_WRAPPERS:
        return _unwrap(value[holders[0]], path, (*outer, holders[0]))
    listed = summarize([f"{key} ({_describe(entry)})" for key, entry in value.items()], 8)
    if len(holders) > 1:
        what = f"'{path}' is a trainer's checkpoint with weights in more than one entry ({', '.join(holders)})"
        raise UnsupportedError(what, _SAVE_AS)
    raise UnsupportedError(f"'{path}' has no weights under one of {', '.join(WRAPPERS)}; it holds {listed}", _SAVE_AS)


def _holds_weights(value: Any, depth: int = 0) -> bool:
    """Whether a mapping by names holds a matrix, itself or within wrappers (an optimizer's state is keyed by numbers)."""
    if not isinstance(value, dict) or depth > _MAX_WRAPPERS or not all(isinstance(key, str) for key in value):
        return False
    return any((_is_tensor(entry) and entry.dim() >= 2) or _holds_weights(entry, depth + 1) for entry in value.values())


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _fault(value: Any) -> str | None:
    """Why a value is no weight that can be read, or None."""
    import torch

    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.is_meta:
        return "tensor without data"
    if value.layout != torch.strided:
        return f"sparse tensor ({value.layout})"
    return "torch quantized tensor" if value.is_quantized else None


def _describe(value: Any) -> str:
    fault = _fault(value)
    if fault is None:
        return f"tensor {list(value.shape)}"
    return f"dict of {len(value)}" if isinstance(value, dict) else fault


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
