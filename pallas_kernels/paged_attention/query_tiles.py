"""Cuts the query tokens of a mixed step into tiles of one request each, longest context first."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

REQUEST, TOKEN, SKIP, ROWS, POSITION, SEQ_LEN = range(6)
"""Columns: the request; the tile's first row in q; its rows SKIP … ROWS-1 are the request's;
the position that its row 0 has or would have; the request's context length."""


@functools.partial(jax.jit, static_argnames=("num_tokens", "tile_tokens", "align", "min_query_len"))
def query_tiles(
    seq_lens: Int[Array, " B"],
    query_start: Int[Array, " B+1"],
    *,
    num_tokens: int,
    tile_tokens: int,
    align: int = 1,
    min_query_len: int = 1,
) -> tuple[Int[Array, "X 6"], Int[Array, " 1"]]:
    """The tiles of all requests with at least `min_query_len` tokens, and how many are used.

    Depends on the step alone, so XLA computes it once for all layers. The longest contexts come
    first, so that the last programs to start are short ones; unused tiles have 0 rows. The padded
    tokens make up one more request, with an empty context: a kernel fills its rows with zeros.

    Args:
        align: tiles start at multiples of this row of q, before their request's first token if
            need be; a power of two.
    """
    requests = seq_lens.shape[0]
    starts = query_start
    query_lens = jnp.append(query_start[1:], num_tokens) - starts
    contexts = jnp.append(seq_lens, 0)
    skips = starts & (align - 1)
    tiled = (query_lens >= min_query_len).at[requests].set(query_lens[requests] > 0)
    tiled_lens = jnp.where(tiled, skips + query_lens, 0)
    stop = jnp.cumsum((tiled_lens + tile_tokens - 1) // tile_tokens)
    # Each request rounds up by less than one tile, so this many tiles always suffice.
    most = (num_tokens + (align - 1) * (requests + 1)) // tile_tokens + requests + 1
    tile = jnp.arange(most, dtype=jnp.int32)
    request = jnp.sum(tile[:, None] >= stop[None, :], axis=1, dtype=jnp.int32)
    used = request <= requests
    request = jnp.minimum(request, requests)
    before = jnp.where(request > 0, stop[request - 1], 0)
    local = (tile - before) * tile_tokens - skips[request]  # row 0, counted in its request
    rows = jnp.where(used, jnp.minimum(query_lens[request] - local, tile_tokens), 0)
    position = contexts[request] - query_lens[request] + local
    position = jnp.where(request < requests, position, -rows)
    columns = (
        jnp.minimum(request, requests - 1),
        starts[request] + local,
        jnp.where(used, jnp.maximum(-local, 0), 0),
        rows,
        position,
        contexts[request],
    )
    last = jnp.where(used, position + rows, -1)
    _, *columns = lax.sort((-last, *columns), num_keys=1)
    return jnp.stack(columns, axis=1), stop[-1:]


def attend_single_tokens(
    out: Float[Array, "T N H"],
    q: Float[Array, "T N H"],
    seq_lens: Int[Array, " B"],
    query_start: Int[Array, " B+1"],
    decode: Callable[[Array, Array], Array],
) -> Float[Array, "T N H"]:
    """`out` with the rows of requests that have one query token set by `decode(q, seq_lens)`.

    A tile for one token would waste nearly all of its rows: a mixed step is mostly such requests.
    """
    single = query_start[1:] - query_start[:-1] == 1
    beyond = q.shape[0] + jnp.arange(seq_lens.shape[0], dtype=jnp.int32)
    row = jnp.where(single, query_start[:-1], beyond)
    rows = decode(jnp.take(q, row, axis=0, mode="clip"), jnp.where(single, seq_lens, 0))
    return out.at[row].set(rows, mode="drop", unique_indices=True)
