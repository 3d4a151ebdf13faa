"""The family table. A new family is one file here and one line below."""

from dspark.runtime.models.base import Family
from dspark.runtime.models.gemma2 import GEMMA2
from dspark.runtime.models.gemma3 import GEMMA3
from dspark.runtime.models.granite import GRANITE
from dspark.runtime.models.llama import LLAMA
from dspark.runtime.models.mistral import MISTRAL
from dspark.runtime.models.mixtral import MIXTRAL
from dspark.runtime.models.olmo2 import OLMO2
from dspark.runtime.models.phi3 import PHI3
from dspark.runtime.models.qwen2 import QWEN2
from dspark.runtime.models.qwen2_moe import QWEN2_MOE
from dspark.runtime.models.qwen3 import QWEN3
from dspark.runtime.models.qwen3_moe import QWEN3_MOE
from dspark.runtime.models.smollm3 import SMOLLM3

_ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, GRANITE, SMOLLM3, OLMO2, MIXTRAL, QWEN2_MOE, QWEN3_MOE)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
