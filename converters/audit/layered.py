"""Logits of a model that does not fit the memory: both sides take the same prompts through one layer after the other.

Two residual streams are kept, ours and transformers'. Each layer is loaded for one side, run over all prompts and dropped, then for the
other side, so that the memory is one layer's; the embedding and the head are held in turn too. The streams are compared after each layer,
and a failure names the one where they part.

transformers' layers are called as transformers' own forward calls them, whatever the family: a first pass with layers that do nothing
notes their arguments (masks, rotations), which depend on the positions alone; a last pass whose last layer hands in the stream gives
norm, head and what a family does to its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dspark.converters.audit.memory import HEAD_ROWS
from dspark.converters.audit.reference import DenseWeights, empty_model, place
from dspark.converters.audit.verdict import LogitDifference, judge
from dspark.converters.mapping import fuse_state
from dspark.runtime.execution.layer_walk import LayerWalk, build_walk_layer
from dspark.runtime.execution.loader import EngineWeights, choose_kernels
from dspark.runtime.models.decoder import Head, build_head, load_embedding
from dspark.runtime.spec.manifest import EngineManifest

Prompts = Sequence[Sequence[int]]
Stage = tuple[str, float]
"""A part of the model, and how far the streams are apart behind it."""
_ROUNDING = 1e-6


def compare_by_layer(directory: Path, manifest: EngineManifest, prompts: Prompts) -> dict[str, Any]:
    """As `logits.compare_whole`, and "layer_errors": the streams' difference after each layer. Raises QualityError."""
    theirs, ours = ReferenceLayers(directory, manifest, prompts), EngineLayers(directory, manifest, prompts)
    theirs.start()
    ours.start()
    stages: list[Stage] = [("the embedding", _apart(ours, theirs))]
    for index in range(manifest.model.num_layers):
        theirs.advance(index)
        ours.advance(index)
        stages.append((f"model.layers.{index}", _apart(ours, theirs)))
    differences = _logit_differences(ours, theirs, prompts)
    ours.check_all_taken()
    worst = torch.tensor([difference.relative_error for difference in differences]).amax()  # a NaN stays one
    stages.append(("the final norm or the head", float(worst)))
    record = judge(prompts, differences, f"; they part in {where_it_begins(stages)}")
    return {**record, "layer_errors": [float(f"{error:.2g}") for _, error in stages[1:-1]]}


def where_it_begins(stages: Sequence[Stage]) -> str:
    """The part of the model behind which the difference has grown most."""
    steps = [(_growth(before, after), name, before, after) for (_, before), (name, after) in pairwise([("", 0.0), *stages])]
    _, name, before, after = max(steps, key=lambda step: step[0])
    return f"{name} (relative difference {before:.1g} before it, {after:.1g} behind it)"


def _growth(before: float, after: float) -> float:
    """A NaN counts as endless; what comes behind one says nothing."""
    if before != before:
        return 0.0
    return after / max(before, _ROUNDING) if after == after else float("inf")


def _apart(ours: EngineLayers, theirs: ReferenceLayers) -> float:
    """Largest distance of two vectors of one token [H], over the length of the wanted one."""
    got, want = ours.walk.residual, torch.cat([stream[0] for stream in theirs.streams])
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-9)).amax())


def _logit_differences(ours: EngineLayers, theirs: ReferenceLayers, prompts: Prompts) -> list[LogitDifference]:
    """One side's head is dropped before the other's is loaded; what is kept is one side's logits."""
    wanted = theirs.logits()
    head, first, differences = ours.head(), 0, []
    for tokens, want in zip(prompts, wanted, strict=True):
        difference = LogitDifference()
        for row in range(0, len(tokens), HEAD_ROWS):
            rows = slice(first + row, first + min(row + HEAD_ROWS, len(tokens)))
            difference.add(ours.walk.logits(head, rows), want[row : row + HEAD_ROWS])
        first += len(tokens)
        differences.append(difference)
    return differences


