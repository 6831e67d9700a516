"""One Pallas Triton kernel: rotation and cache write within the attention of the new token.

Every program rotates its query group itself. The new token's key and value come from the
projection and open the online softmax of the first split, which also writes them to the cache;
all splits walk the positions before it. So no program reads what another one writes.
"""

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.paged_attention import triton_decode as attention
from jaxllm.pallas_kernels.paged_attention.api import AttentionOptions
from jaxllm.pallas_kernels.paged_attention.configs import DecodeConfig, decode_config
from jaxllm.pallas_kernels.paged_attention.softmax import NO_SCORE, Scoring, slots_of
from jaxllm.pallas_kernels.paged_attention.triton_decode import Tile
from jaxllm.pallas_kernels.rope_kv_write import triton as rope_kv_write
from jaxllm.pallas_kernels.rope_kv_write.reference import HeadRotation


def rotate_write_attend(
    qkv: Float[Array, "B K R H"],
    rotation: HeadRotation,
    kv: Float[Array, "PS 2 K H"],
    block_tables: Int[Array, "B W"],
    seq_lens: Int[Array, " B"],
    *,
    config: DecodeConfig | None = None,
    interpret: bool = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Float[Array, "B N H"], Float[Array, "PS 2 K H"]]:
    """See `reference.rotate_write_attend`; the slot is that of position seq_lens - 1.

    Args:
        config: tile sizes; None takes the decode kernel's.
        interpret: runs on the CPU, slowly.

    Raises:
        NotImplementedError: a head dim or dtype that the kernel does not serve, or a rotation of
            less than the whole head.
    """
    requests, kv_heads, _, head_dim = qkv.shape
    attention.check_served(qkv, kv)
    rope_kv_write.check_served(qkv, rotation)
    if config is None:
        context = block_tables.shape[1] * options["block_size"]
        config = decode_config(requests, kv_heads, head_dim, context, kv.dtype)
    scoring = Scoring(
        options["block_size"],
        options["scale"],
        options.get("sliding_window"),
        options.get("logit_soft_cap"),
    )
    arrays = (qkv, rotation, kv, block_tables, seq_lens, options.get("sinks"))
    return _call(*arrays, scoring, config, interpret)


@functools.partial(jax.jit, static_argnames=("scoring", "config", "interpret"))
def _call(qkv, rotation, kv, block_tables, seq_lens, sinks, scoring, config, interpret):
    requests, kv_heads, rows, head_dim = qkv.shape
    splits, weights = config.num_splits, rope_kv_write.norm_weights(rotation)
    q = jax.ShapeDtypeStruct((requests, kv_heads * (rows - 2), head_dim), qkv.dtype)
    inputs = (kv, qkv, rotation.cos, rotation.sin, block_tables, seq_lens, *weights)
    if splits == 1 and sinks is not None:
        inputs += (sinks,)
    eps = rotation.eps if weights else None
    kv, *out = pl.pallas_call(
        functools.partial(_kernel, scoring=scoring, config=config, eps=eps),
        out_shape=(
            jax.ShapeDtypeStruct(kv.shape, kv.dtype),
            *attention.attended_shapes(q, splits),
        ),
        grid=(kv_heads, splits, requests),
        input_output_aliases={0: 0},
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="rope_decode_attention",
    )(*inputs)
    return out[0] if splits == 1 else attention.combine(out, sinks, q, interpret), kv


