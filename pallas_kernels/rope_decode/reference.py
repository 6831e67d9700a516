"""The operation as its two halves: what the kernel is held to, and what runs on the CPU."""

from typing import Unpack

from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.paged_attention.api import AttentionOptions, decode_attention
from jaxllm.pallas_kernels.rope_kv_write.api import rotate_and_write
from jaxllm.pallas_kernels.rope_kv_write.reference import HeadRotation


def rotate_write_attend(
    qkv: Float[Array, "B K R H"],
    rotation: HeadRotation,
    kv: Float[Array, "PS 2 K H"],
    block_tables: Int[Array, "B W"],
    seq_lens: Int[Array, " B"],
    slot_mapping: Int[Array, " B"],
    *,
    backend: str = "auto",
    **options: Unpack[AttentionOptions],
) -> tuple[Float[Array, "B N H"], Float[Array, "PS 2 K H"]]:
    """Attention of one new token a request, and the cache with its key and value.

    Args:
        qkv, rotation: see `rope_kv_write.reference.rotate_and_write`.
        slot_mapping: the slot of each request's last position, as its block table has it.
        backend, options: see `paged_attention.api.decode_attention`.
    """
    q, kv = rotate_and_write(qkv, rotation, kv, slot_mapping, backend=backend)
    q = q.reshape(q.shape[0], -1, q.shape[-1])
    return decode_attention(q, kv, block_tables, seq_lens, backend=backend, **options), kv
