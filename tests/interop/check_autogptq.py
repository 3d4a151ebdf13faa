"""AutoGPTQ 0.7.1 loads our symmetric GPTQ exports, and writes them anew for us to read. Run in its environment, which has no dspark.

python tests/interop/check_autogptq.py DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from auto_gptq import AutoGPTQForCausalLM
from safetensors.torch import load_file

LIMIT = 1e-4


def main(directory: Path) -> int:
    failed = done = 0
    for case in json.loads((directory / "cases.json").read_text()):
        described = json.loads((directory / case["directory"] / "config.json").read_text()).get("quantization_config") or {}
        if case["format"] != "gptq" or described["checkpoint_format"] != "gptq":
            continue
        reference = load_file(directory / f"{case['directory']}.reference.safetensors")
        model = AutoGPTQForCausalLM.from_quantized(
            str(directory / case["directory"]), device="cpu", disable_exllama=True, disable_exllamav2=True, torch_dtype=torch.float32
        )
        with torch.inference_mode():
            got = model.model(reference["tokens"][None]).logits[0].float()
        error = float((got - reference["logits"]).abs().max() / reference["logits"].abs().max())
        bad = not error <= LIMIT
        failed, done = failed + bad, done + 1
        print(f"{'FAILED' if bad else 'ok':6} {case['directory']:32} {error:.1e} (limit {LIMIT:g})")
        model.save_quantized(str(directory / f"{case['directory']}.by-autogptq"), use_safetensors=True)
    print(f"{done - failed} passed, {failed} failed")
    return 1 if failed or not done else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
