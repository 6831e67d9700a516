"""Attention over the paged cache in plain XLA: what every kernel is tested against.

It also serves the CPU, so it walks the context in chunks with an online softmax (Milakov &
Gimelshein, arXiv:1805.02867) and stops at the longest context of the step: neither the width of
the block tables nor the size of the cache costs time.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

CHUNK_TOKENS = 128
"""Context tokens a pass gathers for each row; small enough to stay in a CPU's cache."""
TILE_TOKENS = 16
"""Query tokens of one request that share a gathered context in `ragged_attention`."""
_HIGHEST = lax.Precision.HIGHEST
_MASKED = -1e30
"""The score of a masked position: finite, so that a row without any context never makes a NaN."""


def decode_attention(
    q: Float[Array, "B N H"],
    kv: Float[Array, "PS 2 K H"],
    block_tables: Int[Array, "B W"],
    seq_lens: Int[Array, " B"],
    *,
    block_size: int,
    scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B N H"]:
    """Attention of one new token a request, at position seq_lens[b] - 1.

    Args:
        q: rotated queries; N is a multiple of K, and query heads b*N/K … belong to kv head b.
        kv: the cache; slot = block * block_size + offset; axis 1 holds key, then value.
        block_tables: the blocks of each request's context, in order.
        seq_lens: tokens in the cache, the new one included; 0 marks a padded request.
        scale: factor of q·k, usually 1/sqrt(H).
        sliding_window: tokens that a query sees, itself included; None is all.
        logit_soft_cap: scores become cap * tanh(score / cap).
        sinks: a logit a head that joins the softmax's denominator only.

    Returns:
        In q's dtype; rows of padded requests are zero.
    """
    first = seq_lens - 1
    out = _attend(
        q[:, None],
        kv,
        block_tables,
        first,
        seq_lens,
        block_size=block_size,
        scale=scale,
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
        sinks=sinks,
    )
    return out[:, 0]


def ragged_attention(
    q: Float[Array, "T N H"],
    kv: Float[Array, "PS 2 K H"],
    block_tables: Int[Array, "B W"],
    seq_lens: Int[Array, " B"],
    query_start: Int[Array, " B+1"],
    *,
    block_size: int,
    scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of any number of new tokens a request, in one packed row of tokens.

    Token j of request b has position seq_lens[b] - (query_start[b+1] - query_start[b]) + j and
    sees the positions up to its own. The other arguments are those of `decode_attention`.

    Args:
        query_start: tokens query_start[b] … query_start[b+1]-1 are b's.

    Returns:
        In q's dtype; rows of padded tokens are finite and mean nothing.
    """
    num_tokens, num_requests = q.shape[0], seq_lens.shape[0]
    query_lens = query_start[1:] - query_start[:-1]
    tiles_end = jnp.cumsum((query_lens + TILE_TOKENS - 1) // TILE_TOKENS)
    tiles_start = jnp.concatenate([jnp.zeros_like(tiles_end[:1]), tiles_end[:-1]])

    # Each request rounds up by less than one tile, so this many tiles always suffice.
    tile = jnp.arange(num_tokens // TILE_TOKENS + num_requests, dtype=jnp.int32)
    request = jnp.minimum(jnp.searchsorted(tiles_end, tile, side="right"), num_requests - 1)
    local = (tile - tiles_start[request]) * TILE_TOKENS  # first token, counted in its request
    used = tile < tiles_end[-1]
    first = jnp.where(used, seq_lens[request] - query_lens[request] + local, 0)
    stop = jnp.where(used, jnp.minimum(first + TILE_TOKENS, seq_lens[request]), 0)
    token = (query_start[request] + local)[:, None] + jnp.arange(TILE_TOKENS, dtype=jnp.int32)

    out = _attend(
        jnp.take(q, token, axis=0, mode="clip"),
        kv,
        block_tables[request],
        first,
        stop,
        block_size=block_size,
        scale=scale,
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
        sinks=sinks,
    )

    position = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.searchsorted(query_start[1:], position, side="right")
    owner = jnp.minimum(owner, num_requests - 1)
    row = tiles_start[owner] * TILE_TOKENS + position - query_start[owner]
    return jnp.take(out.reshape(-1, *q.shape[1:]), row, axis=0, mode="clip")


def _attend(
    q: Float[Array, "R M N H"],
    kv: Float[Array, "PS 2 K H"],
    block_tables: Int[Array, "R W"],
    first: Int[Array, " R"],
    stop: Int[Array, " R"],
    *,
    block_size: int,
    scale: float,
    sliding_window: int | None,
    logit_soft_cap: float | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "R M N H"]:
    """Rows of M consecutive queries from position first[r] on; the context ends before stop[r]."""
    rows, queries, heads, head_dim = q.shape
    kv_heads = kv.shape[2]
    group = heads // kv_heads
    blocks = kv.reshape(-1, block_size, 2, kv_heads, head_dim)
    chunk_blocks = max(1, min(CHUNK_TOKENS // block_size, block_tables.shape[1]))
    chunk = chunk_blocks * block_size

    window = sliding_window
    start_block = 0 * first if window is None else jnp.maximum(first - window + 1, 0) // block_size
    position = first[:, None] + jnp.arange(queries, dtype=jnp.int32)
    # Each kv head's queries together: [R, K, Q = M * G, H]
    split = (q.astype(jnp.float32) * scale).reshape(rows, queries, kv_heads, group, head_dim)
    grouped = jnp.moveaxis(split, 2, 1).reshape(rows, kv_heads, queries * group, head_dim)
    score, mix = _together(grouped) if queries == 1 else _by_kv_head(grouped)

    def gather(ids, which):
        # One indexing, not a slice first: that would copy half the cache.
        context = blocks.at[ids, :, which].get(mode="clip")
        return context.reshape(rows, chunk, kv_heads, head_dim).astype(jnp.float32)

    def step(i, carry):
        top, total, acc = carry
        index = start_block[:, None] + i * chunk_blocks + jnp.arange(chunk_blocks, dtype=jnp.int32)
        ids = jnp.take_along_axis(block_tables, index, axis=1, mode="clip")
        where = (start_block * block_size + i * chunk)[:, None] + jnp.arange(chunk, dtype=jnp.int32)
        owned = where < stop[:, None]
        seen = owned[:, None] & _visible(where, position, window)
        seen = jnp.repeat(seen, group, axis=1)[:, None]  # [R, 1, Q, C]

        scores = score(gather(ids, 0))
        if logit_soft_cap is not None:
            scores = logit_soft_cap * jnp.tanh(scores / logit_soft_cap)
        new_top = jnp.maximum(top, jnp.max(jnp.where(seen, scores, _MASKED), axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
        shrink = jnp.exp(top - new_top)
        # A stale slot may hold a NaN of another request, and zero weight times NaN is NaN.
        values = jnp.where(owned[:, :, None, None], gather(ids, 1), 0.0)
        acc = acc * shrink[..., None] + mix(weights, values)
        return new_top, total * shrink + jnp.sum(weights, axis=-1), acc

    top, total = _before_any_context(grouped.shape[:-1], sinks)
    trips = jnp.max((stop - start_block * block_size + chunk - 1) // chunk)
    _, total, acc = lax.fori_loop(0, trips, step, (top, total, jnp.zeros_like(grouped)))
    out = acc / jnp.maximum(total, 1e-30)[..., None]
    out = jnp.moveaxis(out.reshape(rows, kv_heads, queries, group, head_dim), 1, 2)
    return out.reshape(q.shape).astype(q.dtype)


def _visible(
    where: Int[Array, "R C"], position: Int[Array, "R M"], sliding_window: int | None
) -> Bool[Array, "R M C"]:
    """Which context positions each query may see."""
    context, query = where[:, None, :], position[:, :, None]
    if sliding_window is None:
        return context <= query
    return (context <= query) & (context > query - sliding_window)


def _before_any_context(
    shape: tuple[int, ...], sinks: Float[Array, " N"] | None
) -> tuple[Float[Array, "R K Q"], Float[Array, "R K Q"]]:
    """The running maximum and sum of the softmax; `shape` is (R, K, Q)."""
    if sinks is None:
        return jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    # As if each query had already seen one position with this logit and a value of zero.
    kv_heads, queries = shape[1:]
    by_group = sinks.astype(jnp.float32).reshape(kv_heads, -1)
    by_head = jnp.tile(by_group, (1, queries // by_group.shape[1]))
    return jnp.broadcast_to(by_head, shape), jnp.ones(shape, jnp.float32)


class _Products(NamedTuple):
    """The two matrix products of attention, for queries fixed beforehand."""

    score: Callable[[Float[Array, "R C K H"]], Float[Array, "R K Q C"]]
    mix: Callable[[Float[Array, "R K Q C"], Float[Array, "R C K H"]], Float[Array, "R K Q H"]]


def _by_kv_head(q: Float[Array, "R K Q H"]) -> _Products:
    """A product for each row and kv head."""

    def score(keys):
        return jnp.einsum("rkqh,rckh->rkqc", q, keys, precision=_HIGHEST)

    def mix(weights, values):
        return jnp.einsum("rkqc,rckh->rkqh", weights, values, precision=_HIGHEST)

    return _Products(score, mix)


def _together(q: Float[Array, "R K Q H"]) -> _Products:
    """One product a row: each query in the place of its kv head, zeros in the others'.

    It does K times the arithmetic, yet for the few queries of a decode step a CPU needs half the
    time of K small products, whose keys and values would have to be transposed first.
    """
    rows, kv_heads, queries, head_dim = q.shape
    own = jnp.eye(kv_heads, dtype=q.dtype)[:, None, :, None]
    spread = (q[:, :, :, None] * own).reshape(rows, kv_heads * queries, kv_heads * head_dim)

    # K and H are one axis here: XLA would transpose the keys to contract over two.
    def score(keys):
        keys = keys.reshape(rows, -1, kv_heads * head_dim)
        scores = jnp.einsum("rad,rcd->rac", spread, keys, precision=_HIGHEST)
        return scores.reshape(rows, kv_heads, queries, -1)

    def mix(weights, values):
        weights = weights.reshape(rows, kv_heads * queries, -1)
        values = values.reshape(rows, -1, kv_heads * head_dim)
        mixed = jnp.einsum("rac,rcd->rad", weights, values, precision=_HIGHEST)
        mixed = mixed.reshape(rows, kv_heads, queries, kv_heads, head_dim)
        return jnp.stack([mixed[:, k, :, k] for k in range(kv_heads)], axis=1)

    return _Products(score, mix)
