"""PyTorch files are read without torch, bit for bit as torch.load has them, or refused by name."""

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.torch_file import TorchFile
from jaxllm.converters.torch_tensors import TORCH_DTYPES
from tests.converters.torch_files import error_of


def bits_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], str, bytes]:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), flat.numpy().tobytes()


def check_equal_to_torch(path: Path) -> TorchFile:
    file = TorchFile(path)
    loaded = torch.load(path, weights_only=False)  # else protocol 2 only
    assert list(file.tensors) == list(loaded)
    for name, tensor in loaded.items():
        got, info = file.read(name), file.tensors[name]
        assert (got.shape, got.dtype.name, got.tobytes()) == bits_of(tensor), name
        assert (info.shape, info.dtype) == (got.shape, got.dtype)
        assert info.nbytes == got.nbytes
        assert not got.flags.writeable or not got.size
    return file


def state() -> dict[str, torch.Tensor]:
    """Everything that a state dict's tensors may be."""
    torch.manual_seed(0)
    big = torch.randn(6, 7, 8)
    embedding = torch.nn.Parameter(torch.randn(10, 4, dtype=torch.bfloat16))
    return {
        "contiguous": torch.randn(3, 5),
        "transposed": torch.randn(3, 5).t(),
        "permuted": big.permute(2, 0, 1),
        "slice": big[2:4, 1:, 3:5],
        "steps": big.reshape(-1)[5::3],
        "diagonal": torch.randn(4, 4).diagonal(),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "embedding": embedding,
        "head": embedding,
        "scalar": torch.tensor(2.5),
        "bfloat16_scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 64),
        "empty_slice": big[:, 3:3],
    }


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_strides_offsets_and_shared_storages_are_honoured(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(state(), path, pickle_protocol=protocol)
    file = check_equal_to_torch(path)
    assert np.shares_memory(file.read("embedding"), file.read("head"))
    assert np.shares_memory(file.read("permuted"), file.read("slice"))


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_every_dtype_is_read(tmp_path: Path, name: str) -> None:
    raw = torch.randint(0, 2 if name == "bool" else 250, (16,), dtype=torch.uint8)
    tensor = raw.view(getattr(torch, name))
    path = tmp_path / "x.bin"
    torch.save({"x": tensor, "part": tensor[1:]}, path)
    file = check_equal_to_torch(path)
    assert file.tensors["x"].dtype == TORCH_DTYPES[name]


def test_a_part_is_a_view_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    matrix = torch.arange(35.0).reshape(5, 7).t()
    torch.save({"x": matrix}, path)
    part = TorchFile(path).read("x", (slice(2, 4), slice(1, None, 2)))
    np.testing.assert_array_equal(part, matrix.numpy()[2:4, 1::2])
    assert part.base is not None


def test_what_modules_save(tmp_path: Path) -> None:
    """OrderedDicts with metadata, parameters, buffers, half precision."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).half()
    path = tmp_path / "x.bin"
    torch.save(module.state_dict(), path)
    check_equal_to_torch(path)
    torch.save(dict(module.named_parameters()), path)
    check_equal_to_torch(path)


def test_no_torch_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    torch.save({"x": torch.ones(2, dtype=torch.bfloat16)}, path)
    script = (
        "import sys\nsys.modules['torch'] = None\nfrom pathlib import Path\n"
        "from jaxllm.converters.torch_file import TorchFile\n"
        f"print(TorchFile(Path({str(path)!r})).read('x').tolist())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[1.0, 1.0]\n", done.stderr


def test_lazily_negated_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    torch.save({"x": torch.ones(2, dtype=torch.complex64).conj().imag}, path)
    assert "lazily conjugated or negated" in error_of(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"model": {"x": torch.ones(1)}, "epoch": 3}, "holds a value of type dict under 'model'"),
        ({"x": torch.ones(1), "epoch": 3}, "holds a value of type int under 'epoch'"),
        ({3: torch.ones(1)}, "holds a tensor under 3"),
        ([torch.ones(1)], "holds no dict of tensors but a value of type list"),
        (torch.ones(1), "holds no dict of tensors but a tensor"),
    ],
)
def test_training_states_are_no_state_dicts(tmp_path: Path, value: Any, message: str) -> None:
    torch.save(value, tmp_path / "x.bin")
    assert message in error_of(tmp_path / "x.bin")


def resave(path: Path, change: Callable[[dict[str, bytes]], object], **options: Any) -> None:
    """Writes the archive anew with other records."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    change(records)
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in records.items():
            archive.writestr(name, content)


def test_other_kinds_of_archives(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    torch.save({"x": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    assert error_of(path).startswith("is a PyTorch file in the format before 1.6")
    torch.save({"x": torch.ones(2)}, path)
    resave(path, lambda records: records.update({"x/byteorder": b"big"}))
    assert "has the byte order 'big'" in error_of(path)
    torch.save({"x": torch.ones(2)}, path)
    resave(path, lambda records: records.update({"x/constants.pkl": b")."}))
    assert error_of(path).startswith("is a TorchScript archive")
    torch.save({"x": torch.ones(2)}, path)
    resave(path, lambda records: records.pop("x/data.pkl"))
    assert "it has no data.pkl" in error_of(path)
    torch.save({"x": torch.ones(2)}, path)
    resave(path, lambda records: None, compression=zipfile.ZIP_DEFLATED)
    assert "is compressed or encrypted" in error_of(path)


@pytest.mark.parametrize("cut", [10, 200, 1000])
def test_a_truncated_file(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.bin"
    torch.save({"x": torch.ones(200)}, path)
    path.write_bytes(path.read_bytes()[:-cut])
    assert "is truncated or damaged: its zip directory" in error_of(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 12\n", "a Git LFS pointer to 12 bytes"),
        ((9).to_bytes(8, "little") + b'{"x":{}}' + b" " * 40, "is a safetensors file (rename it"),
        (b"GGUF" + bytes(40), "a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "its zip directory"),
        (b"hello world", "is a text that begins with 'hello world'"),
        (b"\x01hello", "of unknown kind: it begins with b'\\x01hel'"),
    ],
)
def test_says_what_the_file_really_is(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content)
    assert message in error_of(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*none.bin: No such file"):
        TorchFile(tmp_path / "none.bin")


def test_bfloat16_is_ml_dtypes_own(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "x.bin")
    assert TorchFile(tmp_path / "x.bin").read("x").dtype == np.dtype(ml_dtypes.bfloat16)
