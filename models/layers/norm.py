"""Root-mean-square normalization."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.pallas_kernels.rope_kv_write.reference import rms_norm


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, in float32 (Zhang & Sennrich, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, *, dtype: jnp.dtype) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.zeros((size,), dtype), out_sharding=(None,))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return rms_norm(x, self.weight[...], self.eps)
