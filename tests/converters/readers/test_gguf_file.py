"""The GGUF container and its block formats."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from dspark.converters.readers.gguf_file import BLOCK_TYPES, GgufFile
from dspark.runtime.spec.errors import InputError, UnsupportedError


def half(raw: bytes) -> float:
    return float(np.frombuffer(raw, "<f2")[0])


def nibbles(raw: bytes) -> list[int]:
    """Low halves first, then high halves."""
    return [byte & 15 for byte in raw] + [byte >> 4 for byte in raw]


def fifth_bits(raw: bytes) -> list[int]:
    (word,) = struct.unpack("<I", raw)
    return [(word >> bit & 1) << 4 for bit in range(32)]


def q4_0(block: bytes) -> list[float]:
    return [half(block[:2]) * (code - 8) for code in nibbles(block[2:])]


def q4_1(block: bytes) -> list[float]:
    return [half(block[:2]) * code + half(block[2:4]) for code in nibbles(block[4:])]


def q5_0(block: bytes) -> list[float]:
    codes = [low | high for low, high in zip(nibbles(block[6:]), fifth_bits(block[2:6]), strict=True)]
    return [half(block[:2]) * (code - 16) for code in codes]


def q5_1(block: bytes) -> list[float]:
    codes = [low | high for low, high in zip(nibbles(block[8:]), fifth_bits(block[4:8]), strict=True)]
    return [half(block[:2]) * code + half(block[2:4]) for code in codes]


def q8_0(block: bytes) -> list[float]:
    return [half(block[:2]) * code for code in struct.unpack("32b", block[2:])]


def k_scales(packed: bytes) -> tuple[list[int], list[int]]:
    """8 scales and 8 minima of 6 bits in 12 bytes."""
    scales = [packed[j] & 63 for j in range(4)] + [(packed[8 + i] & 15) | (packed[i] >> 6) << 4 for i in range(4)]
    minima = [packed[4 + j] & 63 for j in range(4)] + [(packed[8 + i] >> 4) | (packed[4 + i] >> 6) << 4 for i in range(4)]
    return scales, minima


def q4_k(block: bytes) -> list[float]:
    scales, minima = k_scales(block[4:16])
    values: list[float] = []
    for chunk in range(4):
        codes = nibbles(block[16 + 32 * chunk : 48 + 32 * chunk])
        for part in range(2):
            j = 2 * chunk + part
            scale, minimum = np.float32(half(block[:2])) * scales[j], np.float32(half(block[2:4])) * minima[j]
            values += [float(np.float32(scale) * code - np.float32(minimum)) for code in codes[32 * part : 32 * part + 32]]
    return values


def q5_k(block: bytes) -> list[float]:
    scales, minima = k_scales(block[4:16])
    values: list[float] = []
    for j in range(8):
        low = nibbles(block[48 + 32 * (j // 2) : 80 + 32 * (j // 2)])[32 * (j % 2) : 32 * (j % 2) + 32]
        scale, minimum = np.float32(half(block[:2])) * scales[j], np.float32(half(block[2:4])) * minima[j]
        codes = [low[i] | (block[16 + i] >> j & 1) << 4 for i in range(32)]
        values += [float(np.float32(scale) * code - np.float32(minimum)) for code in codes]
    return values


def mxfp4(block: bytes) -> list[float]:
    """A power of two, then 4-bit floats: sign, 2 bits of exponent, 1 of mantissa."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return [2.0 ** (block[0] - 127) * values[code & 7] * (-1 if code & 8 else 1) for code in nibbles(block[1:])]


