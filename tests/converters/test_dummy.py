"""Dummy weights."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.converters.architectures import name_map_for
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.loader import load_params
from tests.converters.tiny_models import (
    abstract_of,
)


def test_dummy_weights_depend_on_the_name_alone(llama_folder: Path) -> None:
    checkpoint = open_checkpoint(str(llama_folder), load_format="dummy")
    assert (checkpoint.source, dict(checkpoint.tensors)) == ("dummy", {})
    config: dict[str, Any] = checkpoint.config | {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    one = jax.make_mesh((1,), ("tp",), devices=jax.devices()[:1])
    name_map = name_map_for(config["architectures"])
    loaded = [
        load_params(abstract_of(config, mesh=mesh), checkpoint, name_map, config)
        for mesh in (one, one, jax.make_mesh((8,), ("tp",)))
    ]
    for name, param in loaded[0].items():
        for other in loaded[1:]:
            np.testing.assert_array_equal(np.asarray(param), np.asarray(other[name]))
    first, second = (
        np.asarray(loaded[0][f"model.layers.{i}.mlp.down_proj.weight"]) for i in range(2)
    )
    assert np.abs(first - second).max() > 0.01
    assert np.abs(first).max() < 0.035
    assert np.std(first) == pytest.approx(0.02, rel=0.05)
    assert abs(np.corrcoef(first[:-1].ravel(), first[1:].ravel())[0, 1]) < 0.1
