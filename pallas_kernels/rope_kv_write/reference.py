"""The operation in plain XLA: what the kernels are held to, and what runs on the CPU."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_NOWHERE = 2**31 - 1


class HeadNorm(NamedTuple):
    """Weights of the RMS normalization of each query and key head before its rotation (Qwen3)."""

    q_weight: Float[Array, " H"]
    k_weight: Float[Array, " H"]


def rotate_and_write(
    qkv: Float[Array, "T K R H"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    kv: Float[Array, "PS 2 K H"],
    slot_mapping: Int[Array, " T"],
    *,
    norm: HeadNorm | None = None,
    norm_eps: float = 0.0,
) -> tuple[Float[Array, "T K R-2 H"], Float[Array, "PS 2 K H"]]:
    """Rotated queries, and the cache with the tokens' rotated keys and their values.

    Args:
        qkv: for each kv head its query heads, then its key, then its value: R rows.
        cos, sin: of each token's angles, float32; half is H / 2.
        slot_mapping: see `write_kv`.
        norm: if given, queries and keys are normalized by head first, with `norm_eps`.
    """
    group = qkv.shape[2] - 2
    q, k, v = qkv[:, :, :group], qkv[:, :, group], qkv[:, :, group + 1]
    if norm is not None:
        q, k = rms_norm(q, norm.q_weight, norm_eps), rms_norm(k, norm.k_weight, norm_eps)
    return rotate(q, cos, sin), write_kv(kv, rotate(k, cos, sin), v, slot_mapping)


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
