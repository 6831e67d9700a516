"""Qwen3 (HF modeling_qwen3.py): queries and keys are normalized by head, optional windows."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxllm.models.base import SlidingWindowConfig
from jaxllm.models.causal_lm import CausalLM
from jaxllm.models.layers.attention import Attention
from jaxllm.models.layers.decoder import DecoderLayer
from jaxllm.models.layers.mlp import GatedMLP


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(SlidingWindowConfig):
    """Qwen3Config of transformers."""

    architecture: ClassVar[str] = "Qwen3ForCausalLM"

    attention_bias: bool = False

    @classmethod
    def _derived(cls, values: dict[str, Any]) -> dict[str, Any]:
        # Unlike elsewhere, an absent head_dim is not hidden_size / num_attention_heads.
        return super()._derived(values) | {"head_dim": 128}


def decoder_layer(config: Qwen3Config, layer: int, dtype: jnp.dtype) -> DecoderLayer:
    attention = Attention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        dtype=dtype,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm_eps=config.rms_norm_eps,
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


class Qwen3ForCausalLM(CausalLM):
    Config = Qwen3Config

    def __init__(self, config: Qwen3Config, dtype: jnp.dtype) -> None:
        layers = [decoder_layer(config, i, dtype) for i in range(config.num_hidden_layers)]
        super().__init__(config, layers, dtype)