def _kernel(
    _,
    qkv_ref,
    cos_ref,
    sin_ref,
    tables_ref,
    lens_ref,
    *refs: Any,
    scoring: Scoring,
    config: DecodeConfig,
    eps: float | None,
):
    weights, refs = (refs[:2], refs[2:]) if eps is not None else ((None, None), refs)
    written = 1 if config.num_splits == 1 else 3
    *sinks_ref, kv_ref = refs[: len(refs) - written]
    _, kv_heads, rows, head_dim = qkv_ref.shape
    heads = kv_heads * (rows - 2)
    tile = Tile(scoring, config, kv_heads=kv_heads, heads=heads, head_dim=head_dim)
    turn = _Turn(tile, qkv_ref, cos_ref, sin_ref, eps)
    seq_len = lens_ref[tile.request]
    past = jnp.maximum(seq_len - 1, 0)
    start, stop = tile.share(seq_len, past)
    is_first = (tile.split == 0) & (seq_len > 0)

    def attend():
        q = turn(tile.row[:, None], weights[0], tile.stored)
        k, v = turn.new_key_and_value(weights[1])
        slot = slots_of(tables_ref, tile.request, past, scoring.block_size)
        for which, row in enumerate((k, v)):
            place = kv_ref.at[slot, which, tile.kv_head, tile.col]
            pltriton.store(place, row.astype(kv_ref.dtype), mask=(tile.col < head_dim) & is_first)
        # The new token alone: its score is the largest, its weight 1.
        product = jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32)[None, :], axis=1)
        acc = jnp.zeros(tile.stored.shape, jnp.float32) + v.astype(jnp.float32)[None, :]
        carry = (
            jnp.where(is_first, acc, 0.0),
            jnp.where(is_first, scoring.of(product), NO_SCORE),
            jnp.where(is_first, jnp.full(tile.head.shape, 1.0, jnp.float32), 0.0),
        )
        return tile.walk(q, kv_ref, tables_ref, start, stop, seq_len, past, carry)

    tile.attend_and_store(attend, is_first | (start < stop), (*sinks_ref, *refs[-written:]))


class _Turn:
    """Rows of one request's projection, normalized and rotated."""

    def __init__(self, tile: Tile, qkv_ref, cos_ref, sin_ref, eps: float | None) -> None:
        half = tile.head_dim // 2
        self.tile, self.qkv_ref, self.eps = tile, qkv_ref, eps
        in_first = tile.col < half
        self.partner = jnp.where(in_first, tile.col + half, tile.col - half)
        angle = jnp.where(in_first, tile.col, tile.col - half)
        real = tile.col < tile.head_dim
        self.cos = pltriton.load(cos_ref.at[tile.request, angle], mask=real, other=0.0)
        sin = pltriton.load(sin_ref.at[tile.request, angle], mask=real, other=0.0)
        self.sin = jnp.where(in_first, -sin, sin)

    def __call__(self, row, weight_ref, mask):
        """Rows `row` [M, 1] as [M, power of two >= H], or a scalar row as a vector."""
        x, y = (self._load(row, col, mask) for col in (self.tile.col, self.partner))
        if self.eps is not None:
            squares = jnp.sum(x * x, axis=-1, keepdims=True)
            inverse_rms = lax.rsqrt(squares / self.tile.head_dim + self.eps)
            x = self._scaled(x * inverse_rms, weight_ref, self.tile.col)
            y = self._scaled(y * inverse_rms, weight_ref, self.partner)
        cos, sin = (self.cos, self.sin) if x.ndim == 1 else (self.cos[None, :], self.sin[None, :])
        return (x * cos + y * sin).astype(self.qkv_ref.dtype)

    def new_key_and_value(self, weight_ref):
        rows, mask = self.qkv_ref.shape[2], self.tile.col < self.tile.head_dim
        value = self._load(rows - 1, self.tile.col, mask).astype(self.qkv_ref.dtype)
        return self(rows - 2, weight_ref, mask), value

    def _load(self, row, col, mask):
        place = self.qkv_ref.at[
            self.tile.request, self.tile.kv_head, row, col if isinstance(row, int) else col[None, :]
        ]
        return pltriton.load(place, mask=mask, other=0.0).astype(jnp.float32)

    def _scaled(self, x, weight_ref, col):
        weight = pltriton.load(weight_ref.at[col], mask=self.tile.col < self.tile.head_dim, other=0)
        weight = weight.astype(jnp.float32)
        # Rounded in between, as the norm's own output is.
        dtype = self.qkv_ref.dtype
        return (x * (weight if x.ndim == 1 else weight[None, :])).astype(dtype).astype(jnp.float32)
