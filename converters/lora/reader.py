"""A checkpoint with adapters merged into it, itself a checkpoint reader: everything behind it takes it for an ordinary model.

Tensors are merged one at a time when they are read; nothing else is held. Names, shapes, ranks and halves of pairs are checked before, for
all adapters, and reported in one error.

A tied head is one parameter under two names. An adapter may change it under one of them (LoRA on the head alone, a saved copy of the
embedding alone); the model then has two matrices and is written untied. Where both come out the same, it stays tied.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.converters.lora.adapter import Adapter
from dspark.converters.lora.keys import EMBEDDING, HEAD, Patch, Shape, check_patch, sort_keys
from dspark.converters.lora.merge import equal_values, merge
from dspark.converters.readers.base import CheckpointReader, TensorInfo
from dspark.converters.tokenizer_files import TokenizerBundle, bundle_from_transformers, has_tokenizer_files, load_transformers_tokenizer
from dspark.runtime.models.hf_config import model_config_from_hf
from dspark.runtime.spec.errors import InputError

if TYPE_CHECKING:
    import torch

_EMBEDDING_WEIGHT, _HEAD_WEIGHT = f"{EMBEDDING}.weight", f"{HEAD}.weight"


class LoraReader:
    """`base` with `adapters` merged in, in order. Raises InputError listing every adapter tensor that does not fit."""

    def __init__(self, base: CheckpointReader, adapters: Sequence[Adapter]) -> None:
        self.base = base
        self.adapters = list(adapters)
        self.path = base.path
        self.format = base.format
        self._config = dict(base.config())
        self._infos = dict(base.tensors())
        self.notes: list[str] = list(getattr(base, "notes", ()))
        self._tied = self._is_tied()
        if self._tied:
            self._infos[_HEAD_WEIGHT] = self._infos[_EMBEDDING_WEIGHT]
        self._patches = self._sort()
        self._settle_vocabulary()
        self._settle_head()
        self._note_bases()
        self._tokenizer_from = self._choose_tokenizer()

    def config(self) -> dict[str, Any]:
        return self._config

    def generation_config(self) -> dict[str, Any] | None:
        return self.base.generation_config()

    def tensors(self) -> dict[str, TensorInfo]:
        return self._infos

    def read(self, name: str) -> torch.Tensor:
        """float32 for a tensor that an adapter changes, else as the base has it."""
        source = _EMBEDDING_WEIGHT if name == _HEAD_WEIGHT and self._tied else name
        module, _, leaf = name.rpartition(".")
        patches = [patch for patch in self._patches.get(module, ()) if patch.changes(leaf)]
        if not patches:
            return self.base.read(source)
        return merge(self.base.read(source), patches, leaf, self._infos[name].shape[0])

    def storage_dtype(self) -> str:
        return self.base.storage_dtype()

    def tokenizer(self) -> TokenizerBundle | None:
        if self._tokenizer_from is None:
            return self.base.tokenizer()
        return bundle_from_transformers(self.reference_tokenizer())

    def reference_tokenizer(self) -> Any:
        if self._tokenizer_from is None:
            return self.base.reference_tokenizer()
        return load_transformers_tokenizer(self._tokenizer_from)

    def files(self) -> list[Path]:
        return self.base.files()

    def _is_tied(self) -> bool:
        """Whether head and embedding are one parameter: the flag is set, and a head that was saved all the same is a copy."""
        if not model_config_from_hf(self._config).tie_word_embeddings or _EMBEDDING_WEIGHT not in self._infos:  # some families' default
            return False
        return _HEAD_WEIGHT not in self._infos or equal_values(self.base.read(_HEAD_WEIGHT), self.base.read(_EMBEDDING_WEIGHT))

    def _sort(self) -> dict[str, list[Patch]]:
        """Layer -> patches in the order of the adapters."""
        shapes = {name: info.shape for name, info in self._infos.items()}
        patches: dict[str, list[Patch]] = {}
        complaints = []
        for adapter in self.adapters:
            faults: list[str] = []
            found = sort_keys(adapter, shapes, faults)
            if self._tied:
                _share(found, adapter, shapes[_EMBEDDING_WEIGHT])
            for module, patch in found.items():
                faults += check_patch(patch, shapes[f"{module}.weight"], shapes.get(f"{module}.bias"))
                patches.setdefault(module, []).append(patch)
            if not adapter.shapes():
                faults.append("it holds no tensors")
            if faults:
                complaints.append(f"adapter '{adapter.path}' does not fit '{self.path}': {'; '.join(faults)}")
        if complaints:
            raise InputError("; ".join(complaints), "use the base model that the adapter was trained on; nothing was written")
        return patches

    def _settle_vocabulary(self) -> None:
        """Rows of embedding and head after training; both must have the same number, and one adapter alone may change it."""
        old = self._infos[_EMBEDDING_WEIGHT].shape[0] if _EMBEDDING_WEIGHT in self._infos else 0
        resized: dict[str, dict[int, Adapter]] = {EMBEDDING: {}, HEAD: {}}
        for module, by_rows in resized.items():
            for patch in self._patches.get(module, ()):
                key = patch.replacement("weight")
                rows = patch.adapter.shapes()[key][0] if key is not None else old
                if rows != old:
                    if by_rows:
                        raise InputError(
                            f"adapters '{next(iter(by_rows.values())).path}' and '{patch.adapter.path}' both change the number of tokens",
                            "merge at most one adapter with new tokens",
                        )
                    by_rows[rows] = patch.adapter
        counts = {module: next(iter(by_rows), old) for module, by_rows in resized.items() if f"{module}.weight" in self._infos}
        if len(set(counts.values())) > 1:
            shown = ", ".join(f"{rows} rows of {module}" for module, rows in counts.items())
            raise InputError(f"the adapters leave {shown}", "the adapter must hold both: save it with save_embedding_layers=True")
        rows = next(iter(counts.values()), old)
        if rows == old:
            return
        for module in counts:
            info = self._infos[f"{module}.weight"]
            self._infos[f"{module}.weight"] = TensorInfo(info.dtype, (rows, *info.shape[1:]))
        self._config["vocab_size"] = rows
        adapter = next(iter(resized[EMBEDDING].values()))
        self.notes.append(f"adapter '{adapter.path.name}' changes the vocabulary from {old} to {rows} rows")

    def _settle_head(self) -> None:
        """Untie the head where the adapters make it another matrix than the embedding."""
        if not self._tied:
            return
        embedding, head = self._patches.get(EMBEDDING, []), self._patches.get(HEAD, [])
        same = [(patch.adapter, patch.keys) for patch in embedding] == [(patch.adapter, patch.keys) for patch in head]
        if same or equal_values(self.read(_HEAD_WEIGHT), self.read(_EMBEDDING_WEIGHT)):
            del self._infos[_HEAD_WEIGHT]
            self._patches.pop(HEAD, None)
            return
        self._config["tie_word_embeddings"] = False
        self.notes.append("the adapters change the tied head and the embedding differently: the engine holds both")

    def _note_bases(self) -> None:
        source = Path(self.path).resolve()
        earlier = getattr(self.base, "lineage", None)  # an engine knows what it was made of
        names = {source.name, source.stem, str(self._config.get("_name_or_path") or source.name)}
        names |= {str(earlier().get("source"))} if earlier is not None else set()
        for adapter in self.adapters:
            if not any(adapter.trained_on(name) for name in names):
                self.notes.append(
                    f"adapter '{adapter.path.name}' names the base model '{adapter.config.base_model}', merged into '{source.name}'"
                )

    def _choose_tokenizer(self) -> Path | None:
        """The last adapter directory that has a tokenizer, or None for the base's."""
        found = [adapter.path for adapter in self.adapters if has_tokenizer_files(adapter.path)]
        if not found:
            return None
        self.notes.append(f"tokenizer and chat template are those of adapter '{found[-1].name}'")
        return found[-1]


def _share(found: dict[str, Patch], adapter: Adapter, shape: Shape) -> None:
    """Give both names of a tied parameter what the adapter's file has under one of them only.

    Trained tokens and a changed base belong to the parameter, so to both. A copy that was trained whole belongs to the name that it was
    saved under when modules_to_save says so, to both when it came about by resizing. LoRA matrices belong to their own name.
    """
    for here, there in ((EMBEDDING, HEAD), (HEAD, EMBEDDING)):
        patch = found.get(here)
        if patch is None:
            continue
        saved = patch.keys.get("saved.weight")
        other = found.get(there, Patch(adapter, there))
        shared = ["tokens"] if here == EMBEDDING and not other.keys else []
        if other.replacement("weight") is None:
            shared.append("base.weight")
            if saved is not None and (not adapter.config.saves(here) or adapter.shapes()[saved] != shape):
                shared.append("saved.weight")
        keys = {**patch.only(*shared).keys, **other.keys}
        if keys != other.keys:
            found[there] = Patch(adapter, there, keys)
