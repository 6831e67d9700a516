"""Folders whose weights are PyTorch files load as their safetensors twins do."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from jaxllm.convert import convert
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.torch_folder import PYTORCH
from tests.converters.tiny_models import NORM, check, error_of, load


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Two files and their index."""
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / PYTORCH.index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize("sharded", [False, True])
def test_parameters_equal_those_of_safetensors(folder: Path, sharded: bool) -> None:
    expected = {name: np.asarray(param) for name, param in load(folder).items()}
    tensors = {name: value.t().contiguous().t() for name, value in tensors_of(folder).items()}
    (folder / "model.safetensors").unlink()
    if sharded:
        write_shards(folder, tensors)
    else:
        torch.save(tensors, folder / PYTORCH.single)
    assert open_checkpoint(str(folder)).source == "pt"
    assert open_checkpoint(str(folder), load_format="pt").source == "pt"
    check(load(folder), expected)


def test_safetensors_win_unless_asked_otherwise(folder: Path) -> None:
    torch.save({"x": torch.ones(1)}, folder / PYTORCH.single)
    assert open_checkpoint(str(folder)).source == "safetensors"
    assert list(open_checkpoint(str(folder), load_format="pt").tensors) == ["x"]


def test_a_format_that_is_not_there(folder: Path) -> None:
    message = error_of(folder, load_format="pt")
    assert "neither pytorch_model.bin nor pytorch_model.bin.index.json is there" in message
    (folder / "model.safetensors").unlink()
    torch.save({"x": torch.ones(1)}, folder / PYTORCH.single)
    assert "only pytorch_model.bin" in error_of(folder, load_format="safetensors")
    assert "is GGUF" in error_of("demo", load_format="pt")


def test_the_index_decides_which_tensor_is_real(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    weight_map = write_shards(folder, tensors)
    other = next(file for file in weight_map.values() if file != weight_map[NORM])
    stale = {name: tensors[name] for name, file in weight_map.items() if file == other}
    torch.save(stale | {NORM: torch.zeros(32)}, folder / other)
    torch.save({NORM: torch.zeros(32)}, folder / PYTORCH.single)
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(str(folder))
    np.testing.assert_array_equal(checkpoint.read(NORM), tensors[NORM].numpy())
    assert f"does not place there: {NORM} ({other})" in caplog.text
    assert "not part of the model: pytorch_model.bin" in caplog.text


def test_an_absent_shard_is_named(folder: Path) -> None:
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    file = write_shards(folder, tensors)[NORM]
    (folder / file).unlink()
    assert f"names 1 of 2 shards that are not there: {file}." in error_of(folder)


def test_a_renamed_safetensors_file(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / PYTORCH.single)
    assert error_of(folder).endswith("is a safetensors file (rename it to model.safetensors), "
                                     "not a PyTorch file.")  # fmt: skip


def test_a_converted_folder_has_the_same_bits(folder: Path, tmp_path: Path) -> None:
    tensors = {name: value.t().contiguous().t() for name, value in tensors_of(folder).items()}
    (folder / "model.safetensors").unlink()
    write_shards(folder, tensors)
    target = convert(str(folder), tmp_path / "target", progress=False)
    written = tensors_of(target)
    assert set(written) == set(tensors)
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


def test_a_dtype_that_safetensors_lack(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    odd = torch.ones(2, dtype=torch.uint8).view(torch.float8_e4m3fnuz)
    torch.save({NORM: odd}, folder / PYTORCH.single)
    with pytest.raises(CheckpointError, match=rf"do not have: {NORM} \(float8_e4m3fnuz\)"):
        convert(str(folder), tmp_path / "target", progress=False)
