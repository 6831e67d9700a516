"""Writes a step's keys and values into the paged cache."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
    return kv.at[slot_mapping].set(rows, mode="drop", unique_indices=True)
