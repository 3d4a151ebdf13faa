"""An engine that is not what was converted does not load; a setting that cannot be honoured is refused."""

from pathlib import Path

import pytest
from engine_runs import tiny_engine

from dspark.runtime.execution.loader import load_model
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
