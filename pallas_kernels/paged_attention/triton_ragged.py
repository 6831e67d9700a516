"""Ragged causal attention as a Pallas Triton kernel: chunked prefill and mixed steps on any GPU.

A program holds a tile of query tokens of one request with the whole query group of one kv head,
and walks that request's context. Requests with one query token go to the decode kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.paged_attention import query_tiles, triton_decode
from jaxllm.pallas_kernels.paged_attention.configs import RaggedConfig, ragged_config
from jaxllm.pallas_kernels.paged_attention.softmax import (
    LOG2E,
    NO_SCORE,
    Scoring,
    cdiv,
    power_of_two,
    slots_of,
    update,
)


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
    config: RaggedConfig | None = None,
    interpret: bool = False,
) -> Float[Array, "T N H"]:
    """Causal attention of packed tokens; see `reference.ragged_attention`.

    Args:
        config: tile sizes; None takes the tuned ones.
        interpret: runs on the CPU, slowly.

    Raises:
        NotImplementedError: a head dim or dtype that the kernel does not serve.
    """
    triton_decode.check_served(q, kv)
    if config is None:
        config = ragged_config(q.shape[2], kv.dtype)
    scoring = Scoring(block_size, scale, sliding_window, logit_soft_cap)
    group = q.shape[1] // kv.shape[2]
    tiles, _ = query_tiles.query_tiles(
        seq_lens,
        query_start,
        num_tokens=q.shape[0],
        tile_tokens=max(config.block_q // group, 1),
        min_query_len=2 if seq_lens.shape[0] > 1 else 1,
    )
    out = _attend(q, kv, block_tables, tiles, sinks, scoring, config, interpret)
    if seq_lens.shape[0] == 1:
        return out
    options = {
        "block_size": block_size,
        "scale": scale,
        "sliding_window": sliding_window,
        "logit_soft_cap": logit_soft_cap,
        "sinks": sinks,
        "interpret": interpret,
    }
    return query_tiles.attend_single_tokens(
        out,
        q,
        seq_lens,
        query_start,
        lambda q, lens: triton_decode.decode_attention(q, kv, block_tables, lens, **options),
    )


@functools.partial(jax.jit, static_argnames=("scoring", "config", "interpret"))
def _attend(q, kv, block_tables, tiles, sinks, scoring, config, interpret):
    return pl.pallas_call(
        functools.partial(_kernel, scoring=scoring, config=config),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(kv.shape[2], tiles.shape[0]),
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="ragged_paged_attention",
    )(q, kv, block_tables, tiles, *(() if sinks is None else (sinks,)))


def _kernel(
    q_ref, kv_ref, tables_ref, tiles_ref, *refs: Any, scoring: Scoring, config: RaggedConfig
):
    kv_head, tile = pl.program_id(0), pl.program_id(1)
    heads, head_dim = q_ref.shape[1:]
    group = heads // kv_ref.shape[2]
    *sinks_ref, out_ref = refs
    tokens = max(config.block_q // group, 1)
    num_rows = max(config.block_q, power_of_two(group))

    request = tiles_ref[tile, query_tiles.REQUEST]
    first_token = tiles_ref[tile, query_tiles.TOKEN]
    rows = tiles_ref[tile, query_tiles.ROWS]
    position = tiles_ref[tile, query_tiles.POSITION]

    row, col = jnp.arange(num_rows), jnp.arange(power_of_two(head_dim))
    token = lax.div(row, jnp.full_like(row, group))
    head = kv_head * group + row - token * group
    stored = (token < jnp.minimum(rows, tokens))[:, None] & (col[None, :] < head_dim)
    index = ((first_token + token)[:, None], head[:, None], col[None, :])

    @pl.when(rows > 0)
    def _():
        q = pltriton.load(q_ref.at[index], mask=stored, other=0.0)
        q_at = position + token
        last = jnp.maximum(position + rows - 1, 0)

        def step(tile, carry, *, masked: bool):
            kv_at = tile * config.block_kv + jnp.arange(config.block_kv)
            slot = slots_of(tables_ref, request, jnp.minimum(kv_at, last), scoring.block_size)
            k = triton_decode.gather(kv_ref, slot, 0, kv_head, col, head_dim)
            scores = scoring.scores(q, k)
            if masked:
                seen = kv_at[None, :] <= q_at[:, None]
                if scoring.sliding_window is not None:
                    seen &= kv_at[None, :] > q_at[:, None] - scoring.sliding_window
                scores = jnp.where(seen, scores, -jnp.inf)
            v = triton_decode.gather(kv_ref, slot, 1, kv_head, col, head_dim)
            return update(carry, scores, v)

        acc = jnp.zeros((num_rows, col.shape[0]), jnp.float32)
        top = jnp.full((num_rows,), NO_SCORE, jnp.float32)
        carry = (acc, top, jnp.zeros((num_rows,), jnp.float32))
        stop = cdiv(position + rows, config.block_kv)
        start = jnp.int32(0)
        if scoring.sliding_window is None:
            clear_stop = lax.div(jnp.maximum(position + 1, 0), jnp.int32(config.block_kv))
            unmasked = functools.partial(step, masked=False)
            carry = lax.fori_loop(start, clear_stop, unmasked, carry)
            start = clear_stop
        else:
            seen = jnp.maximum(position - (scoring.sliding_window - 1), 0)
            start = lax.div(seen, jnp.int32(config.block_kv))
        masked = functools.partial(step, masked=True)
        acc, top, total = lax.fori_loop(start, stop, masked, carry)
        if sinks_ref:
            sink = pltriton.load(sinks_ref[0].at[head], mask=token < tokens, other=0.0) * LOG2E
            acc, total = triton_decode.with_sink(acc, top, total, sink)
        out = acc / jnp.maximum(total, 1e-30)[:, None]
        pltriton.store(out_ref.at[index], out.astype(out_ref.dtype), mask=stored)
