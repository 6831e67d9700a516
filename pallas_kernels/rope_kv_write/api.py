"""What models call between the projection and attention: picks the implementation."""

import jax
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.rope_kv_write import reference, triton
from jaxllm.pallas_kernels.rope_kv_write.reference import HeadRotation


def rotate_and_write(
    qkv: Float[Array, "T K R H"],
    rotation: HeadRotation,
    kv: Float[Array, "PS 2 K H"],
    slot_mapping: Int[Array, " T"],
    *,
    backend: str = "auto",
) -> tuple[Float[Array, "T K R-2 H"], Float[Array, "PS 2 K H"]]:
    """See `reference.rotate_and_write`.

    Args:
        backend: the attention's; "reference" takes the reference here too, all others the
            Triton kernel on a GPU, if it serves the case.
    """
    if backend != "reference" and jax.default_backend() == "gpu":
        try:
            return triton.rotate_and_write(qkv, rotation, kv, slot_mapping)
        except NotImplementedError:
            pass
    return reference.rotate_and_write(qkv, rotation, kv, slot_mapping)
