"""dspark: model conversion, quantization and offline batch generation.

The public Python API. Names are imported on first use, so that `import dspark` costs nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Engine": "dspark.runtime.engine",
    "EngineConfig": "dspark.runtime.spec.engine_config",
    "EngineManifest": "dspark.runtime.spec.manifest",
    "SamplingParams": "dspark.runtime.spec.sampling_params",
    "Request": "dspark.runtime.spec.request",
    "RequestOutput": "dspark.runtime.spec.request",
    "DsparkError": "dspark.runtime.spec.errors",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dspark' has no attribute '{name}'")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
