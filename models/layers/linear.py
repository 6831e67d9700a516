"""Dense projections between any input and output shapes."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float


def matmul_precision(dtype: jnp.dtype) -> lax.Precision | None:
    """HIGHEST for float32, which a GPU would otherwise round to TF32; None for the rest."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


class Linear(nnx.Module):
    """y = x · weight + bias, contracting x's trailing axes with the weight's leading ones.

    The weight keeps its heads (or gate and up) as axes of their own, so that the sharded one
    stays whole; XLA folds them into one matrix for the dot, at no cost.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        *,
        dtype: jnp.dtype,
        sharding: tuple[str | None, ...],
        bias: bool = False,
    ) -> None:
        """Args: sharding: a mesh axis or None for each of the weight's axes, [*in, *out]."""
        self.num_in = len(in_shape)
        self.weight = nnx.Param(jnp.zeros((*in_shape, *out_shape), dtype), out_sharding=sharding)
        # Flax fixes at the first assignment whether an attribute is data, so there is one only.
        self.bias = (
            nnx.Param(jnp.zeros(out_shape, dtype), out_sharding=sharding[self.num_in :])
            if bias
            else None
        )

    def __call__(self, x: Float[Array, "T *in"]) -> Float[Array, "T *out"]:
        weight = self.weight[...]
        axes = tuple(range(1, self.num_in + 1)), tuple(range(self.num_in))
        y = lax.dot_general(x, weight, (axes, ((), ())), precision=matmul_precision(x.dtype))
        return y if self.bias is None else y + self.bias[...]
