"""What AutoGPTQ wrote of our exports, read by dspark: the same logits again. Run with dspark's own Python.

python tests/interop/read_back.py DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import load_file

from dspark.converters.pipeline import convert
from dspark.converters.threads import one_torch_thread
from dspark.runtime.execution.loader import load_model
from dspark.runtime.execution.logits import logits_for

LIMIT = 1e-3


def main(directory: Path) -> int:
    failed, written = 0, sorted(directory.glob("*.by-autogptq"))
    for source in written:
        reference = load_file(directory / f"{source.name.removesuffix('.by-autogptq')}.reference.safetensors")
        engine = directory / "engines" / source.name
        convert(source, engine, audit=False, force=True)
        got = logits_for(load_model(engine, dtype="float32", kernels="reference"), reference["tokens"].tolist())
        error = float((got - reference["logits"]).abs().max() / reference["logits"].abs().max())
        failed += not error <= LIMIT
        print(f"{'FAILED' if not error <= LIMIT else 'ok':6} {source.name:40} {error:.1e} (limit {LIMIT:g})")
    print(f"{len(written) - failed} passed, {failed} failed")
    return 1 if failed or not written else 0


if __name__ == "__main__":
    with one_torch_thread():
        sys.exit(main(Path(sys.argv[1])))