def q6_k(block: bytes) -> list[float]:
    low, high = block[:128], block[128:192]
    scales, d = struct.unpack("16b", block[192:208]), half(block[208:210])
    values = []
    for index in range(256):
        part, run, i = index // 128, index % 128 // 32, index % 32
        nibble = low[64 * part + 32 * (run % 2) + i] >> (4 if run >= 2 else 0) & 15
        code = (nibble | (high[32 * part + i] >> 2 * run & 3) << 4) - 32
        values.append(float(np.float32(d * scales[index // 16]) * code))
    return values


BY_HAND = {"Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k, "MXFP4": mxfp4}


def write(path: Path, name: str, data: np.ndarray, kind: str, **metadata: str) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in metadata.items():
        writer.add_string(key, value)
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# where the half floats of a block lie, by type; MXFP4, NVFP4 and IQ1_M have scales of fewer bits
HALVES = {
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_1": [0, 2],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "MXFP4": [],
    "NVFP4": [],
    "IQ1_M": [],
}
PLAIN = ("F32", "F16", "BF16")


def blocks_of(kind: str, rows: int, per_row: int, seed: int) -> np.ndarray:
    """Random codes with sane scales: every half float in a block is drawn from -2 to 2."""
    name_to_size = {name: width for name, _, width in BLOCK_TYPES.values()}
    draw = np.random.default_rng(seed)
    raw = draw.integers(0, 256, (rows, per_row, name_to_size[kind]), dtype=np.uint8)
    for offset in HALVES.get(kind, [0]):
        raw[..., offset : offset + 2] = draw.uniform(-2, 2, (rows, per_row, 1)).astype("<f2").view(np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = draw.integers(110, 140, (rows, per_row))  # a power of two: 2**-18 to 2**12
    if kind == "IQ1_M":  # the half float is spread over the top nibbles of the four scale words
        raw[..., 49::2] = raw[..., 49::2] & 0x0F
        raw[..., 55] |= 0x30
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", list(BY_HAND))
def test_blocks_decode_as_written_down(tmp_path: Path, kind: str) -> None:
    raw = blocks_of(kind, rows=3, per_row=2, seed=1)
    file = GgufFile(write(tmp_path / "x.gguf", "t", raw, kind))
    width = raw.shape[1] // 2
    want = [[value for start in (0, width) for value in BY_HAND[kind](row[start : start + width].tobytes())] for row in raw]
    assert np.array_equal(file.decode("t"), np.array(want, np.float32))


def test_every_type_of_the_package_is_read_or_left_out_on_purpose() -> None:
    """A type that a newer gguf package decodes shows here, and its sizes are checked against the package's."""
    decoded = {kind.name for kind in gguf.quants._type_traits} | {"F32", "F16"}
    assert {name for name, _, _ in BLOCK_TYPES.values()} == decoded
    for type_id, (name, block, width) in BLOCK_TYPES.items():
        kind = gguf.GGMLQuantizationType(type_id)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (block, width))


@pytest.mark.parametrize("kind", [name for name, _, _ in BLOCK_TYPES.values() if name not in PLAIN])
def test_blocks_decode_bit_exact_as_the_gguf_package(tmp_path: Path, kind: str) -> None:
    raw = blocks_of(kind, rows=70, per_row=3, seed=2)
    path = write(tmp_path / "x.gguf", "t", raw, kind)
    (tensor,) = gguf.GGUFReader(str(path)).tensors
    want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert np.array_equal(GgufFile(path).decode("t").view(np.uint32), want.view(np.uint32))


def test_known_bytes() -> None:
    """A block written by llama.cpp's rule for linspace(-1, 1, 32): step 0.125, codes 0 to 15."""
    block = bytes.fromhex("0030809191a2a2b3b3c4c4d5d5e6e6f7f7f8")
    values = q4_0(block)
    assert values[0] == -1.0 and values[15] == 0.0 and values[16] == 0.0 and values[31] == 0.875
    assert k_scales(bytes.fromhex("818283c4454647c8051627cf")) == ([1, 2, 3, 4, 37, 38, 39, 63], [5, 6, 7, 8, 16, 17, 18, 60])


@pytest.mark.parametrize(("kind", "dtype"), [("F32", np.float32), ("F16", np.float16)])
def test_plain_floats(tmp_path: Path, kind: str, dtype: type) -> None:
    data = np.linspace(-3, 3, 24, dtype=dtype).reshape(4, 6)
    file = GgufFile(write(tmp_path / "x.gguf", "t", data, kind))
    assert file.tensors["t"].shape == (4, 6) and np.array_equal(file.decode("t"), data.astype(np.float32))


def test_a_vector_keeps_its_shape(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path / "x.gguf", "t", np.arange(5, dtype=np.float32), "F32"))
    assert file.decode("t").tolist() == [0, 1, 2, 3, 4]


def test_metadata_of_every_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_uint8("u8", 200)
    writer.add_int32("i32", -7)
    writer.add_uint64("u64", 2**40)
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "größe")
    writer.add_array("texts", ["a", "", "ü"])
    writer.add_array("ints", [1, -2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    meta = GgufFile(tmp_path / "x.gguf").metadata
    expected = {"u8": 200, "i32": -7, "u64": 2**40, "f32": 0.5, "f64": 0.1, "yes": True, "text": "größe", "texts": ["a", "", "ü"]}
    assert {key: meta[key] for key in expected} == expected and meta["ints"] == [1, -2, 3]


@pytest.mark.parametrize(("kind", "width"), [("Q8_K", 292), ("Q8_1", 40), ("Q1_0", 36), ("I32", 1024)])
def test_a_type_that_is_not_decoded_is_named(tmp_path: Path, kind: str, width: int) -> None:
    path = write(tmp_path / "x.gguf", "t", np.zeros((2, width), np.uint8), kind)
    with pytest.raises(UnsupportedError, match=rf"{kind}, supported: F32, F16, BF16"):
        GgufFile(path)


@pytest.mark.parametrize("keep", [3, 20, 60, 200])
def test_a_file_cut_off_is_refused(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "x.gguf", "t", np.zeros((64, 64), np.float32), "F32", note="x" * 100)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError):
        GgufFile(path)


def test_a_tensor_that_runs_past_the_end_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "blk.0.attn_q.weight", np.zeros((64, 64), np.float32), "F32")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"blk\.0\.attn_q\.weight runs past the end"):
        GgufFile(path)


def test_another_file_and_another_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04" + bytes(64))
    with pytest.raises(InputError, match="no GGUF file"):
        GgufFile(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(64))
    with pytest.raises(UnsupportedError, match="version 1"):
        GgufFile(tmp_path / "b.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(InputError):
        GgufFile(tmp_path / "empty.gguf")


def test_a_huge_count_does_not_eat_the_memory(tmp_path: Path) -> None:
    """A damaged count must end at the file's end, not in an allocation."""
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + bytes(64))
    with pytest.raises(InputError):
        GgufFile(tmp_path / "x.gguf")
