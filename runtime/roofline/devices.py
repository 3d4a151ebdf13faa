"""Machines by their data sheets: memory bandwidth and arithmetic by dtype, dense (not with 2:4 sparsity).

Figures are NVIDIA's, from the product data sheet of each card ("NVIDIA A100 Tensor Core GPU", "NVIDIA L40S", "NVIDIA H100 Tensor Core GPU",
"NVIDIA H200 Tensor Core GPU"); L2 sizes from the Ampere, Ada and Hopper architecture white papers. They are peaks: no program reaches them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from dspark.runtime.roofline.ops import Op

GB, TERA, MIB = 10**9, 10**12, 1 << 20
FALLBACK = {"fp8": ("bfloat16", "float16"), "int8": ("bfloat16", "float16"), "float16": ("bfloat16",), "bfloat16": ("float16",)}
"""Arithmetic that a machine lacks -> what its operands are widened to instead, the first that it has; float32 after these."""


@dataclass(frozen=True)
class Device:
    """bandwidth: bytes a second of memory. rates: dtype -> FLOPs (or integer operations) a second. link: bytes a second that one rank can
    send to the others. cache_bytes: of the last level, 0 where it is not known. source: whose figures these are."""

    name: str
    bandwidth: float
    rates: dict[str, float] = field(hash=False)
    memory_bytes: int = 0
    cache_bytes: int = 0
    link: float = 0.0
    source: str = ""

    def rate(self, arithmetic: str) -> float:
        """FLOPs a second in a dtype, or in what it is widened to here. Raises ValueError where nothing of that is known."""
        for name in (arithmetic, *FALLBACK.get(arithmetic, ()), "float32"):
            if name in self.rates:
                return self.rates[name]
        raise ValueError(f"no arithmetic rate of {self.name} is known for {arithmetic}")

    def seconds(self, op: Op, cold: bool = False) -> float:
        """The least time of one operation: its slowest of memory, arithmetic and link.

        Activations up to the size of the cache need not cross memory and do not count, unless cold, where all bytes do.
        """
        return max(self._parts(op, cold).values())

    def bound(self, op: Op, cold: bool = False) -> str:
        """Which it is: "memory", "arithmetic" or "link"."""
        parts = self._parts(op, cold)
        return max(parts, key=lambda name: parts[name])

    def _parts(self, op: Op, cold: bool) -> dict[str, float]:
        held = 0.0 if cold else min(op.activation_bytes, self.cache_bytes)
        return {
            "memory": (op.num_bytes - held) / self.bandwidth,
            "arithmetic": op.flops / self.rate(op.arithmetic) if op.flops else 0.0,
            "link": op.link_bytes / self.link if op.link_bytes and self.link else 0.0,
        }

    def total_seconds(self, ops: Iterable[Op], cold: bool = False) -> float:
        """The least time of operations that run one after the other."""
        return sum(self.seconds(op, cold) for op in ops)


_A100 = {"float32": 19.5 * TERA, "bfloat16": 312 * TERA, "float16": 312 * TERA, "int8": 624 * TERA}
_HOPPER = {"float32": 67 * TERA, "bfloat16": 989.5 * TERA, "float16": 989.5 * TERA, "int8": 1979 * TERA, "fp8": 1979 * TERA}
_L40S = {"float32": 91.6 * TERA, "bfloat16": 362.05 * TERA, "float16": 362.05 * TERA, "int8": 733 * TERA, "fp8": 733 * TERA}

DEVICES: dict[str, Device] = {
    "a100-40": Device("A100 40 GB", 1555 * GB, _A100, 40 * GB, 40 * MIB, 300 * GB, "NVIDIA A100 data sheet, SXM"),
    "a100-80": Device("A100 80 GB", 2039 * GB, _A100, 80 * GB, 40 * MIB, 300 * GB, "NVIDIA A100 data sheet, SXM"),
    "l40s": Device("L40S", 864 * GB, _L40S, 48 * GB, 96 * MIB, 32 * GB, "NVIDIA L40S data sheet"),
    "h100": Device("H100 SXM", 3350 * GB, _HOPPER, 80 * GB, 50 * MIB, 450 * GB, "NVIDIA H100 data sheet, SXM"),
    "h200": Device("H200", 4800 * GB, _HOPPER, 141 * GB, 50 * MIB, 450 * GB, "NVIDIA H200 data sheet, SXM"),
}
"""Name for a flag -> data sheet. link is one direction of NVLink, half of what the sheets state for both; of PCIe for the L40S."""
_LARGE_A100_BYTES = 60 * GB


def find_device(gpu: str, memory_bytes: int = 0) -> Device | None:
    """The data sheet of a GPU by the name that its driver gives; None for another one. memory_bytes tells the two A100 apart.

    Cards for PCIe and the NVL pairs of the H100 and H200 have figures of their own, which are not here.
    """
    words = set(re.split(r"[\s\-_]+", gpu.lower()))
    if "a100" in words:
        large = memory_bytes > _LARGE_A100_BYTES or bool(words & {"80gb"})
        return DEVICES["a100-80" if large else "a100-40"]
    if words & {"pcie", "nvl"}:
        return None
    return next((DEVICES[name] for name in ("l40s", "h100", "h200") if name in words), None)
