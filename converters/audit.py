"""The check before an engine is published: does it compute what transformers computes from the same config and weights?

    logits      float32, relative 1e-3: transformers' model built from OUR config and OUR tensors against our engine, a long prompt included
    tokenizer   the engine's files against transformers' tokenizer of the source: ids and text of the probes below
    template    the engine's rendering of a few conversations against transformers' apply_chat_template

The config and weights are ours on both sides, so that a fault in transformers' reader of some format is not taken for one of ours; that the
tensors were read rightly is what the readers' tests are for. A model that does not fit memory is recorded as "not audited".

Activations that an engine quantizes (W8A8) stay as they are here, on both sides: a value on the border of two codes falls to either side by
the last bit of a sum, and a few layers on the logits are a third of the quantization's own error apart, which would hide a wrong weight.
The rounding itself is one op without parameters, held to its definition by the kernels' tests.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.converters.mapping import fuse_state, parameter_count
from dspark.converters.readers.base import CheckpointReader
from dspark.converters.readers.safetensors import open_safetensors
from dspark.converters.threads import one_torch_thread
from dspark.runtime.models.hf_config import hf_config_from_model
from dspark.runtime.spec.errors import QualityError, RequestError
from dspark.runtime.spec.manifest import EngineManifest, load_manifest
from dspark.runtime.spec.model_config import ModelConfig

if TYPE_CHECKING:
    import torch

MAX_RELATIVE_ERROR = 1e-3
LONG_PROMPT_TOKENS = 256
PROBE_TEXTS = (
    "The river runs under the old stone bridge.",
    "def add(a, b):\n    return a + b  # 1 + 2 = 3\n\n1. First\n\n2. Second",
    "  two  spaces,\ttabs\r\nand 1234567 digits 3.14",
    "naïve café, Größe, 東京, Привет, שלום, 🙂👍🏽",
    '{"key": [1, -2.5e3, null], \'quoted\': "it\'s"}',
)
PROBE_CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello\n\nthere"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": " 1. List  "}],
)
_ONE_THREAD_BELOW = 10**9  # parameters; small products lose more to threads that wait for each other than they gain
_BYTES_PER_PARAMETER = 4
_MEMORY_MARGIN = 1.5  # our loader and transformers' modules hold more than the bare weights for a moment


def audit_engine(directory: Path, reader: CheckpointReader) -> dict[str, Any]:
    """The audit's record for the manifest; its "summary" is one line for the user.

    directory: the engine as written, not yet published. Raises QualityError when a check fails.
    """
    manifest = load_manifest(directory)
    record: dict[str, Any] = {"logits": audit_logits(directory, manifest), "tokenizer": audit_tokenizer(directory, reader)}
    logits = record["logits"]
    measured = "max_relative_error" in logits
    record["summary"] = (
        f"audit passed (logits within {logits['max_relative_error']:.1e} of transformers, {record['tokenizer']['summary']})"
        if measured
        else f"{logits['summary']}; {record['tokenizer']['summary']}"
    )
    return record


def audit_logits(directory: Path, manifest: EngineManifest) -> dict[str, Any]:
    """Largest difference of logits, relative to the largest logit. Raises QualityError above MAX_RELATIVE_ERROR."""
    import psutil
    import torch

    config = manifest.model
    count = parameter_count(config)
    needed = int(count * _BYTES_PER_PARAMETER * _MEMORY_MARGIN)
    free = int(psutil.virtual_memory().available)
    if needed > free:
        return {"summary": f"not audited: the model in float32 needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"}
    prompts = probe_prompts(directory, config)
    with torch.inference_mode(), one_torch_thread() if count < _ONE_THREAD_BELOW else nullcontext():
        expected = _reference_logits(directory, manifest, prompts)
        ours = _engine_logits(directory, prompts)
    worst, agreement = 0.0, []
    for tokens, got, want in zip(prompts, ours, expected, strict=True):
        error = float((got - want).abs().max() / want.abs().max().clamp(min=1e-9))
        agreement.append(float((got.argmax(-1) == want.argmax(-1)).float().mean()))
        worst = max(worst, error)
        if not error <= MAX_RELATIVE_ERROR:  # a NaN fails too
            raise QualityError(
                f"audit failed: on a prompt of {len(tokens)} tokens the logits differ from transformers by {error:.2g} of the largest, "
                f"allowed {MAX_RELATIVE_ERROR:g}",
                "nothing was written; report this checkpoint, or type --no-audit to convert it all the same",
            )
    return {
        "max_relative_error": worst,
        "allowed": MAX_RELATIVE_ERROR,
        "argmax_agreement": round(sum(agreement) / len(agreement), 6),
        "prompt_tokens": [len(tokens) for tokens in prompts],
    }


def probe_prompts(directory: Path, config: ModelConfig) -> list[list[int]]:
    """Token ids: two probe texts where there is a tokenizer, and a long prompt of ids spread over the vocabulary (past a short window)."""
    from dspark.runtime.jobs.tokenizer import load_codec

    spread = random.Random(0)
    window = config.sliding_window if config.sliding_window and config.sliding_window < 4 * LONG_PROMPT_TOKENS else 0
    length = min(max(LONG_PROMPT_TOKENS, window + 64), config.context_length)
    prompts = [[spread.randrange(config.vocab_size) for _ in range(length)]]
    if (directory / "tokenizer.json").is_file():
        codec = load_codec(directory)
        for text in PROBE_TEXTS[:2]:
            ids = [token for token in codec.encode(text, add_special_tokens=True) if token < config.vocab_size]
            prompts += [ids[: config.context_length]] if ids else []
    return prompts


def _reference_logits(directory: Path, manifest: EngineManifest, prompts: list[list[int]]) -> list[torch.Tensor]:
    import torch

    model = reference_model(directory, manifest)
    return [model(torch.tensor([tokens])).logits[0].float() for tokens in prompts]


def _engine_logits(directory: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    from dspark.runtime.execution.loader import load_model
    from dspark.runtime.execution.logits import logits_for

    model = load_model(directory, dtype="float32", device="cpu", kernels="reference", exact_activations=True)
    return [logits_for(model, tokens).float() for tokens in prompts]


def reference_model(directory: Path, manifest: EngineManifest) -> Any:
    """transformers' model in float32 with the engine's config and (dequantized) weights."""
    import torch
    import transformers

    described = hf_config_from_model(manifest.model)
    config = transformers.AutoConfig.for_model(**described)
    config._attn_implementation = "eager"
    with torch.device("meta"):  # no random initialisation of weights that are replaced at once
        model = getattr(transformers, described["architectures"][0])(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its buffers are computed, not loaded
    embed = model.model.embed_tokens
    if hasattr(embed, "scalar_embed_scale"):  # so is Gemma's factor on the embedding
        embed.embed_scale = torch.tensor(embed.scalar_embed_scale)
    missing, unexpected = model.load_state_dict(fuse_state(manifest.model, dense_state(directory, manifest)), strict=False, assign=True)
    if manifest.model.tie_word_embeddings:
        model.tie_weights()
        missing = [name for name in missing if name != "lm_head.weight"]
    if missing or unexpected:
        raise QualityError(f"audit failed: transformers finds tensors missing ({missing[:3]}) or unexpected ({unexpected[:3]})")
    return model.eval()


def dense_state(directory: Path, manifest: EngineManifest) -> dict[str, torch.Tensor]:
    """Every weight of an engine as a dense float32 tensor by its name."""
    import torch

    from dspark.runtime.layers.linear import build_weight

    handles = {record.shard: open_safetensors(directory / record.shard) for record in manifest.tensors.values()}

    def load(name: str) -> torch.Tensor:
        return handles[manifest.tensors[name].shard].get_tensor(name)

    state = {}
    for name in manifest.tensors:
        module, _, leaf = name.rpartition(".")
        scheme = manifest.quant.scheme_for(module) if manifest.quant else None
        if scheme is None or leaf not in scheme.leaves():
            state[name] = load(name).float()
        elif leaf == "qweight":
            weight = build_weight(module, scheme, {part: load(f"{module}.{part}") for part in scheme.leaves()})
            state[f"{module}.weight"] = weight.dense(torch.float32)
    return state


def audit_tokenizer(directory: Path, reader: CheckpointReader) -> dict[str, Any]:
    """Probe texts and conversations against transformers. Raises QualityError naming the first probe that differs."""
    from dspark.converters.tokenizer_files import load_transformers_tokenizer
    from dspark.runtime.jobs.tokenizer import load_codec

    if not (directory / "tokenizer.json").is_file():
        return {"summary": "no tokenizer"}
    codec = load_codec(directory)
    source = reader.reference_tokenizer()
    for text in PROBE_TEXTS:
        _check_text(codec, source, text)
    checked = "AutoTokenizer of the source" if source is not None else "round trip of each text"
    templates = _check_chats(codec, source if source is not None else load_transformers_tokenizer(directory))
    return {"texts": len(PROBE_TEXTS), "compared_with": checked, "templates": templates, "summary": f"tokenizer equal, {templates}"}


def _check_text(codec: Any, source: Any, text: str) -> None:
    ids = codec.encode(text, add_special_tokens=False)
    if source is None:
        pairs = [("text", codec.decode(ids, skip_special_tokens=False), text)]
    else:
        expected = source.encode(text, add_special_tokens=False)
        pairs = [
            ("ids", ids, expected),
            ("ids with special tokens", codec.encode(text, add_special_tokens=True), source.encode(text)),
            ("text", codec.decode(ids, skip_special_tokens=True), _decode(source, expected)),
        ]
    for what, got, want in pairs:
        if got != want:
            raise QualityError(
                f"audit failed: the tokenizer gives other {what} for {text[:30]!r}: {str(got)[:60]} instead of {str(want)[:60]}",
                "nothing was written; report this checkpoint, or type --no-audit to convert it all the same",
            )


def _decode(source: Any, ids: list[int]) -> str:
    return str(source.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _check_chats(codec: Any, source: Any) -> str:
    if codec.chat_template is None:
        return "no chat template"
    if "strftime_now" in codec.chat_template:
        return "chat template not compared (it writes today's date)"
    for chat in PROBE_CHATS:
        got, want = _rendered(lambda chat=chat: codec.render_chat(chat)), _rendered(lambda chat=chat: _apply(source, chat))
        if got != want:
            raise QualityError(
                f"audit failed: the chat template gives {str(got)[:60]!r} instead of {str(want)[:60]!r}",
                "nothing was written; report this checkpoint, or type --no-audit to convert it all the same",
            )
    return "chat template equal"


def _apply(source: Any, chat: list[dict[str, Any]]) -> str:
    return str(source.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def _rendered(render: Any) -> str | None:
    """The text, or None when the template refuses these messages (both sides must)."""
    from jinja2 import TemplateError

    try:
        return str(render())
    except (RequestError, TemplateError, TypeError, ValueError):
        return None
