"""The decoder-only language model that the architectures fill with their layers."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.base import ModelConfig
from jaxllm.models.batch import AttentionMetadata, ForwardBatch, KVCache
from jaxllm.models.layers.decoder import Decoder, DecoderLayer
from jaxllm.models.layers.embedding import Embedding
from jaxllm.models.layers.rope import Rotation, rotation


@jax.jit
def run_layer(
    layer: DecoderLayer, x: jax.Array, rope: Rotation, kv: jax.Array, metadata: AttentionMetadata
) -> tuple[jax.Array, jax.Array]:
    """A layer, traced and lowered once for all that are alike: XLA inlines it."""
    return layer(x, rope, kv, metadata)


def run_layers(
    layers: Sequence[DecoderLayer],
    indices: range,
    x: Float[Array, "T D"],
    rope: Rotation,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
) -> tuple[Float[Array, "T D"], KVCache]:
    """Those of a model's layers one after the other; `kv_cache` is theirs alone."""
    kv_cache = list(kv_cache)
    for place, index in enumerate(indices):
        with jax.named_scope(f"layer_{index}"):
            x, kv_cache[place] = run_layer(layers[index], x, rope, kv_cache[place], metadata)
    return x, kv_cache


class CausalLM(nnx.Module):
    """A decoder with an output head. A model class sets Config and builds its layers."""

    Config: ClassVar[type[ModelConfig]]

    def __init__(
        self, config: ModelConfig, layers: Iterable[DecoderLayer], dtype: jnp.dtype
    ) -> None:
        self.config = config
        self.model = Decoder(
            layers, config.padded_vocab_size, config.hidden_size, config.rms_norm_eps, dtype
        )
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Embedding(config.padded_vocab_size, config.hidden_size, dtype=dtype)
        )

    @property
    def layers(self) -> nnx.List:
        return self.model.layers

    def embed(self, batch: ForwardBatch) -> Float[Array, "T D"]:
        return self.model.embed_tokens(batch.token_ids)

    def rotary(self, batch: ForwardBatch) -> Rotation:
        """The positions' rotation, which all layers of a step share."""
        attention = batch.attention
        seq_lens = attention.seq_lens
        if not attention.decode_only:
            tokens = jnp.arange(batch.token_ids.shape[0], dtype=jnp.int32)
            owner = jnp.searchsorted(attention.query_start[1:], tokens, side="right")
            seq_lens = jnp.take(seq_lens, owner, mode="clip")
        return rotation(self.config.rope, self.config.head_dim, batch.positions, seq_lens)

    def norm(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.model.norm(x)

    def __call__(
        self, batch: ForwardBatch, kv_cache: KVCache
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """One step: hidden states after the final norm, and the cache with the step written."""
        with jax.named_scope("embed"):
            x = self.embed(batch)
            rope = self.rotary(batch)
        indices = range(len(self.layers))
        x, kv_cache = run_layers(self.layers, indices, x, rope, kv_cache, batch.attention)
        with jax.named_scope("final_norm"):
            return self.norm(x), kv_cache

    def compute_logits(self, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """float32 logits of hidden states after the final norm; -inf for a padded vocabulary's
        padding."""
        with jax.named_scope("lm_head"):
            head = self.model.embed_tokens if self.lm_head is None else self.lm_head
            logits = head.logits(hidden)
            if self.config.padded_vocab_size == self.config.vocab_size:
                return logits
            real = jnp.arange(self.config.padded_vocab_size) < self.config.vocab_size
            return jnp.where(real, logits, -jnp.inf)
