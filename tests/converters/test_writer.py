"""The engine directory is whole or not there."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import xxhash
from case_checkpoints import llama_config, llama_state, save_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file

from dspark.converters.safetensors_stream import SafetensorsStream
from dspark.converters.writer import EngineWriter, remove_stale, replace_directory
from dspark.runtime.models.hf_config import model_config_from_hf
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.manifest import load_manifest

MODEL = model_config_from_hf(llama_config())


def write(target: Path, tensors: dict[str, torch.Tensor], **options: object) -> None:
    with EngineWriter(target, tensors, **options) as writer:  # type: ignore[arg-type]
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish(MODEL, None, {})
        writer.publish()


def test_stream_is_read_by_the_safetensors_package(tmp_path: Path) -> None:
    """Every dtype, an odd size in the middle (kept aligned), a scalar-like and an empty tensor."""
    tensors = {
        "a": torch.randn(5, 7),
        "odd": torch.arange(33, dtype=torch.uint8).reshape(3, 11),
        "b": torch.randn(8, 8).bfloat16(),
        "c": torch.randn(16).half(),
        "packed": torch.randint(-(2**31), 2**31 - 1, (4, 4), dtype=torch.int32),
        "empty": torch.zeros(0, 4),
        "größe": torch.ones(1),
    }
    stream = SafetensorsStream(tmp_path / "x.safetensors", tensors)
    for name, tensor in tensors.items():
        stream.add(name, tensor)
    stream.close()
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_shards_begin_where_the_next_tensor_does_not_fit(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((256,), float(i)) for i in range(5)}
    write(tmp_path / "engine", tensors, shard_bytes=2100)
    manifest = load_manifest(tmp_path / "engine")
    shards = [manifest.tensors[name].shard for name in tensors]
    assert shards == [f"weights-0000{i}-of-00003.safetensors" for i in (1, 1, 2, 2, 3)]
    for name, tensor in tensors.items():
        record = manifest.tensors[name]
        with safe_open(tmp_path / "engine" / record.shard, "pt") as file:
            assert torch.equal(file.get_tensor(name), tensor)
        assert record.xxh3 == xxhash.xxh3_128(tensor.numpy().tobytes()).hexdigest()


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    """safetensors' own writer makes files of mode 0600, which another user's job cannot read."""
    before = os.umask(0o027)
    try:
        write(tmp_path / "engine", {"t": torch.ones(4)})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "engine").stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "engine").iterdir()} == {0o640}


def test_an_engine_is_replaced_only_by_force(tmp_path: Path) -> None:
    write(tmp_path / "engine", {"t": torch.zeros(4)})
    with pytest.raises(UsageError, match="exists"):
        write(tmp_path / "engine", {"t": torch.ones(4)})
    assert float(load_file(tmp_path / "engine" / "weights-00001-of-00001.safetensors")["t"][0]) == 0
    write(tmp_path / "engine", {"t": torch.ones(4)}, force=True)
    assert float(load_file(tmp_path / "engine" / "weights-00001-of-00001.safetensors")["t"][0]) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["engine"]


def test_force_does_not_replace_what_is_no_engine(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="is no engine"):
        write(tmp_path / "home", {"t": torch.ones(4)}, force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        write(tmp_path / "file", {"t": torch.ones(4)}, force=True)


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    write(tmp_path / "engine", {"t": torch.ones(4)})
    assert load_manifest(tmp_path / "engine").tensors["t"].shape == (4,)


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "big_disk").mkdir()
    (tmp_path / "engine").symlink_to(tmp_path / "big_disk" / "engine")
    write(tmp_path / "engine", {"t": torch.ones(4)})
    assert (tmp_path / "engine").is_symlink() and load_manifest(tmp_path / "big_disk" / "engine")


def test_an_error_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> None:
        with EngineWriter(tmp_path / "engine", ["t"]) as writer:
            writer.add("t", torch.ones(4))
            raise InputError("the next tensor is damaged")

    with pytest.raises(InputError):
        broken()
    assert list(tmp_path.iterdir()) == []


def test_only_leftovers_of_dead_processes_and_this_target_are_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f".engine.tmp-{dead.pid}", f".engine.tmp-{os.getpid()}", f".other.tmp-{dead.pid}", ".engine.tmp-x"):
        (tmp_path / name).mkdir()
    remove_stale(tmp_path / "engine")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(
        [f".engine.tmp-{os.getpid()}", f".other.tmp-{dead.pid}", ".engine.tmp-x"]
    )


def test_an_engine_set_aside_by_a_killed_swap_comes_back(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".engine.old-{dead.pid}").mkdir()
    (tmp_path / f".engine.old-{dead.pid}" / "engine.json").write_text("{}")
    remove_stale(tmp_path / "engine")
    assert (tmp_path / "engine" / "engine.json").exists()


def test_swap_without_the_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.converters.writer._exchange", lambda first, second: False)
    write(tmp_path / "engine", {"t": torch.zeros(4)})
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "engine.json").write_text("new")
    replace_directory(tmp_path / "new", tmp_path / "engine", force=True)
    assert (tmp_path / "engine" / "engine.json").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["engine"]


KILLED = """
import sys, time
from pathlib import Path
import dspark.converters.pipeline as pipeline
def slowly(done, total, name):
    print(done, flush=True)
    time.sleep(0.02)
pipeline.convert(Path(sys.argv[1]), Path(sys.argv[2]), audit=False, progress=slowly)
"""


@pytest.mark.parametrize("after", [1, 9, 21])
def test_a_killed_convert_leaves_no_engine_and_the_next_one_is_fine(tmp_path: Path, after: int) -> None:
    """B13: killed at the first tensor, in the middle, and at the last one before publishing."""
    from dspark.converters.pipeline import convert

    config = llama_config()
    source = save_checkpoint(tmp_path / "ckpt", config, llama_state(config, 13))
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", KILLED, str(source), str(tmp_path / "engine")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while int(process.stdout.readline()) < after:
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "engine").exists()
    with pytest.raises(InputError):
        load_manifest(tmp_path / "engine")
    assert [entry.name for entry in tmp_path.iterdir() if "tmp" in entry.name] == [f".engine.tmp-{process.pid}"]
    time.sleep(0.01)
    convert(source, tmp_path / "engine", audit=False)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ckpt", "engine"]
