"""Decode attention as a Pallas Triton kernel: one program a (kv head, split, request).

A program holds the whole query group of a kv head and walks its share of the context in tiles,
gathered row by row through the block table. Splitting the context (Flash-Decoding) fills the GPU
when requests are few; the splits' partial softmaxes are merged by a second small kernel.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.paged_attention.configs import DecodeConfig, decode_config
from jaxllm.pallas_kernels.paged_attention.softmax import (
    LOG2E,
    NO_SCORE,
    Scoring,
    cdiv,
    power_of_two,
    slots_of,
    update,
)

_MIN_ROWS = 16
"""Rows of the smallest matrix instruction."""


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
    config: DecodeConfig | None = None,
    interpret: bool = False,
) -> Float[Array, "B N H"]:
    """Attention of one new token a request; see `reference.decode_attention`.

    Args:
        config: tile sizes; None takes the tuned ones.
        interpret: runs on the CPU, slowly.

    Raises:
        NotImplementedError: a head dim or dtype that the kernel does not serve.
    """
    check_served(q, kv)
    if config is None:
        context = block_tables.shape[1] * block_size
        config = decode_config(q.shape[0], kv.shape[2], q.shape[2], context, kv.dtype)
    scoring = Scoring(block_size, scale, sliding_window, logit_soft_cap)
    return _decode(q, kv, block_tables, seq_lens, sinks, scoring, config, interpret)


def check_served(q: jax.Array | jax.ShapeDtypeStruct, kv: jax.Array) -> None:
    """Raises NotImplementedError for shapes and dtypes that the Triton kernels do not serve."""
    if q.shape[-1] > 256:
        raise NotImplementedError(f"head_dim {q.shape[-1]} > 256")
    if q.shape[-1] % 8:
        raise NotImplementedError(f"head_dim {q.shape[-1]} is no multiple of 8")
    if q.dtype != kv.dtype:
        raise NotImplementedError(f"queries in {q.dtype}, cache in {kv.dtype}")
    if kv.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(f"a cache in {kv.dtype}")


@functools.partial(jax.jit, static_argnames=("scoring", "config", "interpret"))
def _decode(q, kv, block_tables, seq_lens, sinks, scoring, config, interpret):
    kv_heads, splits = kv.shape[2], config.num_splits
    inputs = (q, kv, block_tables, seq_lens)
    if splits == 1 and sinks is not None:
        inputs += (sinks,)
    out = pl.pallas_call(
        functools.partial(_decode_kernel, scoring=scoring, config=config),
        out_shape=attended_shapes(q, splits),
        grid=(kv_heads, splits, q.shape[0]),
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_decode_attention",
    )(*inputs)
    return out[0] if splits == 1 else combine(out, sinks, q, interpret)


def attended_shapes(q: Any, splits: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What the kernel writes for queries like `q` [B, N, H]: the output, or with several splits
    each one's accumulator, largest score and total."""
    if splits == 1:
        return (jax.ShapeDtypeStruct(q.shape, q.dtype),)
    each = (*q.shape[:2], splits)
    shapes = ((*each, q.shape[2]), each, each)
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


def combine(
    partials: Sequence[jax.Array],
    sinks: Float[Array, " N"] | None,
    q: Any,
    interpret: bool,
) -> Float[Array, "B N H"]:
    """Merges the splits' partial softmaxes, as `attended_shapes` has them."""
    requests, heads, _ = q.shape
    return pl.pallas_call(
        functools.partial(_combine_kernel, with_sinks=sinks is not None),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(heads, requests),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_decode_combine",
    )(*partials, *(() if sinks is None else (sinks,)))


def _decode_kernel(
    q_ref, kv_ref, tables_ref, lens_ref, *refs: Any, scoring: Scoring, config: DecodeConfig
):
    head_dim = q_ref.shape[2]
    tile = Tile(scoring, config, kv_heads=kv_ref.shape[2], heads=q_ref.shape[1], head_dim=head_dim)
    seq_len = lens_ref[tile.request]
    start, stop = tile.share(seq_len, seq_len)

    def attend():
        q = pltriton.load(
            q_ref.at[tile.request, tile.head[:, None], tile.col[None, :]],
            mask=tile.stored,
            other=0.0,
        )
        acc = jnp.zeros(tile.stored.shape, jnp.float32)
        top = jnp.full(tile.head.shape, NO_SCORE, jnp.float32)
        carry = (acc, top, jnp.zeros(tile.head.shape, jnp.float32))
        return tile.walk(q, kv_ref, tables_ref, start, stop, seq_len, seq_len, carry)

    tile.attend_and_store(attend, start < stop, refs)


