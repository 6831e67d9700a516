"""NaN and infinite weights are found while loading, all of them."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from jaxllm.converters.architectures import name_map_for
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.errors import LoadError
from jaxllm.converters.finite import count_not_finite
from jaxllm.converters.loader import load_params
from tests.converters.tiny_models import NORM, abstract_of, change_tensors

DTYPES: list[Any] = ["float64", "float32", "float16", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_every_kind_of_bad_value_is_counted(dtype: Any, bad: float) -> None:
    good = np.linspace(-300, 300, 5000).astype(np.dtype(dtype)).reshape(50, 100)
    assert count_not_finite(good) == 0
    values = good.copy()
    values[3, 4] = values[49, 99] = bad
    assert count_not_finite(values) == count_not_finite(values.T) == 2
    assert count_not_finite(values[3, 4]) == 1


def test_the_largest_finite_values_are_finite() -> None:
    for dtype in DTYPES:
        limits = ml_dtypes.finfo(dtype)
        assert count_not_finite(np.array([limits.max, limits.min, 0, limits.tiny], dtype)) == 0


def test_what_has_no_infinity() -> None:
    fp8 = np.array([np.nan, 448], ml_dtypes.float8_e4m3fn)
    assert count_not_finite(fp8) == 1
    assert count_not_finite(np.array([2**31 - 1, 0x7F800000])) == 0
    assert count_not_finite(np.empty((0, 4), np.float32)) == 0


def test_large_tensors_are_scanned_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.converters.finite._CHUNK_VALUES", 1000)
    values = np.zeros((2, 3000), np.float32)
    values[1, 2999] = np.inf
    assert count_not_finite(values) == count_not_finite(values.reshape(-1)) == 1


def load(folder: Path, *, finite: bool) -> None:
    checkpoint = open_checkpoint(str(folder))
    name_map = name_map_for(checkpoint.config["architectures"])
    abstract = abstract_of(checkpoint.config)
    load_params(abstract, checkpoint, name_map, checkpoint.config, progress=False, finite=finite)


def spoil(tensors: dict[str, np.ndarray]) -> None:
    tensors[NORM][:3] = np.nan
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"][7, 9] = np.inf


def test_all_bad_tensors_are_named(folder: Path) -> None:
    load(folder, finite=True)
    change_tensors(folder, spoil)
    load(folder, finite=False)
    with pytest.raises(LoadError) as caught:
        load(folder, finite=True)
    message = str(caught.value)
    assert message.startswith(f"{folder} holds NaN or infinite values in 3 tensors:")
    assert "model.layers.{0..1}.mlp.up_proj.weight  1 of 1,536 values" in message
    assert "model.norm.weight  3 of 32 values" in message


def test_strided_tensors_of_pytorch_files(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    tensors = {name: torch.tensor(checkpoint.read(name)) for name in checkpoint.tensors}
    tensors["lm_head.weight"][5, 6] = torch.inf
    tensors = {name: value.t().contiguous().t() for name, value in tensors.items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"lm_head.weight  1 of 3,072 values"):
        load(folder, finite=True)
