"""Parameters come out of a checkpoint whole, in the right layout and on the right devices."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType

from jaxllm.converters import loader
from tests.converters.tiny_models import (
    ARCHITECTURES,
    build_model,
    change_tensors,
    check,
    expected_params,
    load,
    save_model,
)

CASES = [
    *[(architecture, {"tie_word_embeddings": tied}) for architecture in ARCHITECTURES
      for tied in (False, True)],
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
    ("Llama", {"head_dim": 16, "num_key_value_heads": 1}),
    ("Llama", {"max_shard_size": "20KB"}),
    ("Qwen2", {"max_shard_size": "20KB", "tie_word_embeddings": True}),
]  # fmt: skip


@pytest.fixture(params=["on the host", "on the device"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Arranging in the host's memory, as for CPUs, and by a program, as on GPUs, where most
    tensors go up in several pieces."""
    on_host = request.param == "on the host"
    monkeypatch.setattr("jaxllm.converters.loader._is_on_host", lambda fill: on_host)
    monkeypatch.setattr("jaxllm.converters.upload.PIECE_BYTES", 1000)
    return request.param


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(("architecture", "options"), CASES, ids=str)
def test_parameters_equal_what_transformers_saved(
    tmp_path: Path, architecture: str, options: dict[str, Any]
) -> None:
    save_model(tmp_path, architecture, **options)
    sharded = (tmp_path / "model.safetensors.index.json").exists()
    assert sharded == ("max_shard_size" in options)
    options = {key: value for key, value in options.items() if key != "max_shard_size"}
    model = build_model(architecture, **options)
    check(load(tmp_path), expected_params(model.state_dict(), model.config.to_dict()))


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_each_device_gets_its_slice(tmp_path: Path, axis_type: AxisType) -> None:
    options = {"num_attention_heads": 16, "num_key_value_heads": 8, "attention_bias": True,
               "mlp_bias": True}  # fmt: skip
    save_model(tmp_path, **options)
    model = build_model("Llama", **options)
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(axis_type,))
    params = load(tmp_path, mesh=mesh)
    expected = expected_params(model.state_dict(), model.config.to_dict())
    check(params, expected)
    split = 0
    for name, param in params.items():
        for shard in param.addressable_shards:
            np.testing.assert_array_equal(
                np.asarray(shard.data), expected[name][shard.index], err_msg=name
            )
        split += param.addressable_shards[0].data.size * 8 == param.size
    assert split == 14  # embedding, head, and six matrices or biases a layer


def test_a_device_reads_its_slice_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both_ways: str
) -> None:
    save_model(tmp_path, num_attention_heads=16, num_key_value_heads=8)
    largest = 0
    on_device = both_ways == "on the device"
    where, name = (loader, "upload") if on_device else (jax, "make_array_from_callback")
    put = getattr(where, name)

    def watched(shape: Any, sharding: Any, callback: Any) -> jax.Array:
        def measured(index: Any) -> np.ndarray:
            nonlocal largest
            part = callback(index)
            if len(shape) > 1:
                largest = max(largest, part.nbytes)
            return part

        return put(shape, sharding, measured)

    monkeypatch.setattr(where, name, watched)
    load(tmp_path, mesh=jax.make_mesh((8,), ("tp",)))
    # An eighth of q_proj, or of the parameter that queries, keys and values make up.
    heads = 16 if on_device else 16 + 8 + 8
    assert largest == heads * 8 * 32 * 4 // 8


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("stored", ["float64", "float32", "bfloat16", "float16"])
def test_dtypes_are_cast(tmp_path: Path, llama_folder: Path, stored: str, dtype: Any) -> None:
    shutil.copytree(llama_folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = {
        name: tensor.astype(np.dtype(stored))
        for name, tensor in safetensors.numpy.load_file(file).items()
    }
    safetensors.numpy.save_file(tensors, file)
    params = load(tmp_path, dtype=dtype)
    expected = tensors["model.layers.1.mlp.down_proj.weight"].astype(dtype).T
    np.testing.assert_array_equal(params["model.layers.1.mlp.down_proj.weight"], expected)
    expected = tensors["model.embed_tokens.weight"].astype(dtype)
    np.testing.assert_array_equal(params["model.embed_tokens.weight"], expected)


def test_narrowing_bfloat16_to_float16_is_warned_about(
    tmp_path: Path, llama_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(llama_folder, tmp_path, dirs_exist_ok=True)
    change_tensors(tmp_path, lambda tensors: tensors.update(
        {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    ))  # fmt: skip
    load(tmp_path, dtype=jnp.float16)
    assert "21 bfloat16 tensors are cast to float16" in caplog.text
    assert "--dtype bfloat16" in caplog.text


def test_parameters_outlive_the_file(folder: Path) -> None:
    """On the CPU JAX would share mapped memory: cutting the file would kill the process."""
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    padded = length + -(8 + length) % 64  # JAX shares memory that is aligned to 64 bytes
    header = raw[8 : 8 + length].ljust(padded)
    file.write_bytes(padded.to_bytes(8, "little") + header + raw[8 + length :])
    params = load(folder)
    expected = {name: np.array(param) for name, param in params.items()}
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    for name, param in params.items():
        np.testing.assert_array_equal(np.asarray(param), expected[name])
