"""Broken safetensors files are told apart before anything is read; odd ones load."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.safetensors_file import DTYPES, MAX_HEADER_BYTES, SafetensorsFile

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "empty": np.zeros((0, 64), np.float32),
    "scalar": np.array(7.0, np.float32),
}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(TENSORS, path)
    return path


def with_header(path: Path, change: Callable[[dict], object], *, padding: int = 0) -> Path:
    """Rewrites the header of a good file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    changed = change(header)
    text = json.dumps(header if changed is None else changed).encode() + b" " * padding
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    return path


def check_tensors(path: Path) -> None:
    file = SafetensorsFile(path)
    assert set(file.tensors) == set(TENSORS)
    for name, expected in TENSORS.items():
        tensor = file.read(name)
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert file.tensors[name].nbytes == expected.nbytes
        np.testing.assert_array_equal(tensor, expected)


def test_reads_what_the_library_writes(good: Path) -> None:
    check_tensors(good)


def test_reads_a_part(good: Path) -> None:
    part = SafetensorsFile(good).read("a.weight", (slice(1, 3), slice(0, 2)))
    np.testing.assert_array_equal(part, TENSORS["a.weight"][1:3, 0:2])


def test_tensors_are_mapped_and_read_only(good: Path) -> None:
    tensor = SafetensorsFile(good).read("a.weight")
    assert not tensor.flags.owndata
    assert not tensor.flags.writeable


@pytest.mark.parametrize("padding", [1, 3, 40 * 1024])
def test_padded_headers_and_unaligned_data_load(good: Path, padding: int) -> None:
    check_tensors(with_header(good, lambda header: None, padding=padding))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_read(tmp_path: Path, name: str) -> None:
    expected = np.arange(8).astype(DTYPES[name])
    header = {"x": {"dtype": name, "shape": [8], "data_offsets": [0, expected.nbytes]}}
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + expected.tobytes())
    tensor = SafetensorsFile(path).read("x")
    assert (tensor.dtype, tensor.tobytes()) == (expected.dtype, expected.tobytes())


LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:0123456789012345678901234567890123456789012345678901234567890123\n"
    b"size 269060552\n"
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty file"),
        (b"\x10\0\0", "truncated"),
        (LFS_POINTER, r"a Git LFS pointer to 269060552 bytes \(run `git lfs pull`\)"),
        (b"PK\x03\x04" + b"\1" * 600, "a zip archive, probably a renamed PyTorch .bin"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + b"\1" * 600, "a Python pickle"),
        (b"GGUF\x03\0\0\0" + b"\1" * 600, "a GGUF file"),
        (b"\xfd7zXZ\0" + b"\1" * 600, "an xz archive"),
        (b"model/".ljust(257, b"\0") + b"ustar\0" + b"\0" * 600, "a tar archive"),
        (b"Not Found\n", "a text that begins with 'Not Found'"),
        (b"<!DOCTYPE html><html>" + b" " * 600, "a web page"),
        (b'{"error": "not found"}', "a JSON text"),
        (b"\0" * 4096, "full of zeros"),
        ((2**40).to_bytes(8, "little") + b"{}", "claims a header of 1,099,511,627,776 bytes"),
        ((16).to_bytes(8, "little") + b"\xff" * 600, "no JSON header"),
        ((16).to_bytes(8, "little") + b'{"a": \xff\xfe' + b" " * 60, "no valid JSON"),
        ((8).to_bytes(8, "little") + b'{"a": 1}', "tensor 'a' has no description"),
    ],
)
def test_says_what_the_file_really_is(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200


def test_a_header_beyond_any_model_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{")
        file.truncate(MAX_HEADER_BYTES + 4096)  # sparse: takes no disk
    with pytest.raises(CheckpointError, match="no JSON header at its start"):
        SafetensorsFile(path)


def test_a_file_cut_in_half_is_truncated(good: Path) -> None:
    raw = good.read_bytes()
    good.write_bytes(raw[:-10])
    with pytest.raises(CheckpointError, match="truncated: 10 of 64 bytes of tensor data"):
        SafetensorsFile(good)
    good.write_bytes(raw[:60])
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        SafetensorsFile(good)


def test_bytes_after_the_last_tensor(good: Path) -> None:
    good.write_bytes(good.read_bytes() + b"\0" * 8)
    with pytest.raises(CheckpointError, match="8 bytes follow the last tensor"):
        SafetensorsFile(good)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*nowhere.safetensors: No such file"):
        SafetensorsFile(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dtype", "F33", "the unknown dtype 'F33'"),
        ("dtype", ["F32"], "the unknown dtype"),
        ("shape", [3, -4], "the impossible shape"),
        ("shape", [3, 4.0], "the impossible shape"),
        ("shape", [2**63, 2**63], "the impossible shape"),
        ("shape", "12", "the impossible shape"),
        ("shape", [3, 5], r"48 bytes, but F32 \[3, 5\] needs 60"),
        ("data_offsets", [8, 56], "(leaves a hole|overlaps)"),
        ("data_offsets", [48], "the impossible data_offsets"),
        ("data_offsets", [48, 0], "-48 bytes"),
        ("data_offsets", None, "the impossible data_offsets None"),
    ],
)
def test_broken_entries_are_named(good: Path, key: str, value: object, message: str) -> None:
    with_header(good, lambda header: header["a.weight"].__setitem__(key, value))
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(good)
    assert "a.weight" in str(caught.value) or "tensor" in str(caught.value)


def test_a_tensor_listed_twice(tmp_path: Path) -> None:
    entry = b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    text = b"{" + entry + b", " + entry + b"}"
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(CheckpointError, match="'a' is there twice"):
        SafetensorsFile(path)


def test_deep_nesting_is_no_crash(tmp_path: Path) -> None:
    text = b'{"a":' * 50_000
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="no valid JSON"):
        SafetensorsFile(path)


def test_no_bit_flip_in_the_header_goes_beyond_a_clear_error(good: Path) -> None:
    """Any flip gives CheckpointError, or the same bytes under other names or shapes."""
    raw = good.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    random.seed(0)
    for _ in range(1500):
        flipped = bytearray(raw)
        flipped[random.randrange(8 + length)] ^= 1 << random.randrange(8)
        good.write_bytes(flipped)
        try:
            file = SafetensorsFile(good)
        except CheckpointError:
            continue
        assert sum(file.read(name).nbytes for name in file.tensors) == 64
