"""Llama 1 to 3 and the many checkpoints of their form (HF modeling_llama.py)."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from jaxllm.models.base import ModelConfig
from jaxllm.models.causal_lm import CausalLM
from jaxllm.models.layers.attention import Attention
from jaxllm.models.layers.decoder import DecoderLayer
from jaxllm.models.layers.mlp import GatedMLP


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """LlamaConfig of transformers."""

    architecture: ClassVar[str] = "LlamaForCausalLM"

    attention_bias: bool = False
    mlp_bias: bool = False


def decoder_layer(config: LlamaConfig, layer: int, dtype: jnp.dtype) -> DecoderLayer:
    attention = Attention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        dtype=dtype,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        sliding_window=config.window(layer),
    )
    mlp = GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        act=config.hidden_act,
        bias=config.mlp_bias,
        dtype=dtype,
    )
    return DecoderLayer(attention, mlp, config.hidden_size, config.rms_norm_eps, dtype)


class LlamaForCausalLM(CausalLM):
    Config = LlamaConfig

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype) -> None:
        layers = [decoder_layer(config, i, dtype) for i in range(config.num_hidden_layers)]
        super().__init__(config, layers, dtype)
