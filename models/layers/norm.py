"""Root-mean-square normalization."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, in float32 (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, *, dtype: jnp.dtype) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.zeros((size,), dtype), out_sharding=(None,))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        wide = x.astype(jnp.float32)
        inverse_rms = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * inverse_rms * self.weight[...].astype(jnp.float32)).astype(x.dtype)
