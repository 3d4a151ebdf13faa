"""Bytes of a model's weights by scheme, as files and GPUs hold them and as a CPU does, whole or one tensor-parallel rank's share.

Modules and shapes are those of the family table, so they are the ones that converters write and the runtime loads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from dspark.runtime.models import FAMILIES
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.spec.quant import QuantConfig, QuantScheme

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
"""Bytes of a number of weights, activations or a KV cache."""
LAYOUTS = ("stored", "cpu")
"""stored: as in the engine's files, which is how a GPU keeps them. cpu: as the CPU kernels re-lay them at load."""
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
_SCALE, _WIDE_SCALE, _ZERO, _INDEX = 2, 4, 1, 4
"""Bytes of a step of integer codes, of any other scale, of a zero point, and of an entry of a permutation."""


def linear_bytes(scheme: QuantScheme | None, num_outputs: int, num_inputs: int, dtype: str, layout: str = "stored") -> int:
    """Bytes of one linear weight [N, K] with its scales, without bias. scheme None: dense in dtype.

    Steps of integer codes count as float16: `choose_grid` takes float32 only where a step leaves that range.
    """
    elements = num_outputs * num_inputs
    if scheme is None:
        return elements * WIDTH[dtype]
    if scheme.storage == "int8":
        return elements + _WIDE_SCALE * num_outputs
    if scheme.storage == "fp8":
        return elements * WIDTH[dtype] if layout == "cpu" else elements + _fp8_scales(scheme, num_outputs, num_inputs)
    groups = -(-num_inputs // scheme.resolved_group_size(num_inputs)) * num_outputs
    steps = groups * (_SCALE if scheme.symmetric else _SCALE + _ZERO)
    order = _INDEX * num_inputs if scheme.act_order else 0
    if layout == "cpu":  # codes of 2 or 3 bits take lanes of 4, of 5 to 7 bits lanes of 8
        return elements * (4 if scheme.weight_bits <= 4 else 8) // 8 + steps + order
    return 4 * num_outputs * -(-num_inputs * scheme.weight_bits // 32) + steps + order


def _fp8_scales(scheme: QuantScheme, num_outputs: int, num_inputs: int) -> int:
    """Bytes of the scales of a float8 weight, that of its inputs included where there is one."""
    rows, columns = (
        extent if size == -1 else size for size, extent in zip(scheme.block or (-1, -1), (num_outputs, num_inputs), strict=True)
    )
    blocks = -(-num_outputs // rows) * -(-num_inputs // columns)
    return _WIDE_SCALE * (blocks + (scheme.inputs == "static"))


def arithmetic_of(scheme: QuantScheme | None, dtype: str, layout: str = "stored") -> str:
    """What a linear's products are computed in: 8 bits where activations are rounded too, else dtype, to which codes are widened."""
    if scheme is not None and scheme.storage == "int8":
        return "int8"
    rounded = scheme is not None and scheme.storage == "fp8" and scheme.inputs is not None
    return "fp8" if rounded and layout == "stored" else dtype


@dataclass(frozen=True)
class Linear:
    """One linear as a rank holds it. arithmetic: dtype that its products are computed in. num_bytes: weight, scales and bias."""

    name: str
    num_outputs: int
    num_inputs: int
    arithmetic: str
    num_bytes: int


@dataclass(frozen=True)
class ModelShape:
    """A model as one machine, or one of `tensor_parallel` equal ones, holds it.

    kv_dtype: of the KV cache, the model's own by default. Attention heads, inner widths and the vocabulary are split over the ranks,
    rounded up: what is described is the rank that holds most. Raises ValueError for an unknown layout and more ranks than heads.
    """

    config: ModelConfig
    quant: QuantConfig | None = None
    kv_dtype: str = ""
    layout: str = "stored"
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is '{self.layout}', allowed: {', '.join(LAYOUTS)}")
        if not 1 <= self.tensor_parallel <= self.config.num_heads:
            raise ValueError(f"tensor_parallel is {self.tensor_parallel}, allowed: from 1 to {self.config.num_heads}, the model's heads")
        if self.kv_width not in (1, 2, 4):
            raise ValueError(f"kv_dtype is '{self.kv_dtype}', allowed: {', '.join(WIDTH)}")

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return WIDTH[self.config.dtype]

    @property
    def kv_width(self) -> int:
        """Bytes of a number in the KV cache."""
        return WIDTH.get(self.kv_dtype or self.config.dtype, 0)

    @property
    def num_heads(self) -> int:
        return self.share(self.config.num_heads)

    @property
    def num_kv_heads(self) -> int:
        """At least one: with more ranks than KV heads, heads are held twice."""
        return self.share(self.config.num_kv_heads)

    def share(self, extent: int) -> int:
        """A rank's part of something that is split."""
        return -(-extent // self.tensor_parallel)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in every layer."""
        return 2 * self.config.num_layers * self.num_kv_heads * self.config.head_dim * self.kv_width

    @cached_property
    def linears(self) -> dict[str, Linear]:
        """Every linear by its module's name. The head is among them; tied to the embedding it is dense."""
        config, found = self.config, {}
        shapes = FAMILIES[config.family].tensors(config)
        for name, shape in shapes.items():
            module = name.removesuffix(".weight")
            if len(shape) == 2 and module != EMBEDDING:
                scheme = self.quant.scheme_for(module) if self.quant is not None else None
                found[module] = self._linear(module, scheme, shape[0], shape[1], f"{module}.bias" in shapes)
        if config.tie_word_embeddings:
            found[HEAD] = self._linear(HEAD, None, config.vocab_size, config.hidden_size, False)
        return found

    def _linear(self, module: str, scheme: QuantScheme | None, outputs: int, inputs: int, bias: bool) -> Linear:
        """A rank's part: products that fan out are split by outputs, those that gather by inputs, routers not at all."""
        leaf, dim = module.rpartition(".")[2], self.config.head_dim
        if leaf == "q_proj":
            outputs = self.num_heads * dim
        elif leaf in ("k_proj", "v_proj"):
            outputs = self.num_kv_heads * dim
        elif leaf == "o_proj":
            inputs = self.num_heads * dim
        elif leaf in ("gate_proj", "up_proj", HEAD):
            outputs = self.share(outputs)
        elif leaf == "down_proj":
            inputs = self.share(inputs)
        num_bytes = linear_bytes(scheme, outputs, inputs, self.config.dtype, self.layout) + (outputs * self.width if bias else 0)
        return Linear(module, outputs, inputs, arithmetic_of(scheme, self.config.dtype, self.layout), num_bytes)

    @cached_property
    def weight_bytes(self) -> int:
        """Of all weights that a rank holds. On a CPU a tied head in bfloat16 is re-laid, and the table stays for the look-up."""
        config = self.config
        total = sum(linear.num_bytes for linear in self.linears.values())
        for name, shape in FAMILIES[config.family].tensors(config).items():
            if len(shape) == 1 and not name.endswith(".bias"):
                total += math.prod(shape) * self.width
        if not config.tie_word_embeddings or (self.layout == "cpu" and config.dtype == "bfloat16"):
            total += self.share(config.vocab_size) * config.hidden_size * self.width
        return total
