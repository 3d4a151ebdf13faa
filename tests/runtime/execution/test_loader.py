"""An engine that is not what was converted does not load; a setting that cannot be honoured is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import tiny_engine
from torch.utils._python_dispatch import TorchDispatchMode

from dspark.runtime.execution.loader import EngineWeights, load_model
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.manifest import load_manifest


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    return tiny_engine(tmp_path_factory.mktemp("engine"))


def copy_of(engine: Path, target: Path) -> Path:
    target.mkdir()
    for path in engine.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_one_flipped_bit_is_found(engine: Path, tmp_path: Path) -> None:
    """A damaged weight would make wrong text with exit code 0."""
    damaged = copy_of(engine, tmp_path / "damaged")
    shard = damaged / next(iter(load_manifest(damaged).tensors.values())).shard
    data = bytearray(shard.read_bytes())
    data[-9] ^= 1
    shard.write_bytes(data)
    with pytest.raises(InputError, match="its hash differs"):
        load_model(damaged)


def test_a_cut_weight_file_is_found(engine: Path, tmp_path: Path) -> None:
    damaged = copy_of(engine, tmp_path / "cut")
    shard = damaged / next(iter(load_manifest(damaged).tensors.values())).shard
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(InputError, match="damaged"):
        load_model(damaged)


def test_a_missing_weight_file_is_named(engine: Path, tmp_path: Path) -> None:
    damaged = copy_of(engine, tmp_path / "missing")
    name = next(iter(load_manifest(damaged).tensors.values())).shard
    (damaged / name).unlink()
    with pytest.raises(InputError, match=name):
        load_model(damaged)


def test_triton_without_a_gpu_is_refused(engine: Path) -> None:
    """Running the reference instead would ignore what was asked for."""
    with pytest.raises(UsageError, match="needs a GPU"):
        load_model(engine, kernels="triton")


def test_weights_go_from_the_map_to_the_device(engine: Path) -> None:
    """No copy on the host, and none to another dtype there: a model may be as large as the host's memory."""
    manifest = load_manifest(engine)
    name = "model.embed_tokens.weight"
    weights = EngineWeights(engine, manifest, torch.bfloat16, "meta")
    with HostTensors() as made:
        tensor = weights.take(name)
    assert tensor.device.type == "meta" and tensor.dtype is torch.bfloat16
    assert made.new_bytes == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")
def test_on_the_host_a_weight_of_the_runs_dtype_is_the_files_own_memory(engine: Path) -> None:
    manifest = load_manifest(engine)
    name = "model.embed_tokens.weight"
    tensor = EngineWeights(engine, manifest, torch.float32, "cpu").take(name)
    shard = str((engine / manifest.tensors[name].shard).resolve())
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(shard)]
    assert any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in ranges)


class HostTensors(TorchDispatchMode):
    """Bytes of tensors that were made on the host and are no views of others."""

    def __init__(self) -> None:
        super().__init__()
        self.new_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor) and arg.device.type == "cpu"}
            self.new_bytes += 0 if result.untyped_storage().data_ptr() in known else result.nbytes
        return result
