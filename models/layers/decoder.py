"""The pre-norm decoder block and the stack of them."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.batch import AttentionMetadata
from jaxllm.models.layers.attention import Attention
from jaxllm.models.layers.embedding import Embedding
from jaxllm.models.layers.mlp import GatedMLP
from jaxllm.models.layers.norm import RMSNorm
from jaxllm.models.layers.rope import Rotation


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, attention: Attention, mlp: GatedMLP, hidden_size: int, eps: float, dtype: jnp.dtype
    ) -> None:
        self.input_layernorm = RMSNorm(hidden_size, eps, dtype=dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, dtype=dtype)
        self.mlp = mlp

    def __call__(
        self,
        x: Float[Array, "T D"],
        rope: Rotation,
        kv: Float[Array, "PS 2 K H"],
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], Float[Array, "PS 2 K H"]]:
        with jax.named_scope("self_attn"):
            out, kv = self.self_attn(self.input_layernorm(x), rope, kv, metadata)
            x = x + out
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_attention_layernorm(x)), kv


class Decoder(nnx.Module):
    """What checkpoints call `model`: the embedding, the layers and the final norm."""

    def __init__(
        self,
        layers: Iterable[DecoderLayer],
        vocab_size: int,
        hidden_size: int,
        eps: float,
        dtype: jnp.dtype,
    ) -> None:
        self.embed_tokens = Embedding(vocab_size, hidden_size, dtype=dtype)
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(hidden_size, eps, dtype=dtype)
