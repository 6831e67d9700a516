"""Decode attention as a Pallas Triton kernel: one program a (kv head, split, request).

A program holds the whole query group of a kv head and walks its share of the context in tiles,
gathered row by row through the block table. Splitting the context (Flash-Decoding) fills the GPU
when requests are few; the splits' partial softmaxes are merged by a second small kernel.
"""

import functools
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


def check_served(q: jax.Array, kv: jax.Array) -> None:
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
    requests, heads, head_dim = q.shape
    kv_heads, splits = kv.shape[2], config.num_splits
    partial_shapes = (
        jax.ShapeDtypeStruct((requests, heads, splits, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((requests, heads, splits), jnp.float32),
        jax.ShapeDtypeStruct((requests, heads, splits), jnp.float32),
    )
    kernel = functools.partial(_decode_kernel, scoring=scoring, config=config)
    inputs = (q, kv, block_tables, seq_lens)
    if splits == 1 and sinks is not None:
        inputs += (sinks,)
    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype) if splits == 1 else partial_shapes,
        grid=(kv_heads, splits, requests),
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_decode_attention",
    )(*inputs)
    if splits == 1:
        return out
    return pl.pallas_call(
        functools.partial(_combine_kernel, with_sinks=sinks is not None),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(heads, requests),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_decode_combine",
    )(*out, *(() if sinks is None else (sinks,)))


def _decode_kernel(
    q_ref, kv_ref, tables_ref, lens_ref, *refs: Any, scoring: Scoring, config: DecodeConfig
):
    kv_head, split, request = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    heads, head_dim = q_ref.shape[1:]
    group = heads // kv_ref.shape[2]
    rows = max(_MIN_ROWS, power_of_two(group))
    row, col = jnp.arange(rows), jnp.arange(power_of_two(head_dim))
    head = kv_head * group + row  # rows beyond the group are masked

    seq_len = lens_ref[request]
    first = jnp.int32(0)
    if scoring.sliding_window is not None:
        first = jnp.maximum(seq_len - scoring.sliding_window, 0)
    first_tile = lax.div(first, jnp.int32(config.block_kv))
    tiles = cdiv(seq_len, config.block_kv) - first_tile
    share = cdiv(tiles, config.num_splits)
    start = first_tile + split * share
    stop = jnp.minimum(start + share, first_tile + tiles)

    def attend():
        q = pltriton.load(
            q_ref.at[request, head[:, None], col[None, :]],
            mask=(row[:, None] < group) & (col[None, :] < head_dim),
            other=0.0,
        )

        def step(tile, carry):
            position = tile * config.block_kv + jnp.arange(config.block_kv)
            slot = slots_of(
                tables_ref, request, jnp.minimum(position, seq_len - 1), scoring.block_size
            )
            k = gather(kv_ref, slot, 0, kv_head, col, head_dim)
            scores = scoring.scores(q, k)
            seen = (position >= first) & (position < seq_len)
            scores = jnp.where(seen[None, :], scores, -jnp.inf)
            return update(carry, scores, gather(kv_ref, slot, 1, kv_head, col, head_dim))

        acc = jnp.zeros((rows, col.shape[0]), jnp.float32)
        top = jnp.full((rows,), NO_SCORE, jnp.float32)
        return lax.fori_loop(start, stop, step, (acc, top, jnp.zeros((rows,), jnp.float32)))

    in_group = row < group
    stored = in_group[:, None] & (col[None, :] < head_dim)
    if config.num_splits == 1:
        *sinks_ref, out_ref = refs
        acc, top, total = attend()
        if sinks_ref:
            sink = pltriton.load(sinks_ref[0].at[head], mask=in_group, other=0.0) * LOG2E
            acc, total = with_sink(acc, top, total, sink)
        out = acc / jnp.maximum(total, 1e-30)[:, None]
        pltriton.store(
            out_ref.at[request, head[:, None], col[None, :]], out.astype(out_ref.dtype), mask=stored
        )
        return

    acc_ref, top_ref, total_ref = refs

    @pl.when(start < stop)
    def _():
        acc, top, total = attend()
        pltriton.store(acc_ref.at[request, head[:, None], split, col[None, :]], acc, mask=stored)
        pltriton.store(top_ref.at[request, head, split], top, mask=in_group)
        pltriton.store(total_ref.at[request, head, split], total, mask=in_group)

    @pl.when(start >= stop)
    def _():
        nothing = jnp.zeros((rows,), jnp.float32)
        pltriton.store(top_ref.at[request, head, split], nothing + NO_SCORE, mask=in_group)
        pltriton.store(total_ref.at[request, head, split], nothing, mask=in_group)


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
