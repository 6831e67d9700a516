"""Logits whose vocabulary is shared out over the mesh axis tp."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxllm.runner.choice import token_logprobs
from jaxllm.runner.mesh import TP_AXIS


def share_rows(
    function: Callable[[jax.Array, Any], Int[Array, "R C"]],
    logits: Float[Array, "n B width"],
    fields: Any,
    vocab_size: int,
) -> Int[Array, "B C"]:
    """`function` of whole rows of logits, each device doing its share of the rows.

    Inside shard_map only. One exchange turns a share of the vocabulary of all rows into all of
    the vocabulary for a share of the rows, R: a device receives B/tp * V logits, as many as it
    had (16 MB of 256 rows of a 128k vocabulary over 8 devices), where gathering
    them would bring B * V; and it works on that share alone. Thresholds found where the logits
    are would need a sum over devices for each of 64 bits, about 10 us each on NVLink, and add
    up in another order. So a row is reduced as on one device, and gives the same token.

    Args:
        function: (logits [n, R, V], fields of R rows) -> result. Rows there may be beyond B,
            zeros, whose results are dropped.
        logits: this device's part of the vocabulary, of n kinds.
        fields: a tree of arrays [B].
        vocab_size: V, without the padding.
    """
    size = logits.shape[1]
    devices = lax.axis_size(TP_AXIS)
    share = -(-size // devices)
    missing = share * devices - size
    logits = jnp.pad(logits, ((0, 0), (0, missing), (0, 0)))
    whole = lax.all_to_all(logits, TP_AXIS, split_axis=1, concat_axis=2, tiled=True)
    start = lax.axis_index(TP_AXIS) * share

    def own(field: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(jnp.pad(field, (0, missing)), start, share)

    result = function(whole[:, :, :vocab_size], jax.tree.map(own, fields))
    return lax.all_gather(result, TP_AXIS, tiled=True)[:size]


def shared_logprobs(
    logits: Float[Array, "B padded"],
    tokens: Int[Array, "B"],
    max_logprobs: int,
    mesh: Mesh,
    vocab_size: int,
) -> Int[Array, "B C"]:
    """`choice.token_logprobs` of logits shared out over `mesh`."""

    def run(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        return share_rows(
            lambda whole, own: token_logprobs(whole[0], own, max_logprobs),
            logits[None],
            tokens,
            vocab_size,
        )

    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(PartitionSpec(None, TP_AXIS), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(logits, tokens)


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
