"""Norm, rotation and cache write in one Pallas Triton kernel, one program a (kv head, tokens).

XLA needs four launches for this and reads the projection twice. The cache is written in place:
the kernel's output is its own input, and the kernel never reads it.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.rope_kv_write.reference import HeadRotation

warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")

_TOKENS = 4
"""Tokens of a program, where there are many: enough loads in flight, few programs."""


def rotate_and_write(
    qkv: Float[Array, "T K R H"],
    rotation: HeadRotation,
    kv: Float[Array, "PS 2 K H"],
    slot_mapping: Int[Array, " T"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "T K R-2 H"], Float[Array, "PS 2 K H"]]:
    """See `reference.rotate_and_write`; `interpret` runs on the CPU, slowly.

    Raises:
        NotImplementedError: a rotation of less than the whole head.
    """
    check_served(qkv, rotation)
    return _rotate_and_write(qkv, rotation, kv, slot_mapping, interpret)


def check_served(qkv: jax.Array, rotation: HeadRotation) -> None:
    """Raises NotImplementedError for a rotation of less than the whole head."""
    half = rotation.cos.shape[-1]
    if 2 * half != qkv.shape[-1]:
        raise NotImplementedError(f"head_dim {qkv.shape[-1]} with {half} angles")


def norm_weights(rotation: HeadRotation) -> tuple[jax.Array, ...]:
    """The weights that a kernel takes: two or none."""
    if rotation.q_weight is None or rotation.k_weight is None:
        return ()
    return rotation.q_weight, rotation.k_weight


@functools.partial(jax.jit, static_argnames="interpret")
def _rotate_and_write(qkv, rotation, kv, slot_mapping, interpret):
    tokens, kv_heads, rows, head_dim = qkv.shape
    tile = 1 if tokens < 512 else _TOKENS
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile, eps=rotation.eps),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, kv_heads, rows - 2, head_dim), qkv.dtype),
            jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        ),
        grid=(kv_heads, pl.cdiv(tokens, tile)),
        input_output_aliases={0: 1},
        compiler_params=pltriton.CompilerParams(num_warps=tile, num_stages=1),
        interpret=interpret,
        name="rope_kv_write",
    )(kv, qkv, rotation.cos, rotation.sin, slot_mapping, *norm_weights(rotation))


def _kernel(_, qkv_ref, cos_ref, sin_ref, slots_ref, *refs, tile: int, eps: float):
    *weight_refs, q_ref, kv_ref = refs
    tokens, _, heads, head_dim = qkv_ref.shape
    size, dtype = head_dim // 2, qkv_ref.dtype
    head = pl.program_id(0)
    token = pl.program_id(1) * tile + jnp.arange(tile)
    half = jnp.arange(pl.next_power_of_2(size))
    in_half = half < size
    real = (token < tokens)[:, None] & in_half[None, :]
    rows, first, second = token[:, None], half[None, :], half[None, :] + size

    slot = pltriton.load(slots_ref.at[token], mask=token < tokens, other=kv_ref.shape[0])
    written = (slot < kv_ref.shape[0])[:, None] & in_half[None, :]
    cos = pltriton.load(cos_ref.at[rows, first], mask=real, other=0.0)
    sin = pltriton.load(sin_ref.at[rows, first], mask=real, other=0.0)

    def read(index: int) -> tuple[jax.Array, jax.Array]:
        return (
            pltriton.load(qkv_ref.at[rows, head, index, first], mask=real, other=0.0),
            pltriton.load(qkv_ref.at[rows, head, index, second], mask=real, other=0.0),
        )

    def turned(index: int, weight_ref) -> tuple[jax.Array, jax.Array]:
        a, b = (x.astype(jnp.float32) for x in read(index))
        if weight_ref is not None:
            squares = jnp.sum(a * a, axis=1) + jnp.sum(b * b, axis=1)
            inverse_rms = lax.rsqrt(squares / head_dim + eps)[:, None]
            wa = pltriton.load(weight_ref.at[half], mask=in_half, other=0.0)
            wb = pltriton.load(weight_ref.at[half + size], mask=in_half, other=0.0)
            # Rounded in between, as the norm's own output is.
            a = (a * inverse_rms * wa.astype(jnp.float32)[None]).astype(dtype).astype(jnp.float32)
            b = (b * inverse_rms * wb.astype(jnp.float32)[None]).astype(dtype).astype(jnp.float32)
        return (a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype)

    q_weight, k_weight = weight_refs or (None, None)
    for index in range(heads - 2):
        a, b = turned(index, q_weight)
        pltriton.store(q_ref.at[rows, head, index, first], a, mask=real)
        pltriton.store(q_ref.at[rows, head, index, second], b, mask=real)
    for which, (a, b) in enumerate((turned(heads - 2, k_weight), read(heads - 1))):
        row = (
            kv_ref.at[slot[:, None], which, head, first],
            kv_ref.at[slot[:, None], which, head, second],
        )
        pltriton.store(row[0], a.astype(kv_ref.dtype), mask=written)
        pltriton.store(row[1], b.astype(kv_ref.dtype), mask=written)
