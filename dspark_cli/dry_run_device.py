"""How fast the machine of a dry run's job is: from step times in the engine's pairing, from a GPU's data sheet, or measured on this CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dspark.runtime.spec.engine_config import EngineConfig

if TYPE_CHECKING:
    from dspark.runtime.roofline.devices import Device
    from dspark.runtime.roofline.room import Room
    from dspark.runtime.roofline.weights import ModelShape
    from dspark.runtime.speculation.cost import StepCost


def step_times(engine_dir: Path, config: EngineConfig, dtype: str, device: str) -> StepCost | None:
    """What `dspark pair` measured steps of this engine to take on a machine like this one, None without such figures.

    Raises InputError for a damaged pairing.
    """
    from dspark.runtime.spec.cores import usable_cores
    from dspark.runtime.speculation.cost import StepCost
    from dspark.runtime.speculation.pairing import Machine, load_pairing, processor_name

    pairing = load_pairing(engine_dir)
    if pairing is None or device != "cpu":
        return None
    cost = StepCost(pairing.cost_points(Machine(processor_name(), device, config.threads or usable_cores(), dtype)))
    return cost if cost.is_known else None


def limit_of(config: EngineConfig, shape: ModelShape, room: Room) -> tuple[Device | None, str]:
    """The machine's limits, or None and why they are not known."""
    from dspark.runtime.roofline.machine import measured_cpu, this_gpu
    from dspark.runtime.spec.cores import usable_cores

    if room.device == "cpu":
        arithmetics = {linear.arithmetic for linear in shape.linears.values()}
        return measured_cpu(config.threads or usable_cores(), sorted(arithmetics), shape.weight_bytes), ""
    if room.free_bytes is None:
        return None, "the job is for a GPU, and this machine has none; benchmarks/roofline.py has the limits of some"
    name, _, sheet = this_gpu()
    return sheet, "" if sheet is not None else f"no data sheet of {name} is known; benchmarks/roofline.py has those of some GPUs"
