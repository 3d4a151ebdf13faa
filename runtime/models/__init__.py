"""The family table. A new family is one file here and one line below."""

from dspark.runtime.models.base import Family
from dspark.runtime.models.llama import LLAMA
from dspark.runtime.models.mistral import MISTRAL
from dspark.runtime.models.qwen2 import QWEN2
from dspark.runtime.models.qwen3 import QWEN3

FAMILIES: dict[str, Family] = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
