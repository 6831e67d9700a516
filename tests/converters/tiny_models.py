"""Tiny random checkpoints as transformers saves them, and the parameter trees they should fill."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.converters.architectures import name_map_for
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.loader import load_params
from jaxllm.converters.tied_head import effective_config

NORM = "model.norm.weight"
ARCHITECTURES = ("Llama", "Qwen2", "Qwen3")
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def build_model(architecture: str, **overrides: Any) -> transformers.PreTrainedModel:
    """A random model, biases and norms included."""
    config_class = getattr(transformers, f"{architecture}Config")
    config = config_class(**(SIZES | overrides))
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def save_model(path: Path, architecture: str = "Llama", **overrides: Any) -> Path:
    """A folder as `save_pretrained` writes it; max_shard_size splits it."""
    shard = overrides.pop("max_shard_size", "5GB")
    build_model(architecture, **overrides).save_pretrained(path, max_shard_size=shard)
    return path


def abstract_of(
    config: dict[str, Any], *, mesh: Mesh | None = None, dtype: Any = jnp.float32
) -> dict[str, jax.ShapeDtypeStruct]:
    """The parameters of a model with this config.json, as the engine declares them."""
    model, mlp = config["hidden_size"], config["intermediate_size"]
    heads, kv, dim = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config.get("head_dim") or model // config["num_attention_heads"],
    )
    group = heads // kv
    qwen2 = config["model_type"] == "qwen2"
    qkv_bias = qwen2 or config.get("attention_bias", False)
    layer: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
        "input_layernorm.weight": ((model,), ()),
        "post_attention_layernorm.weight": ((model,), ()),
        "self_attn.qkv_proj.weight": ((model, kv, group + 2, dim), (None, "tp", None, None)),
        "self_attn.o_proj.weight": ((kv, group, dim, model), ("tp", None, None, None)),
        "mlp.gate_up_proj.weight": ((model, 2, mlp), (None, None, "tp")),
        "mlp.down_proj.weight": ((mlp, model), ("tp", None)),
    }
    if qkv_bias:
        layer["self_attn.qkv_proj.bias"] = ((kv, group + 2, dim), ("tp", None, None))
    if qkv_bias and not qwen2:
        layer["self_attn.o_proj.bias"] = ((model,), ())
    if config.get("mlp_bias"):
        layer["mlp.gate_up_proj.bias"] = ((2, mlp), (None, "tp"))
        layer["mlp.down_proj.bias"] = ((model,), ())
    if config["model_type"] == "qwen3":
        layer["self_attn.q_norm.weight"] = ((dim,), ())
        layer["self_attn.k_norm.weight"] = ((dim,), ())
    shapes: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
        "model.embed_tokens.weight": ((config["vocab_size"], model), ("tp", None))
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    shapes["model.norm.weight"] = ((model,), ())
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = ((config["vocab_size"], model), ("tp", None))
    mesh = mesh or jax.make_mesh((1,), ("tp",), devices=jax.devices()[:1])
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for name, (shape, spec) in shapes.items()
    }


def load(folder: Path, **abstract_args: Any) -> dict[str, jax.Array]:
    checkpoint = open_checkpoint(str(folder))
    config = effective_config(checkpoint)
    abstract = abstract_of(config, **abstract_args)
    name_map = name_map_for(config["architectures"])
    params = load_params(abstract, checkpoint, name_map, config, progress=False)
    assert list(params) == list(abstract)
    for name, target in abstract.items():
        assert (params[name].shape, params[name].dtype) == (target.shape, target.dtype)
        assert params[name].sharding.is_equivalent_to(target.sharding, len(target.shape))
    return params


def expected_params(state: dict[str, Any], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The layout spelled out head by head, from a torch state dict."""
    tensors = {name: tensor.float().numpy() for name, tensor in state.items()}
    kv, dim = config["num_key_value_heads"], config["head_dim"]
    group = config["num_attention_heads"] // kv

    def heads(layer: str, kind: str) -> np.ndarray:
        q, k, v = (tensors[f"{layer}.{part}_proj.{kind}"] for part in "qkv")
        rows = []
        for head in range(kv):
            mine = [q[(head * group + i) * dim :][:dim] for i in range(group)]
            rows.append(np.stack([*mine, k[head * dim :][:dim], v[head * dim :][:dim]]))
        return np.stack(rows)  # [K, G+2, H(, D)]

    params = {
        name: tensor
        for name, tensor in tensors.items()
        if not any(f"{part}_proj" in name for part in ("q", "k", "v", "gate", "up"))
    }
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        params[f"{attention}.qkv_proj.weight"] = np.moveaxis(heads(attention, "weight"), 3, 0)
        if f"{attention}.q_proj.bias" in tensors:
            params[f"{attention}.qkv_proj.bias"] = heads(attention, "bias")
        o_proj = tensors[f"{attention}.o_proj.weight"]
        params[f"{attention}.o_proj.weight"] = o_proj.T.reshape(kv, group, dim, -1)
        gate, up = (tensors[f"{mlp}.{part}_proj.weight"].T for part in ("gate", "up"))
        params[f"{mlp}.gate_up_proj.weight"] = np.stack([gate, up], axis=1)
        if f"{mlp}.gate_proj.bias" in tensors:
            params[f"{mlp}.gate_up_proj.bias"] = np.stack(
                [tensors[f"{mlp}.{part}_proj.bias"] for part in ("gate", "up")]
            )
        params[f"{mlp}.down_proj.weight"] = tensors[f"{mlp}.down_proj.weight"].T
    if config.get("tie_word_embeddings"):
        params.pop("lm_head.weight", None)
    return params


def check(params: dict[str, jax.Array], expected: dict[str, np.ndarray]) -> None:
    assert set(params) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(params[name]), value, err_msg=name)


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Rewrites model.safetensors."""
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)


def error_of(model: Path | str, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(model), **options)
    return str(caught.value)
