"""What of a GPU bounds its tiles."""

from __future__ import annotations

from dataclasses import dataclass

SHARED_BYTES = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10}
"""Compute capability -> bytes of shared memory that one block may have (CUDA programming guide, table of technical specifications)."""
LEAST_SHARED_BYTES = 99 << 10
"""Of a capability that is not listed."""


@dataclass(frozen=True)
class DeviceLimits:
    """name: as the driver says it. capability: (major, minor). shared_bytes: of one block. cache_bytes: of the L2."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    cache_bytes: int

    @property
    def shared_bytes(self) -> int:
        return SHARED_BYTES.get(self.capability, LEAST_SHARED_BYTES)


MIB = 1 << 20
CARDS = {
    "a100": DeviceLimits("NVIDIA A100-SXM4-80GB", (8, 0), 108, 40 * MIB),
    "l40s": DeviceLimits("NVIDIA L40S", (8, 9), 142, 96 * MIB),
    "h100": DeviceLimits("NVIDIA H100 80GB HBM3", (9, 0), 132, 50 * MIB),
    "h200": DeviceLimits("NVIDIA H200", (9, 0), 132, 50 * MIB),
}
"""Cards that tables are shipped for, by their data sheets and architecture white papers."""


def this_gpu() -> DeviceLimits:
    """The current GPU. Raises RuntimeError where there is none."""
    import torch

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return DeviceLimits(found.name, (found.major, found.minor), found.multi_processor_count, found.L2_cache_size)
