"""compressed-tensors checkpoints (llm-compressor, vLLM): pack-quantized, int-quantized and float-quantized modules; the tensors say which.

    pack    weight_packed int32 [N, ceil(K * bits / 32)], weight_scale [N, G], weight_shape, weight_zero_point packed along the outputs
    int     weight int8 [N, K], weight_scale [N, 1] or [N, G]
    float   weight float8_e4m3fn [N, K], weight_scale: see `readers.fp8`

Codes are signed; with 2**(bits - 1) added they are the unsigned codes of the engine, and a zero point likewise. 8-bit integer weights with
dynamic 8-bit activations, one scale for each token, are kept as that (W8A8). Every other rule for activations is noted and left out: the
weights are the same numbers, the activations stay in 16 bits. Scales of an 8-bit KV cache are kept: see `readers.cache_scales`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dspark.converters.readers.base import summarize
from dspark.converters.readers.cache_scales import check_scales, read_scheme, spread
from dspark.converters.readers.fp8 import DEFAULT_BLOCK, fp8_modules, plan_fp8, read_fp8
from dspark.converters.readers.quantized import (
    SMALLEST_GROUP,
    PackedLinear,
    QuantizedReader,
    canonical,
    order_of_groups,
    split_groups,
    trivial_order,
    whole_groups,
    wna16_scheme,
)
from dspark.runtime.models.hf_config import model_config_from_hf
from dspark.runtime.spec.errors import InputError, UnsupportedError
from dspark.runtime.spec.kv_cache import KVCacheConfig
from dspark.runtime.spec.quant import QuantScheme

if TYPE_CHECKING:
    import torch

METHOD = "compressed-tensors"
FORMATS = ("dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
PACKED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
PLAIN = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx")
ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "input_g_idx")
CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "q_zero_point")
_PATTERN = "re:"
_CLASS = "Linear"


class CompressedTensorsReader(QuantizedReader):
    """A compressed-tensors checkpoint. Raises UnsupportedError for formats of other number types and for sparse or rotated weights."""

    format = METHOD
    _kv_cache: KVCacheConfig | None = None

    def plan_linears(self) -> dict[str, PackedLinear]:
        self._check_format()
        plan = {module: self._plan_packed(module) for module in self.modules_with("weight_packed")}
        for module in self.modules_with("weight"):
            info = self.info(module, "weight")
            if info is not None and info.dtype == "I8":
                plan[module] = self._plan_int8(module)
        for module in fp8_modules(self):
            plan[module] = plan_fp8(self, module, self._block(module), METHOD)
        plan = {module: self._with_activations(module, linear) for module, linear in plan.items()}
        self._note_activations(plan)
        self._kv_cache = self._plan_cache()
        return plan

    def kv_cache(self) -> KVCacheConfig | None:
        """The 8-bit KV cache that the checkpoint is calibrated for."""
        self.tensors()  # plans
        return self._kv_cache

    def kv_scale(self, name: str) -> torch.Tensor:
        """One of its scales, float32 [num_kv_heads, head_dim]."""
        return spread(self.load(*name.rsplit(".", 1)), model_config_from_hf(self.config()))

    def read_weight(self, module: str, linear: PackedLinear) -> Any:
        if linear.scheme.storage == "fp8":
            return read_fp8(self, module, linear)
        if linear.scheme.storage == "int8":
            return self._read_int8(module)
        return self._read_integers(module, linear)

    # ---- the config

    def group_of(self, module: str) -> dict[str, Any]:
        """The entry of config_groups for a module: by its name, else by a pattern, else by its class; empty when there is none."""
        groups = [group for group in (self.quantization.get("config_groups") or {}).values() if isinstance(group, dict)]
        for fits in (self._is_name, self._is_pattern, self._is_class):
            for group in groups:
                if any(fits(str(target), module) for target in group.get("targets") or ()):
                    return group
        return {}

    def settings(self, module: str, key: str = "weights") -> dict[str, Any]:
        """A module's arguments for "weights" or "input_activations", empty when it has none."""
        return self.group_of(module).get(key) or {}

    @staticmethod
    def _is_name(target: str, module: str) -> bool:
        return target == module

    def _is_pattern(self, target: str, module: str) -> bool:
        try:
            return target.startswith(_PATTERN) and re.match(target.removeprefix(_PATTERN), module) is not None
        except re.error as error:
            raise InputError(f"'{self.path}' has a target {target!r} that is no pattern ({error})", "repair its config.json") from error

    @staticmethod
    def _is_class(target: str, module: str) -> bool:
        return target == _CLASS

    def _check_format(self) -> None:
        config = self.quantization
        groups = [group for group in (config.get("config_groups") or {}).values() if isinstance(group, dict)]
        named = [str(config.get("format") or "dense"), *(str(group["format"]) for group in groups if group.get("format"))]
        foreign = [name for name in named if name not in FORMATS]
        if foreign:
            what = f"'{self.path}' is compressed-tensors of format {foreign[0]}, supported: {', '.join(FORMATS[:4])}"
            raise UnsupportedError(what, "convert another quantization of this model, or the unquantized checkpoint")
        if config.get("transform_config"):
            what = f"'{self.path}' has rotated weights (transform_config), which need rotated activations: not supported"
            raise UnsupportedError(what, "convert a checkpoint without transforms")
        sparsity = config.get("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            raise UnsupportedError(
                f"'{self.path}' has sparse weights ({sparsity['format']}), which are not supported", "convert a dense checkpoint"
            )

    def _block(self, module: str) -> tuple[int, int]:
        said = self.settings(module)
        structure = said.get("block_structure") or DEFAULT_BLOCK
        if said.get("strategy") == "group" and said.get("group_size"):
            return (1, int(said["group_size"]))
        return (int(structure[0]), int(structure[1]))

    # ---- integers

    def _plan_packed(self, module: str) -> PackedLinear:
        packed, scale = self.info(module, "weight_packed"), self.info(module, "weight_scale")
        if packed is not None and packed.dtype != "I32":
            what = f"{module}.weight_packed of '{self.path}' holds {packed.dtype}, not int32: 4-bit floats are not supported"
            raise UnsupportedError(what, "convert another quantization of this model")
        if packed is None or scale is None or len(packed.shape) != 2:
            raise self.misfit(module, "weight_packed needs two dimensions and weight_scale", *PACKED)
        outputs, inputs = self._shape(module, packed.shape)
        bits = self._bits(module, packed.shape[1], inputs)
        return self._plan_integers(module, bits, outputs, inputs, PACKED)

    def _plan_int8(self, module: str) -> PackedLinear:
        weight = self.info(module, "weight")
        if weight is None or len(weight.shape) != 2 or self.info(module, "weight_scale") is None:
            raise self.misfit(module, "an int8 weight needs two dimensions and weight_scale", *PLAIN)
        outputs, inputs = weight.shape
        linear = self._plan_integers(module, int(self.settings(module).get("num_bits", 8)), outputs, inputs, PLAIN)
        scheme = linear.scheme
        per_output = scheme.symmetric and not scheme.act_order and self._scales(module, outputs).shape[0] == 1
        if scheme.weight_bits == 8 and per_output and self._is_dynamic_int8(module):
            kept = QuantScheme("w8a8", 8, True, -1, METHOD, storage="int8")
            return PackedLinear(kept, linear.shape, linear.parts)
        return linear

    def _plan_integers(self, module: str, bits: int, outputs: int, inputs: int, leaves: tuple[str, ...]) -> PackedLinear:
        scales = self._scales(module, outputs)
        if scales.shape[1] != outputs:
            raise self.misfit(module, f"{outputs} outputs need as many rows of weight_scale, or one", *leaves)
        num_groups = int(scales.shape[0])
        group = split_groups(inputs, num_groups, int(self.settings(module).get("group_size") or -1))
        if group is None or whole_groups(inputs, group) < SMALLEST_GROUP:
            raise self.misfit(module, f"{num_groups} groups do not make {inputs} inputs", *leaves)
        zeros = self._zeros(module, bits, outputs, num_groups)
        order = self._order(module, inputs, num_groups, group)
        symmetric = zeros is None or bool((zeros == 2 ** (bits - 1)).all())
        scheme = wna16_scheme(METHOD, bits, inputs, group, symmetric, order is not None)
        return PackedLinear(scheme, (outputs, inputs), self.present(module, leaves))

    def _shape(self, module: str, packed: tuple[int, ...]) -> tuple[int, int]:
        """(N, K) from weight_shape, else from config.json."""
        if self.info(module, "weight_shape") is not None:
            shape = [int(extent) for extent in self.load(module, "weight_shape").flatten()]
            if len(shape) == 2 and shape[0] == packed[0] and shape[1] > 0:
                return shape[0], shape[1]
            raise self.misfit(module, f"weight_shape says {shape}", *PACKED)
        expected = self.expected_shape(module)
        if expected is None or expected[0] != packed[0]:
            raise self.misfit(module, "without weight_shape the rows must be the model's outputs", *PACKED)
        return expected

    def _bits(self, module: str, width: int, inputs: int) -> int:
        """Bits of a code: the config's, which the width must bear out in the old or the new packing. Not said means 8 where that fits."""
        said = self.settings(module).get("num_bits")
        fitting = [bits for bits in range(2, 9) if width in (dense_width(inputs, bits), lane_width(inputs, bits))]
        if said is None and (8 in fitting or len(fitting) == 1):
            return 8 if 8 in fitting else fitting[0]
        if said not in fitting:
            found = summarize([str(bits) for bits in fitting]) or "no whole number of"
            raise self.misfit(module, f"{width} words for {inputs} inputs are {found} bits, the config says {said}", *PACKED)
        return int(said)

    def _scales(self, module: str, outputs: int) -> torch.Tensor:
        """[G, N]; one scale for the tensor is repeated for every output."""
        scales = self.load(module, "weight_scale")
        if scales.numel() == 1:
            return scales.reshape(1, 1).expand(1, outputs)
        return scales.reshape(scales.shape[0], -1).t()

    def _zeros(self, module: str, bits: int, outputs: int, num_groups: int) -> torch.Tensor | None:
        """Unsigned zero points uint8 [G, N], or None when the module has none."""
        from dspark.kernels.packing import packed_rows, unpack_codes

        info = self.info(module, "weight_zero_point")
        if info is None:
            return None
        stored = self.load(module, "weight_zero_point")
        if info.dtype == "I32" and info.shape == (packed_rows(outputs, bits), num_groups) and info.shape[0] != outputs:
            return unpack_codes(stored, bits, outputs).t()
        if info.dtype not in ("I8", "I32", "I64") or stored.numel() not in (1, outputs * num_groups):
            wanted = f"weight_zero_point must be packed {[packed_rows(outputs, bits), num_groups]} or int8 {[outputs, num_groups]}"
            raise self.misfit(module, wanted, *PACKED, "weight")
        middle = 2 ** (bits - 1)
        if stored.numel() == 1:
            stored = stored.reshape(1, 1).expand(outputs, num_groups)
        return (stored.reshape(outputs, num_groups).int() + middle).t()

    def _order(self, module: str, inputs: int, num_groups: int, group_size: int) -> torch.Tensor | None:
        """The permutation that makes groups contiguous, or None when they are."""
        if num_groups == 1 or self.info(module, "weight_g_idx") is None:
            return None
        g_idx = self.load(module, "weight_g_idx")
        if trivial_order(g_idx, group_size):
            return None
        order = order_of_groups(g_idx, num_groups, group_size) if g_idx.shape == (inputs,) else None
        if order is None:
            what = f"{module}.weight_g_idx of '{self.path}' does not put {group_size} of {inputs} inputs into each of {num_groups} groups"
            raise UnsupportedError(what, "quantize the model again with actorder 'weight'")
        return order

    def _read_integers(self, module: str, linear: PackedLinear) -> Any:
        from dspark.kernels.packing import pack_codes, unpack_whole_lanes

        (outputs, inputs), bits = linear.shape, linear.scheme.weight_bits
        if "weight_packed" in linear.parts:
            packed = self.load(module, "weight_packed")
            if packed.shape[1] == dense_width(inputs, bits):
                qweight = packed.t()  # the stream along the inputs is the engine's own
            else:
                qweight = pack_codes(unpack_whole_lanes(packed, bits, inputs).t(), bits)
        else:
            qweight = pack_codes(self._unsigned(module, bits), bits)
        scales = self._scales(module, outputs)
        num_groups = int(scales.shape[0])
        group = split_groups(inputs, num_groups, int(self.settings(module).get("group_size") or -1))
        assert group is not None
        zeros = None if linear.scheme.symmetric else self._zeros(module, bits, outputs, num_groups)
        perm = self._order(module, inputs, num_groups, group) if linear.scheme.act_order else None
        return canonical(qweight, scales, zeros, bits, inputs, group, perm)

    def _unsigned(self, module: str, bits: int) -> torch.Tensor:
        """Codes uint8 [K, N] of an int8 weight. Raises InputError for codes beyond what their bits hold."""
        import torch

        middle = 2 ** (bits - 1)
        codes = self.load(module, "weight").to(torch.int16) + middle
        if bool(((codes < 0) | (codes >= 2 * middle)).any()):
            raise self.misfit(module, f"codes of {bits} bits lie between {-middle} and {middle - 1}", *PLAIN)
        return codes.to(torch.uint8).t()

    def _read_int8(self, module: str) -> Any:
        from dspark.kernels.int8 import Int8Weight

        weight = self.load(module, "weight")
        return Int8Weight(weight, self._scales(module, int(weight.shape[0])).reshape(-1).float().contiguous())

    # ---- activations and the KV cache

    def _is_dynamic_int8(self, module: str) -> bool:
        """Whether inputs are to be quantized to 8-bit integers, each token with a scale of its own."""
        said = self.settings(module, "input_activations")
        wanted = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
        defaults = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": None}
        return bool(said) and all(said.get(key, defaults[key]) == value for key, value in wanted.items())

    def _with_activations(self, module: str, linear: PackedLinear) -> PackedLinear:
        parts = dict.fromkeys((*linear.parts, *self.present(module, ACTIVATIONS)))
        return PackedLinear(linear.scheme, linear.shape, tuple(parts))

    def _note_activations(self, plan: dict[str, PackedLinear]) -> None:
        left = [module for module, linear in plan.items() if linear.scheme.storage != "int8" and self.settings(module, "input_activations")]
        if left:
            said = self.settings(left[0], "input_activations")
            grain = "dynamic" if said.get("dynamic") else "static"
            words = f"{said.get('num_bits', 8)}-bit {said.get('type', 'int')} ({grain})"
            self.notes.append(f"activations of {len(left)} layers stay in 16 bits: the checkpoint's {words} activations are not used")

    def _plan_cache(self) -> KVCacheConfig | None:
        """The KV cache of the checkpoint's scales, or None and a note that says why they are not used."""
        scales = {name for name in self._tensors if name.rpartition(".")[2] in CACHE_SCALES and ".self_attn." in name}
        self.dropped |= scales
        said = self.quantization.get("kv_cache_scheme")
        if not said and not scales:
            return None
        found = read_scheme(said, METHOD)
        reason = found if isinstance(found, str) else self._fault_of_scales(scales)
        if isinstance(found, KVCacheConfig) and reason is None:
            return found
        kind = f"{said.get('num_bits', 8)}-bit {said.get('type', 'int')}" if isinstance(said, dict) else "quantized"
        left = f"the checkpoint's {kind} kv_cache_scheme ({len(scales)} scales) is not used"
        self.notes.append(f"the KV cache keeps the model's dtype: {left}, {reason}")
        return None

    def _fault_of_scales(self, scales: set[str]) -> str | None:
        return check_scales(model_config_from_hf(self.config()), scales, lambda name: self.load(*name.rsplit(".", 1)))


def dense_width(inputs: int, bits: int) -> int:
    """Words of a row in which codes follow each other without gaps (compressed-tensors 0.17 and later)."""
    return -(-inputs * bits // 32)


def lane_width(inputs: int, bits: int) -> int:
    """Words of a row in which each word holds 32 // bits whole codes (before 0.17; the same for 2, 4 and 8 bits)."""
    return -(-inputs // (32 // bits))