class EngineLayers:
    """The engine, a layer at a time."""

    def __init__(self, directory: Path, manifest: EngineManifest, prompts: Prompts) -> None:
        self._directory, self._manifest = directory, manifest
        self._kernels = choose_kernels(manifest.model, "float32", "cpu", "reference", exact_activations=True)
        self._weights = self._open()
        self.walk = LayerWalk(manifest.model, prompts, self._kernels)

    def start(self) -> None:
        self.walk.start(load_embedding(self._weights))

    def advance(self, index: int) -> None:
        manifest = self._manifest
        self.walk.advance(build_walk_layer(manifest.model, index, manifest.quant, self._weights, self._kernels))

    def head(self) -> Head:
        """A tied one is the embedding, which is read again rather than held all the way."""
        manifest = self._manifest
        tied = manifest.model.tie_word_embeddings
        embedding = load_embedding(self._open()) if tied else torch.empty(0)
        return build_head(manifest.model, embedding, manifest.quant, self._weights, self._kernels)

    def check_all_taken(self) -> None:
        self._weights.check_all_taken()

    def _open(self) -> EngineWeights:
        return EngineWeights(self._directory, self._manifest, torch.float32, "cpu")


class ReferenceLayers:
    """transformers' model, a layer at a time. streams: of each prompt [1, T, H]."""

    def __init__(self, directory: Path, manifest: EngineManifest, prompts: Prompts) -> None:
        self._config, self._prompts = manifest.model, prompts
        self._weights = DenseWeights(directory, manifest)
        self._model = empty_model(manifest.model)
        self._calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = [[] for _ in prompts]
        self.streams: list[torch.Tensor] = []

    def start(self) -> None:
        """Note how the forward calls its layers, and what it gives the first one."""
        decoder = self._model.model
        self._place(decoder.norm, "model.norm")
        self._place(decoder.embed_tokens, "model.embed_tokens")
        for tokens, calls in zip(self._prompts, self._calls, strict=True):
            with _in_place_of_layers(decoder, partial(_note, calls)):
                decoder(input_ids=torch.tensor([list(tokens)]), use_cache=False)
            self.streams.append(calls[0][0][0])
        decoder.embed_tokens.to("meta")

    def advance(self, index: int) -> None:
        layer = self._model.model.layers[index]
        self._place(layer, f"model.layers.{index}", index)
        for number, calls in enumerate(self._calls):
            arguments, named = calls[index]
            self.streams[number] = layer(self.streams[number], *arguments[1:], **named)
        layer.to("meta")

    def logits(self) -> list[torch.Tensor]:
        """Of each prompt, float32 [T, V]."""
        model = self._model
        self._place(model.lm_head, "model.embed_tokens" if self._config.tie_word_embeddings else "lm_head")
        found = []
        for stream in self.streams:
            rows = torch.arange(stream.shape[1]).split(HEAD_ROWS)
            with _in_place_of_layers(model.model, lambda index, hidden, *_, stream=stream, **__: stream):
                parts = [model(inputs_embeds=stream, use_cache=False, logits_to_keep=part).logits[0] for part in rows]
            found.append(torch.cat(parts).float())
        model.lm_head.to("meta")
        return found

    def _place(self, module: Any, name: str, layer: int | None = None) -> None:
        """Give a module the weights that the engine has for the module `name`, which is that layer or no layer's."""
        state = self._weights.state(f"{name}.")
        if layer is not None:
            state = fuse_state(self._config, state, layer)
        place(module, {tensor_name.removeprefix(f"{name}."): tensor for tensor_name, tensor in state.items()})


def _note(calls: list[tuple[tuple[Any, ...], dict[str, Any]]], index: int, *arguments: Any, **named: Any) -> torch.Tensor:
    """A layer that leaves the stream as it is. Only the first one's stream is kept: it is the embedding's."""
    calls.append((arguments if index == 0 else (None, *arguments[1:]), named))
    hidden: torch.Tensor = arguments[0]
    return hidden


@contextmanager
def _in_place_of_layers(decoder: Any, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Every layer's forward is `forward(index, ...)` inside the block."""
    for index, layer in enumerate(decoder.layers):
        layer.forward = partial(forward, index)
    try:
        yield
    finally:
        for layer in decoder.layers:
            del layer.forward
