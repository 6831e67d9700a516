"""Ragged causal attention for Hopper: wgmma, TMA and specialised warpgroups, through Mosaic GPU.

The schedule is FlashAttention-3's (arXiv:2407.08608): two compute warpgroups take 64 query tokens
of one head each and alternate between the tensor cores and their softmax; a third one only copies.
Each cache block is one TMA copy; as many as fit make up a tile of keys or values. The grid is
persistent: a program works through tiles of decreasing length, and the copies for the next tile
start while the last one is still being computed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.pallas_kernels.paged_attention import query_tiles
from jaxllm.pallas_kernels.paged_attention.configs import MosaicConfig
from jaxllm.pallas_kernels.paged_attention.softmax import LOG2E, NO_SCORE, Scoring, cdiv

WG_ROWS = 64
"""Query tokens a warpgroup: the rows of one wgmma."""
TILE_TOKENS = 2 * WG_ROWS
ALIGN = 8
"""A swizzled TMA copy starts at multiples of so many rows."""
_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


@functools.partial(jax.jit, static_argnames=("num_tokens", "scoring", "config"))
def attend_tiles(
    q, kv, block_tables, tiles, used, sinks, *, num_tokens: int, scoring: Scoring, config
):
    """Attention of the tiles' query tokens; rows of q outside all tiles stay unwritten.

    Args:
        q: [T, N, H], T rounded up to a multiple of ALIGN; kv: [P*S, 2, K, H] of the same dtype.
        tiles: i32[X, 6] and used i32[1], from `query_tiles` with TILE_TOKENS and ALIGN.
        sinks: f32[N] or None.
        num_tokens: T.
    """
    _, heads, head_dim = q.shape
    programs = config.num_programs or tiles.shape[0] * heads
    transforms = (
        plgpu.TilingTransform((ALIGN, 64)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    kv_scratch = plgpu.SMEM(
        (config.num_stages, config.block_kv, head_dim), q.dtype, transforms=transforms
    )
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            scoring=scoring,
            config=config,
            programs=programs,
            with_sinks=sinks is not None,
        ),
        out_type=jax.ShapeDtypeStruct((num_tokens, heads, head_dim), q.dtype),
        scratch_types={
            "q_smem": plgpu.SMEM((2, WG_ROWS, head_dim), q.dtype, transforms=transforms),
            "k_smem": kv_scratch,
            "v_smem": kv_scratch,
            "out_smem": plgpu.SMEM((2, WG_ROWS, min(head_dim, 128)), q.dtype),
            "q_full": plgpu.Barrier(num_barriers=2),
            "q_free": plgpu.Barrier(num_barriers=2),
            "kv_full": (
                plgpu.Barrier(
                    num_arrivals=_copies(scoring, config), num_barriers=config.num_stages
                ),
            )
            * 2,
            "kv_free": (plgpu.Barrier(num_arrivals=2, num_barriers=config.num_stages),) * 2,
            "turn": plgpu.Barrier(num_arrivals=2),
        },
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="ragged_paged_attention",
    )
    flat_kv = kv.reshape(kv.shape[0], 2 * kv.shape[2], head_dim)
    inputs = (q, flat_kv, block_tables, tiles, used)
    return kernel(*inputs, *(() if sinks is None else (sinks,)))


def _copies(scoring: Scoring, config: MosaicConfig) -> int:
    """Copies that fill one tile of keys: one a block, or one for part of a larger block."""
    return config.block_kv // min(scoring.block_size, config.block_kv)


def _kernel(
    q_ref,
    kv_ref,
    tables_ref,
    tiles_ref,
    used_ref,
    *refs: Any,
    scoring: Scoring,
    config: MosaicConfig,
    programs: int,
    with_sinks: bool,
    q_smem,
    k_smem,
    v_smem,
    out_smem,
    q_full,
    q_free,
    kv_full,
    kv_free,
    turn,
):
    sinks_ref, out_ref = refs if with_sinks else (None, *refs)
    heads, head_dim = q_ref.shape[1:]
    kv_heads = kv_ref.shape[1] // 2
    block_kv, stages = config.block_kv, config.num_stages
    wg, program = lax.axis_index("wg"), lax.axis_index("program")
    items = used_ref[0] * heads
    rounds = cdiv(items, programs)

    def work(turn_of_loop):
        """The program's next item: head, column reader, and its range of kv tiles."""
        # Every other round backwards: else the first program would get the longest of each.
        forward = lax.rem(turn_of_loop, jnp.int32(2)) == 0
        lane = jnp.where(forward, program, programs - 1 - program)
        item = turn_of_loop * programs + lane
        exists = item < items
        item = jnp.where(exists, item, 0)
        tile = lax.div(item, jnp.int32(heads))
        head = item - tile * heads
        rows = jnp.where(exists, tiles_ref[tile, query_tiles.ROWS], 0)
        position = tiles_ref[tile, query_tiles.POSITION]
        start = jnp.int32(0)
        if scoring.sliding_window is not None:
            seen = jnp.maximum(position - (scoring.sliding_window - 1), 0)
            start = lax.div(seen, jnp.int32(block_kv))
        stop = jnp.where(rows > 0, cdiv(position + rows, block_kv), start)
        return tile, head, rows, position, start, stop

    def take_turn():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    @pl.when(wg < 2)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        for slot in range(stages):
            plgpu.barrier_arrive(kv_free[0].at[slot])
            plgpu.barrier_arrive(kv_free[1].at[slot])
        plgpu.barrier_arrive(q_free.at[wg])
        pl.when(wg == 1)(take_turn)

        def one_item(turn_of_loop, steps):
            tile, head, rows, position, start, stop = work(turn_of_loop)
            seq_len = tiles_ref[tile, query_tiles.SEQ_LEN]
            token = tiles_ref[tile, query_tiles.TOKEN] + wg * WG_ROWS
            skip = jnp.clip(tiles_ref[tile, query_tiles.SKIP] - wg * WG_ROWS, 0, WG_ROWS)
            wg_rows = jnp.clip(rows - wg * WG_ROWS, 0, WG_ROWS)
            q_base = position + wg * WG_ROWS
            wg_stop = jnp.where(wg_rows > 0, cdiv(q_base + wg_rows, block_kv), start)
            clear = lax.div(jnp.maximum(q_base + 1, 0), jnp.int32(block_kv))
            clear_stop = jnp.minimum(clear, wg_stop)
            if scoring.sliding_window is not None:
                clear_stop = start

            @pl.when(stop > start)
            def _():
                plgpu.barrier_wait(q_full.at[wg])

            sink = NO_SCORE if sinks_ref is None else sinks_ref[head] * LOG2E
            top = plgpu.layout_cast(jnp.full((WG_ROWS,), sink, jnp.float32), _ROW)
            total = jnp.full((WG_ROWS,), 0.0 if sinks_ref is None else 1.0, jnp.float32)
            total = plgpu.layout_cast(total, _ROW)
            acc = plgpu.layout_cast(jnp.zeros((WG_ROWS, head_dim), jnp.float32), _WGMMA)

            def step(ki, carry, *, masked: bool):
                acc, top, total = carry
                slot = lax.rem(steps + ki - start, jnp.int32(stages))
                plgpu.barrier_wait(kv_full[0].at[slot])

                def q_times_k(acc_ref):
                    plgpu.wgmma(acc_ref, q_smem.at[wg], k_smem.at[slot].transpose((1, 0)))
                    take_turn()
                    return acc_ref[...]

                s = pl.run_scoped(q_times_k, plgpu.ACC((WG_ROWS, block_kv), jnp.float32))
                plgpu.barrier_arrive(kv_free[0].at[slot])
                factor = scoring.scale * LOG2E
                if scoring.logit_soft_cap is not None:
                    s = jnp.tanh(s * (scoring.scale / scoring.logit_soft_cap))
                    factor = scoring.logit_soft_cap * LOG2E
                if masked:
                    shape = (WG_ROWS, block_kv)
                    q_at = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA) + q_base
                    kv_at = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_WGMMA)
                    kv_at += ki * block_kv
                    seen = q_at >= kv_at
                    if scoring.sliding_window is not None:
                        seen &= q_at < kv_at + scoring.sliding_window
                    s = jnp.where(seen, s, -jnp.inf)
                new_top = jnp.maximum(top, s.max(axis=1) * factor)
                shrink = jnp.exp2(top - new_top)
                p = jnp.exp2(s * factor - lax.broadcast_in_dim(new_top, s.shape, [0]))
                acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
                p_half = p.astype(q_ref.dtype)
                total = total * shrink + p.sum(axis=1)
                acc, total, new_top, p_half = lax.optimization_barrier(
                    (acc, total, new_top, p_half)
                )
                plgpu.barrier_arrive(turn)  # the softmax is done
                plgpu.barrier_wait(kv_full[1].at[slot])
                if masked:
                    _clear_unwritten(v_smem.at[slot], ki * block_kv, seq_len)
                plgpu.barrier_wait(turn)  # the tensor cores are free

                acc = _add_product(acc, p_half, v_smem.at[slot])
                plgpu.barrier_arrive(kv_free[1].at[slot])
                return acc, new_top, total

            def pass_by(ki, _):
                # The other warpgroup needs this tile still: keep the copies and turns going.
                slot = lax.rem(steps + ki - start, jnp.int32(stages))
                plgpu.barrier_wait(kv_full[0].at[slot])
                plgpu.barrier_arrive(kv_free[0].at[slot])
                take_turn()
                plgpu.barrier_wait(kv_full[1].at[slot])
                plgpu.barrier_arrive(kv_free[1].at[slot])
                take_turn()

            carry = (acc, top, total)
            if scoring.sliding_window is None:
                unmasked = functools.partial(step, masked=False)
                carry = lax.fori_loop(start, clear_stop, unmasked, carry)
            masked = functools.partial(step, masked=True)
            carry = lax.fori_loop(clear_stop, wg_stop, masked, carry)
            lax.fori_loop(wg_stop, stop, pass_by, None)

            @pl.when(stop > start)
            def _():
                plgpu.barrier_arrive(q_free.at[wg])

            acc, _, total = carry
            acc /= lax.broadcast_in_dim(jnp.maximum(total, 1e-30), acc.shape, [0])
            width = out_smem.shape[2]
            for column in range(0, head_dim, width):
                part = acc if width == head_dim else acc[:, column : column + width]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem[wg] = part.astype(out_ref.dtype)
                plgpu.commit_smem()
                columns = out_ref.at[:, head, pl.ds(column, width)]
                _store_rows(out_smem.at[wg], columns, token, skip, wg_rows)
            return steps + stop - start

        lax.fori_loop(0, rounds, one_item, jnp.int32(0))
        pl.when(wg == 0)(take_turn)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == 2)
    def _copy():
        plgpu.set_max_registers(40, action="decrease")
        chunk = min(scoring.block_size, block_kv)
        copies = _copies(scoring, config)

        def one_item(turn_of_loop, steps):
            tile, head, rows, position, start, stop = work(turn_of_loop)
            request = tiles_ref[tile, query_tiles.REQUEST]
            token = pl.multiple_of(tiles_ref[tile, query_tiles.TOKEN], ALIGN)
            kv_head = lax.div(head, jnp.int32(heads // kv_heads))
            last_block = lax.div(position + rows - 1, jnp.int32(scoring.block_size))

            def copy_queries(i):
                plgpu.barrier_wait(q_free.at[i])
                plgpu.copy_gmem_to_smem(
                    q_ref.at[pl.ds(token + i * WG_ROWS, WG_ROWS), head],
                    q_smem.at[i],
                    q_full.at[i],
                )

            pl.when(stop > start)(functools.partial(copy_queries, 0))

            def copy_tile(ki, _):
                slot = lax.rem(steps + ki - start, jnp.int32(stages))
                rows_at = []
                for c in range(copies):
                    at = ki * block_kv + c * chunk
                    block = lax.div(at, jnp.int32(scoring.block_size))
                    offset = at - block * scoring.block_size
                    # Beyond the context: any block will do, its scores are masked.
                    block = tables_ref[request, jnp.minimum(block, last_block)]
                    rows_at.append(pl.multiple_of(block * scoring.block_size + offset, chunk))
                for which, smem in enumerate((k_smem, v_smem)):
                    if which == 1:
                        # Only now: the second warpgroup frees its queries after the first one has
                        # taken its turn with the first keys of this item.
                        pl.when(ki == start)(functools.partial(copy_queries, 1))
                    plgpu.barrier_wait(kv_free[which].at[slot])
                    for c, row in enumerate(rows_at):
                        plgpu.copy_gmem_to_smem(
                            kv_ref.at[pl.ds(row, chunk), kv_head + which * kv_heads],
                            smem.at[slot, pl.ds(c * chunk, chunk)],
                            kv_full[which].at[slot],
                        )

            lax.fori_loop(start, stop, copy_tile, None)
            return steps + stop - start

        lax.fori_loop(0, rounds, one_item, jnp.int32(0))
        # Sees the last arrivals, so that every completed phase of a barrier has been waited for.
        for slot in range(stages):
            plgpu.barrier_wait(kv_free[0].at[slot])
            plgpu.barrier_wait(kv_free[1].at[slot])
        for i in range(2):
            plgpu.barrier_wait(q_free.at[i])


def _add_product(acc, a, b_smem):
    """acc + a @ b on the tensor cores; apart, because Pallas' interpreter does not know it."""

    def add(acc_ref):
        plgpu.wgmma(acc_ref, a, b_smem)

    return pl.run_state(add)(plgpu.ACC.init(acc))


def _clear_unwritten(v_smem, base, seq_len):
    """Zeroes values beyond the context: their weight is 0, but 0 times an old NaN is NaN."""
    for first in range(0, v_smem.shape[0], WG_ROWS):

        @pl.when(base + first + WG_ROWS > seq_len)
        def _(first=first):
            part = v_smem.at[pl.ds(first, WG_ROWS)]
            v = plgpu.load(part, layout=_WGMMA)
            at = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=_WGMMA) + (base + first)
            part[...] = jnp.where(at < seq_len, v, jnp.zeros_like(v))
            plgpu.commit_smem()


def _store_rows(smem, out_ref, token, start, stop):
    """Copies rows start … stop-1 of a warpgroup's tile out; a copy's size is static, hence the
    powers of two."""
    count = jnp.maximum(stop - start, 0)
    size = WG_ROWS
    while size:

        @pl.when((count & size) != 0)
        def _(start=start, size=size):
            plgpu.copy_smem_to_gmem(
                smem.at[pl.ds(start, size)], out_ref.at[pl.ds(token + start, size)]
            )

        start += count & size
        size //= 2
