"""Qwen2 and Qwen2.5 (HF modeling_qwen2.py): Llama with q, k and v biases and optional windows."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from jaxllm.models.base import SlidingWindowConfig
from jaxllm.models.causal_lm import CausalLM
from jaxllm.models.layers.attention import Attention
from jaxllm.models.layers.decoder import DecoderLayer
from jaxllm.models.layers.mlp import GatedMLP


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(SlidingWindowConfig):
    """Qwen2Config of transformers."""

    architecture: ClassVar[str] = "Qwen2ForCausalLM"


def decoder_layer(config: Qwen2Config, layer: int, dtype: jnp.dtype) -> DecoderLayer:
    attention = Attention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        dtype=dtype,
        qkv_bias=True,
        sliding_window=config.window(layer),
    )
    mlp = GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        act=config.hidden_act,
        bias=False,
        dtype=dtype,
    )
    return DecoderLayer(attention, mlp, config.hidden_size, config.rms_norm_eps, dtype)


class Qwen2ForCausalLM(CausalLM):
    Config = Qwen2Config

    def __init__(self, config: Qwen2Config, dtype: jnp.dtype) -> None:
        layers = [decoder_layer(config, i, dtype) for i in range(config.num_hidden_layers)]
        super().__init__(config, layers, dtype)
