"""Packed tensors are unpacked some rows at a time, straight into the devices' parts."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.converters import host_fill
from jaxllm.converters.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from jaxllm.converters.finite import FiniteScan
from jaxllm.converters.llama import NAME_MAP
from jaxllm.converters.loader import load_params
from jaxllm.models.llama import LlamaConfig, LlamaForCausalLM
from jaxllm.runner.mesh import make_mesh
from jaxllm.runner.weights import build_abstract
from tests.converters.tiny_models import save_model

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 97}
PIECE_BYTES = 300


class Packed:
    """A checkpoint whose tensors take less in the file than in memory; counts what is read."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.largest = inner, 0
        self.tensors: Mapping[str, TensorInfo] = {
            name: replace(info, nbytes=info.nbytes // 2) for name, info in inner.tensors.items()
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        values = self._inner.read(name, index)
        self.largest = max(self.largest, values.nbytes)
        return values


def load(checkpoint: Any, tp: int) -> dict[str, np.ndarray]:
    config = LlamaConfig.from_hf(checkpoint.config).with_tensor_parallel(tp)
    mesh = make_mesh(tensor_parallel_size=tp)
    shapes = build_abstract(LlamaForCausalLM, config, jnp.float32, mesh).shapes
    name_map = NAME_MAP.on_mesh(config.kv_replicas, config.padded_vocab_size - 97)
    params = load_params(shapes, checkpoint, name_map, checkpoint.config, progress=False)
    return {name: np.asarray(param) for name, param in params.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("llama")
    save_model(folder, "Llama", attention_bias=True, mlp_bias=True, **SIZES)
    return open_checkpoint(str(folder))


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_pieces_make_the_same_parameters(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    """On 8 devices each kv head is there four times and the vocabulary is padded."""
    expected = load(checkpoint, tp)
    monkeypatch.setattr(host_fill, "_PIECE_BYTES", PIECE_BYTES)
    packed = Packed(checkpoint)
    found = load(packed, tp)
    # The queries of one kv head stay together: heads of 8 rows of 32 numbers.
    assert packed.largest == 8 // max(2, tp) * 8 * 32 * 4
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_bad_values_are_counted_over_all_pieces(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bad(Packed):
        def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
            values = super().read(name, index)
            return values * np.nan if name.endswith("1.mlp.down_proj.weight") else values

    monkeypatch.setattr(host_fill, "_PIECE_BYTES", PIECE_BYTES)
    bad: Any = Bad(checkpoint)
    scan = FiniteScan(bad)
    load(scan, 1)
    size = np.prod(checkpoint.tensors["model.layers.1.mlp.down_proj.weight"].shape)
    assert scan.found == {"model.layers.1.mlp.down_proj.weight": size}
