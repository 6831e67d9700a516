"""Paged attention through Mosaic GPU, for Hopper: prefill and mixed steps at the tensor cores'
speed. Decode has no Mosaic kernel: the Triton one is already at the memory limit."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.paged_attention import mosaic_ragged, query_tiles, triton_decode
from jaxllm.pallas_kernels.paged_attention.configs import MosaicConfig, mosaic_config
from jaxllm.pallas_kernels.paged_attention.softmax import Scoring


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
    config: MosaicConfig | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of packed tokens; see `reference.ragged_attention`.

    Requests with one query token go to the Triton decode kernel.

    Args:
        config: tile sizes; None takes the tuned ones.

    Raises:
        NotImplementedError: a head dim, block size, dtype or GPU that the kernel does not serve.
    """
    check_served(q, kv, block_size)
    # One token alone needs no merging; XLA would also fail to compile the merge of a single row.
    merge = seq_lens.shape[0] > 1
    if config is None:
        config = mosaic_config(q.shape[2], kv.dtype)
    scoring = Scoring(block_size, scale, sliding_window, logit_soft_cap)
    tiles, used = query_tiles.query_tiles(
        seq_lens,
        query_start,
        num_tokens=q.shape[0],
        tile_tokens=mosaic_ragged.TILE_TOKENS,
        align=mosaic_ragged.ALIGN,
        min_query_len=2 if merge else 1,
    )
    padded = jnp.pad(q, ((0, -q.shape[0] % mosaic_ragged.ALIGN), (0, 0), (0, 0)))
    out = mosaic_ragged.attend_tiles(
        padded,
        kv,
        block_tables,
        tiles,
        used,
        sinks,
        num_tokens=q.shape[0],
        scoring=scoring,
        config=config,
    )
    if not merge:
        return out
    return query_tiles.attend_single_tokens(
        out,
        q,
        seq_lens,
        query_start,
        lambda q, lens: triton_decode.decode_attention(
            q,
            kv,
            block_tables,
            lens,
            block_size=block_size,
            scale=scale,
            sliding_window=sliding_window,
            logit_soft_cap=logit_soft_cap,
            sinks=sinks,
        ),
    )


def check_served(q: jax.Array, kv: jax.Array, block_size: int) -> None:
    """Raises NotImplementedError, with the reason, for what the Mosaic kernel does not serve."""
    head_dim = q.shape[-1]
    if head_dim not in (64, 128, 256):
        raise NotImplementedError(f"head_dim {head_dim} is none of 64, 128, 256")
    if q.dtype != kv.dtype:
        raise NotImplementedError(f"queries in {q.dtype}, cache in {kv.dtype}")
    if kv.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"a cache in {kv.dtype}: wgmma takes 16-bit operands")
    if block_size & (block_size - 1) or block_size < 8:
        raise NotImplementedError(f"block_size {block_size} is no power of two from 8 on")
    if jax.default_backend() == "gpu":
        capability = str(getattr(jax.devices()[0], "compute_capability", ""))
        if not capability.startswith("9."):
            raise NotImplementedError(f"compute capability {capability}: wgmma is Hopper's")
