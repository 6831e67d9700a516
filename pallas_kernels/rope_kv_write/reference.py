"""The operation in plain XLA: what the kernels are held to, and what runs on the CPU."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_NOWHERE = 2**31 - 1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cos", "sin", "q_weight", "k_weight"],
    meta_fields=["eps"],
)
@dataclass(frozen=True)
class HeadRotation:
    """What is done to each query and key head: RMS normalization, if any (Qwen3), then rotation.

    Attributes:
        cos, sin: of each token's angles, float32; half is H / 2.
        q_weight, k_weight: of the normalization, with `eps`; None for both leaves it out.
    """

    cos: jax.Array  # f32[T, half]
    sin: jax.Array  # f32[T, half]
    q_weight: jax.Array | None = None  # [H]
    k_weight: jax.Array | None = None  # [H]
    eps: float = 0.0

    def of_queries(self, q: Float[Array, "T *heads H"]) -> Float[Array, "T *heads H"]:
        return self._turned(q, self.q_weight)

    def of_keys(self, k: Float[Array, "T *heads H"]) -> Float[Array, "T *heads H"]:
        return self._turned(k, self.k_weight)

    def _turned(self, x: jax.Array, weight: jax.Array | None) -> jax.Array:
        if weight is not None:
            x = rms_norm(x, weight, self.eps)
        return rotate(x, self.cos, self.sin)


def rotate_and_write(
    qkv: Float[Array, "T K R H"],
    rotation: HeadRotation,
    kv: Float[Array, "PS 2 K H"],
    slot_mapping: Int[Array, " T"],
) -> tuple[Float[Array, "T K R-2 H"], Float[Array, "PS 2 K H"]]:
    """Rotated queries, and the cache with the tokens' rotated keys and their values.

    Args:
        qkv: for each kv head its query heads, then its key, then its value: R rows.
        slot_mapping: see `write_kv`.
    """
    group = qkv.shape[2] - 2
    q, k, v = qkv[:, :, :group], qkv[:, :, group], qkv[:, :, group + 1]
    return rotation.of_queries(q), write_kv(kv, rotation.of_keys(k), v, slot_mapping)


def rms_norm(
    x: Float[Array, "*batch D"], weight: Float[Array, " D"], eps: float
) -> Float[Array, "*batch D"]:
    """x / rms(x) * weight over the last axis, in float32 (Zhang & Sennrich, arXiv:1910.07467)."""
    wide = x.astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse_rms * weight.astype(jnp.float32)).astype(x.dtype)


def rotate(
    x: Float[Array, "T *heads H"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T *heads H"]:
    """x with dimension i and i + H/2 turned by angle i, in float32, back in x's dtype."""
    shape = (x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1] // 2)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def write_kv(
    kv: Float[Array, "PS 2 K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, " T"],
) -> Float[Array, "PS 2 K H"]:
    """The cache with the tokens' rows set, in the cache's dtype.

    A scatter on axis 0, which XLA does in place when the caller donates `kv`.

    Args:
        slot_mapping: the row of each token, each another one; rows from PS on are padding and
            are dropped. None may be negative: a negative index would count from the end.
    """
    rows = jnp.stack([k, v], axis=1).astype(kv.dtype)
    if len(slot_mapping) == 1:
        # XLA turns a scatter of one row into a dynamic-update-slice, fuses that with whatever
        # reads the cache, and copies all of it. A second row, which is dropped, prevents it.
        rows = jnp.concatenate([rows, rows])
        slot_mapping = jnp.concatenate([slot_mapping, jnp.full_like(slot_mapping, _NOWHERE)])
    return kv.at[slot_mapping].set(rows, mode="drop", unique_indices=True)
