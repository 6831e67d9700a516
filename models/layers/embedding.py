"""The token embedding, which may serve as the output head too."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.linear import matmul_precision


class Embedding(nnx.Module):
    """A row of D values for each of V tokens, sharded over the tokens."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(
            jnp.zeros((vocab_size, hidden_size), dtype), out_sharding=("tp", None)
        )

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")

    def logits(self, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """hidden · weightᵀ in float32."""
        return lax.dot_general(
            hidden,
            self.weight[...],
            (((1,), (1,)), ((), ())),
            precision=matmul_precision(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
