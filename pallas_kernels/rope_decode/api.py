"""What models call in a decode step: picks the implementation."""

from typing import Unpack

import jax
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.paged_attention.api import AttentionOptions
from jaxllm.pallas_kernels.rope_decode import reference, triton
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
    """See `reference.rotate_write_attend`.

    Args:
        backend: the attention's; "auto" and "triton" take the one kernel on a GPU, if it serves
            the case, all others its two halves.
    """
    if backend in ("auto", "triton") and jax.default_backend() == "gpu":
        try:
            return triton.rotate_write_attend(qkv, rotation, kv, block_tables, seq_lens, **options)
        except NotImplementedError:
            pass
    arrays = (qkv, rotation, kv, block_tables, seq_lens, slot_mapping)
    return reference.rotate_write_attend(*arrays, backend=backend, **options)
