"""The online softmax that the Triton kernels share, and their small helpers.

Scores live in the base-2 domain, because exp2 is one instruction on the GPU.
"""

import math
import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)
NO_SCORE = -1e30
"""The running maximum before any score: finite, so that a row without any never makes a NaN."""

# Deprecated since jax 0.11 in favour of Mosaic GPU, yet still the fastest decode kernel here and
# the only one for GPUs before Hopper.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")


@dataclass(frozen=True)
class Scoring:
    """How a kernel turns q·k into a score: everything static about one attention call."""

    block_size: int
    scale: float
    sliding_window: int | None
    logit_soft_cap: float | None

    def scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """f32[M, C], times log2(e), of q [M, H] and k [C, H]."""
        s = dot(q, k, contract_k=1)
        if self.logit_soft_cap is None:
            return s * (self.scale * LOG2E)
        capped = jnp.tanh(s * (self.scale / self.logit_soft_cap))
        return capped * (self.logit_soft_cap * LOG2E)


def dot(a: jax.Array, b: jax.Array, contract_k: int) -> jax.Array:
    """a [M, C] times b over b's axis contract_k, in f32; float32 operands never become TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    numbers = (((1,), (contract_k,)), ((), ()))
    return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)


def update(carry: tuple, scores: jax.Array, v: jax.Array) -> tuple:
    """One step of the online softmax; masked scores are -inf.

    Args:
        carry: acc f32[M, H], top f32[M] (the largest score), total f32[M].
        scores: f32[M, C] in the base-2 domain.
        v: [C, H].
    """
    acc, top, total = carry
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - new_top[:, None])
    shrink = jnp.exp2(top - new_top)
    acc = acc * shrink[:, None] + dot(weights.astype(v.dtype), v, contract_k=0)
    return acc, new_top, total * shrink + jnp.sum(weights, axis=1)


def slots_of(tables_ref, request: jax.Array, position: jax.Array, block_size: int) -> jax.Array:
    """The cache rows of a request's positions, through its block table; no position is < 0."""
    if block_size & (block_size - 1) == 0:
        shift = jnp.int32(block_size.bit_length() - 1)
        block = lax.shift_right_logical(position, jnp.broadcast_to(shift, position.shape))
        return tables_ref[request, block] * block_size + (position & (block_size - 1))
    block = lax.div(position, jnp.full_like(position, block_size))
    return tables_ref[request, block] * block_size + position - block * block_size


def cdiv(a, b: int):
    """a / b rounded up; for traced a >= 0 without the sign handling of `//`."""
    if isinstance(a, int):
        return -(-a // b)
    return lax.div(a + (b - 1), jnp.int32(b))


def power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()
