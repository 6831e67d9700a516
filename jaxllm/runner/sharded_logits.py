"""Logits whose vocabulary is shared out over the mesh axis tp."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxllm.runner.mesh import TP_AXIS, replicated


def gather_logits(
    logits: Float[Array, "B padded"], mesh: Mesh, vocab_size: int
) -> Float[Array, "B V"]:
    """The logits on every device, without the vocabulary's padding."""
    return lax.with_sharding_constraint(logits, replicated(mesh))[:, :vocab_size]


def top_tokens(
    logits: Float[Array, "B padded"], mesh: Mesh
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The most likely token of each row and its logit, NaN if any of the row is.

    Each device finds its own; two numbers a row and device are gathered. XLA's maximum over
    devices would not do: it may lose a NaN.
    """
    return jax.shard_map(
        partial(_top_tokens, width=logits.shape[1] // mesh.shape[TP_AXIS]),
        mesh=mesh,
        in_specs=PartitionSpec(None, TP_AXIS),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(logits)


def _top_tokens(logits: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32) + lax.axis_index(TP_AXIS) * width
    values = lax.bitcast_convert_type(jnp.max(logits, axis=-1), jnp.int32)
    tokens, values = lax.all_gather(jnp.stack([tokens, values]), TP_AXIS, axis=1)
    values = lax.bitcast_convert_type(values, jnp.float32)
    best = jnp.argmax(values, axis=0)[None]  # of equals the first, as in one argmax over all
    return (
        jnp.take_along_axis(tokens, best, axis=0)[0],
        jnp.take_along_axis(values, best, axis=0)[0],
    )