class Tile:
    """What one program computes: a request's query group of one kv head, over a split."""

    def __init__(
        self, scoring: Scoring, config: DecodeConfig, *, kv_heads: int, heads: int, head_dim: int
    ) -> None:
        self.kv_head, self.split, self.request = (pl.program_id(axis) for axis in range(3))
        self.scoring, self.config, self.head_dim = scoring, config, head_dim
        group = heads // kv_heads
        rows = max(_MIN_ROWS, power_of_two(group))
        self.row, self.col = jnp.arange(rows), jnp.arange(power_of_two(head_dim))
        self.head = self.kv_head * group + self.row  # rows beyond the group are masked
        self.in_group = self.row < group
        self.stored = self.in_group[:, None] & (self.col[None, :] < head_dim)

    def first(self, seq_len: jax.Array) -> jax.Array:
        """The first position that the last one sees."""
        if self.scoring.sliding_window is None:
            return jnp.int32(0)
        return jnp.maximum(seq_len - self.scoring.sliding_window, 0)

    def share(self, seq_len: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The split's tiles of the positions seen before `end`: first and one past the last."""
        block_kv, splits = self.config.block_kv, self.config.num_splits
        first_tile = lax.div(self.first(seq_len), jnp.int32(block_kv))
        tiles = cdiv(end, block_kv) - first_tile
        share = cdiv(tiles, splits)
        start = first_tile + self.split * share
        return start, jnp.minimum(start + share, first_tile + tiles)

    def walk(self, q, kv_ref, tables_ref, start, stop, seq_len, end, carry):
        """The online softmax over the tiles from start to stop, as far as positions < end."""
        first, block_kv = self.first(seq_len), self.config.block_kv

        def step(tile, carry):
            position = tile * block_kv + jnp.arange(block_kv)
            seen = jnp.minimum(position, end - 1)
            slot = slots_of(tables_ref, self.request, seen, self.scoring.block_size)
            k = gather(kv_ref, slot, 0, self.kv_head, self.col, self.head_dim)
            scores = self.scoring.scores(q, k)
            visible = (position >= first) & (position < end)
            scores = jnp.where(visible[None, :], scores, -jnp.inf)
            v = gather(kv_ref, slot, 1, self.kv_head, self.col, self.head_dim)
            return update(carry, scores, v)

        return lax.fori_loop(start, stop, step, carry)

    def attend_and_store(self, attend, needed: jax.Array, refs: Any) -> None:
        """Writes what `attend` gives, (acc, top, total); nothing is there to attend to unless
        `needed`. `refs`: the sinks, if any and there is one split, then `attended_shapes`."""
        row = (self.request, self.head)
        if self.config.num_splits == 1:
            *sinks_ref, out_ref = refs
            acc, top, total = attend()
            if sinks_ref:
                sink = pltriton.load(sinks_ref[0].at[self.head], mask=self.in_group, other=0.0)
                acc, total = with_sink(acc, top, total, sink * LOG2E)
            out = (acc / jnp.maximum(total, 1e-30)[:, None]).astype(out_ref.dtype)
            place = out_ref.at[self.request, self.head[:, None], self.col[None, :]]
            pltriton.store(place, out, mask=self.stored)
            return
        acc_ref, top_ref, total_ref = refs

        @pl.when(needed)
        def _():
            acc, top, total = attend()
            place = acc_ref.at[self.request, self.head[:, None], self.split, self.col[None, :]]
            pltriton.store(place, acc, mask=self.stored)
            pltriton.store(top_ref.at[(*row, self.split)], top, mask=self.in_group)
            pltriton.store(total_ref.at[(*row, self.split)], total, mask=self.in_group)

        @pl.when(jnp.logical_not(needed))
        def _():
            nothing = jnp.zeros(self.head.shape, jnp.float32)
            pltriton.store(top_ref.at[(*row, self.split)], nothing + NO_SCORE, mask=self.in_group)
            pltriton.store(total_ref.at[(*row, self.split)], nothing, mask=self.in_group)


def gather(kv_ref, slot, which: int, kv_head, col, head_dim: int):
    """Keys (which 0) or values (1) of the slots, zero beyond head_dim: [C, power of two >= H]."""
    ref = kv_ref.at[slot[:, None], which, kv_head, col[None, :]]
    if head_dim == col.shape[0]:
        return pltriton.load(ref)
    mask = jnp.broadcast_to(col[None, :] < head_dim, (slot.shape[0], col.shape[0]))
    return pltriton.load(ref, mask=mask, other=0.0)


def with_sink(acc, top, total, sink):
    """acc and total once the softmax's denominator holds the sink; all in the base-2 domain."""
    new_top = jnp.maximum(top, sink)
    shrink = jnp.exp2(top - new_top)
    return acc * shrink[:, None], total * shrink + jnp.exp2(sink - new_top)


def _combine_kernel(acc_ref, top_ref, total_ref, *refs, with_sinks: bool):
    head, request = pl.program_id(0), pl.program_id(1)
    splits, head_dim = acc_ref.shape[2:]
    split, col = jnp.arange(power_of_two(splits)), jnp.arange(power_of_two(head_dim))
    exists = split < splits
    tops = pltriton.load(top_ref.at[request, head, split], mask=exists, other=NO_SCORE)
    totals = pltriton.load(total_ref.at[request, head, split], mask=exists, other=0.0)
    top = jnp.max(tops, axis=0)
    if with_sinks:
        sink = refs[0][head] * LOG2E
        top = jnp.maximum(top, sink)
    weight = jnp.exp2(tops - top)
    total = jnp.sum(totals * weight, axis=0)
    if with_sinks:
        total += jnp.exp2(sink - top)
    # Splits without tokens stored no accumulator: the mask keeps what lies there out.
    acc = pltriton.load(
        acc_ref.at[request, head, split[:, None], col[None, :]],
        mask=(totals > 0.0)[:, None] & (col[None, :] < head_dim),
        other=0.0,
    )
    out = jnp.sum(acc * weight[:, None], axis=0) / jnp.maximum(total, 1e-30)
    out_ref = refs[-1]
    pltriton.store(out_ref.at[request, head, col], out.astype(out_ref.dtype), mask=col < head_dim)
