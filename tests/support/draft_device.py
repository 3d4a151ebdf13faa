"""Run as a script: drafters on Triton's kernels, drawing on the device, against the same on the reference kernels; one JSON line each.

    TRITON_INTERPRET=1 python draft_device.py [KIND ...]     under Triton's interpreter, on CPU tensors
    python draft_device.py --device cuda [KIND ...]          on a GPU

A process of its own because the variable must be set before triton is first imported.
"""

import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from draft_checkpoints import TARGET_LAYERS, make_draft
from draft_runs import run
from tiny_models import make_tiny_checkpoint

from dspark.converters.drafts.checkpoint import read_draft
from dspark.converters.drafts.store import store_draft
from dspark.converters.pipeline import convert
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.draft_model import load_draft_model
from dspark.runtime.speculation.heads.load import load_drafter

KINDS = ("deepspec-vanilla", "zlab-dflash", "eagle3-original", "draft-model")


def heads_check(kind: str, device: str) -> str:
    """The distributions of a few drafts, in which context keys, folded rows and spare blocks have a part, equal the reference's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = make_tiny_checkpoint(folder / "checkpoint", "llama", num_hidden_layers=TARGET_LAYERS)
        convert(checkpoint, folder / "engine", dtype="float32", audit=False)
        if kind != "draft-model":
            made = make_draft(folder / "published", kind)
            (folder / "draft").mkdir()
            store_draft(read_draft(made.path, load_manifest(folder / "engine").model), folder / "draft", "float32")
        prompts = [[(7 * i) % 300 + 5 for i in range(19)], [9, 8, 7]]
        asked = [Request(i, p, SamplingParams(max_tokens=7, temperature=1.0, ignore_eos=True), draw_key=i) for i, p in enumerate(prompts)]

        def drafted(interpreted: bool, **settings: str) -> list[torch.Tensor]:
            def build(model, sampler, max_len):  # type: ignore[no-untyped-def]
                if kind == "draft-model":
                    engine = folder / "engine"
                    return load_draft_model(engine, model, load_codec(engine), sampler, max_len, 3, keep_distributions=True)
                return load_drafter(folder / "draft", model, sampler, max_len, keep_distributions=True)

            got = run(folder / "engine", asked, build, interpreted=interpreted, **settings)
            assert got.speculator is not None
            if settings.get("kernels") != "reference":
                taken = got.engine.metrics()["kernels"]
                assert taken["paged_attention"] == "triton", taken
            return [proposal.draft.distributions for proposal in got.speculator.proposals if proposal.draft is not None]

        want = drafted(False, kernels="reference", device="cpu")
        actual = drafted(device == "cpu", kernels="triton", device=device)
    assert len(want) == len(actual) > 4
    worst = max(float((one.cpu() - other).abs().max()) for one, other in zip(actual, want, strict=True))
    assert worst < 1e-3, f"probabilities differ by {worst:.2g}"
    return f"{len(want)} drafts, largest difference {worst:.1e}"


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    device = "cuda" if "--device" in arguments else "cpu"
    for kind in [name for name in arguments if name in KINDS] or KINDS:
        start, error, text = time.perf_counter(), None, ""
        try:
            text = heads_check(kind, device)
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"id": kind, "error": error, "text": text, "seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
