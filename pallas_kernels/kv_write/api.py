"""Writes a step's keys and values into the paged cache."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_NOWHERE = 2**31 - 1


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
