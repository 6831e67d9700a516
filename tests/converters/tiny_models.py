"""Tiny random checkpoints as transformers saves them, and the parameter trees they should fill."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
import transformers
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
