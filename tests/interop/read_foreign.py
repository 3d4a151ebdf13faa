"""What write_living.py or write_autoawq.py had other programs quantize, converted by dspark: their weights bit for bit, and their logits.

python tests/interop/read_foreign.py DIR

Weights are compared as float16, in which the programs of GPTQ and AWQ unpack them.
Run with dspark's own Python. Exits 1 when anything differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from exports import tensors_of
from safetensors.torch import load_file

from dspark.converters.exporters.base import export
from dspark.converters.pipeline import convert
from dspark.converters.threads import one_torch_thread
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for

LAYERS = 14  # seven in each of two blocks
# Of the logits, relative to the largest. Rounded activations: a value on the border of two codes falls to either side by the last bit of
# a sum, and from that token on two exact implementations differ; the tokens before the first such value must agree as exactly as any.
EXACT, SIXTEEN_BITS, ROUNDED_ACTIVATIONS = 1e-5, 1e-2, 3e-2
FIRST = 8


def check(foreign: Path, name: str) -> tuple[int, float, float]:
    """(how many quantized layers have their weights bit for bit, relative error of the logits, the same of the first tokens)."""
    reference = load_file(foreign / f"{name}.reference.safetensors")
    engine = foreign / "engines" / name
    convert(foreign / name, engine, audit=False, force=True)
    convert(foreign / name, foreign / "engines-16" / name, dtype="float16", audit=False, force=True)  # gptqmodel says bfloat16 on a CPU
    export(foreign / "engines-16" / name, foreign / "dense" / name, "hf", force=True)
    ours = tensors_of(foreign / "dense" / name)
    equal = 0
    for key, theirs in reference.items():
        if key.startswith("weight."):
            weight = ours[f"{key.removeprefix('weight.')}.weight"]
            equal += weight.dtype == theirs.dtype == torch.float16 and torch.equal(weight, theirs)
    got = logits_for(load_model(engine, dtype="float32", kernels="reference"), reference["tokens"].tolist())
    error = (got - reference["logits"]).abs() / reference["logits"].abs().max()
    return equal, float(error.max()), float(error[:FIRST].max())


def main(directory: Path) -> int:
    foreign = directory / "foreign"
    failed, names = 0, sorted(path.name.removesuffix(".reference.safetensors") for path in foreign.glob("*.reference.safetensors"))
    for name in names:
        first = EXACT if name.startswith("ct-") else SIXTEEN_BITS
        limit = ROUNDED_ACTIVATIONS if name == "ct-w8a8" else first
        equal, error, of_first = check(foreign, name)
        bad = equal != LAYERS or not error <= limit or not of_first <= first
        failed += bad
        figures = f"weights {equal}/{LAYERS} equal, logits {error:.1e} (limit {limit:g}), first tokens {of_first:.1e} ({first:g})"
        print(f"{'FAILED' if bad else 'ok':6} {name:18} {figures}")
    print(f"{len(names) - failed} passed, {failed} failed")
    return 1 if failed or not names else 0


if __name__ == "__main__":
    with one_torch_thread():
        sys.exit(main(Path(sys.argv[1])))
