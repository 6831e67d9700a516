"""The gated feed-forward block of Llama and its descendants."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.layers.linear import Linear

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
"""By the name that config.json's hidden_act uses."""


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x)), gate and up in one projection (Shazeer, arXiv:2002.05202)."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, act: str, bias: bool, dtype: jnp.dtype
    ) -> None:
        self.act = act
        self.gate_up_proj = Linear(
            (hidden_size,),
            (2, intermediate_size),
            dtype=dtype,
            sharding=(None, None, "tp"),
            bias=bias,
        )
        self.down_proj = Linear(
            (intermediate_size,), (hidden_size,), dtype=dtype, sharding=("tp", None), bias=bias
        )

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate_up = self.gate_up_proj(x)
        gate = ACTIVATIONS[self.act](gate_up[:, 0].astype(jnp.float32)).astype(x.dtype)
        return self.down_proj(gate * gate_up[:, 1])
