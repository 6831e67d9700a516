"""Each quantized format equals its own formula, and a model in it loads as its plain one."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from jaxllm.convert import convert
from jaxllm.converters import quant_formats
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.quant_formats import dequantized
from tests.converters.quant_cases import (
    BY_NAME,
    CASES,
    QUANT_SIZES,
    MemoryCheckpoint,
    pack_model,
    packed,
)
from tests.converters.quant_packers import Case, Tensors
from tests.converters.test_models_load import logits_of
from tests.converters.tiny_models import load, save_model


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("plain"), **QUANT_SIZES)


def write(folder: Path, source: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir()
    settings = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def pair(tmp_path: Path, plain_folder: Path, case: Case) -> tuple[Path, Path]:
    """The quantized model's folder and that of the plain model with its dequantized weights."""
    tensors = safetensors.numpy.load_file(plain_folder / "model.safetensors")
    stored, plain = pack_model(tensors, case)
    return (
        write(tmp_path / "quantized", plain_folder, stored, quantization_config=case.config),
        write(tmp_path / "plain", plain_folder, plain),
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_slabs_and_slices_equal_the_formula(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(0).normal(size=(288, 160)).astype(np.float32)
    tensors, expected = packed(case, weight)
    assert np.abs(expected - weight).max() < 2.5
    bias = np.ones(288, np.float16)
    inner = MemoryCheckpoint(case.config, tensors | {"m.q_proj.bias": bias})
    checkpoint = dequantized(inner)  # pyright: ignore[reportArgumentType]
    assert list(checkpoint.tensors) == ["m.q_proj.weight", "m.q_proj.bias"]
    info = checkpoint.tensors["m.q_proj.weight"]
    assert (info.shape, info.dtype) == (weight.shape, np.float32)
    assert info.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    monkeypatch.setattr(quant_formats, "_SLAB_ELEMENTS", 1)
    for index in (None, np.s_[100:270, 3:90], np.s_[7:8], np.s_[:, ::2], np.s_[::3], np.s_[5:5]):
        wanted = expected if index is None else expected[index]
        index = index if index is None or isinstance(index, tuple) else (index,)
        found = checkpoint.read("m.q_proj.weight", index)
        assert (found.shape, found.dtype) == (wanted.shape, np.float32)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert checkpoint.read("m.q_proj.bias") is not None
    assert checkpoint.config == {"vocab_size": 8}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_fills_the_parameters_of_its_plain_one(pair: tuple[Path, Path]) -> None:
    found, wanted = (load(folder) for folder in pair)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "case", [BY_NAME[name] for name in ("gptq 3 bit, desc_act", "nf4, double")], ids=str
)
def test_a_model_has_the_logits_of_its_plain_one(pair: tuple[Path, Path]) -> None:
    found, wanted = (logits_of(folder, tensor_parallel_size=2) for folder in pair)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("case", [BY_NAME["awq"]], ids=str)
def test_converting_writes_plain_weights(pair: tuple[Path, Path], tmp_path: Path) -> None:
    quantized, plain = pair
    target = convert(str(quantized), tmp_path / "target", progress=False)
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    found, wanted = (
        safetensors.numpy.load_file(folder / "model.safetensors") for folder in (target, plain)
    )
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("case", [BY_NAME["fp8, block"]], ids=str)
def test_dummy_weights_need_no_packed_ones(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    shutil.copy(pair[0] / "config.json", tmp_path / "config")
    checkpoint = open_checkpoint(str(tmp_path / "config"), load_format="dummy")
    assert "quantization_config" not in checkpoint.config
    assert checkpoint.source == "dummy"
    assert not checkpoint.tensors
