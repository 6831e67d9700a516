"""What models call between the projection and attention: picks the implementation."""

import jax
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.rope_kv_write import reference, triton
from jaxllm.pallas_kernels.rope_kv_write.reference import HeadNorm


def rotate_and_write(
    qkv: Float[Array, "T K R H"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    kv: Float[Array, "PS 2 K H"],
    slot_mapping: Int[Array, " T"],
    *,
    norm: HeadNorm | None = None,
    norm_eps: float = 0.0,
    backend: str = "auto",
) -> tuple[Float[Array, "T K R-2 H"], Float[Array, "PS 2 K H"]]:
    """See `reference.rotate_and_write`.

    Args:
        backend: the attention's; "reference" takes the reference here too, all others the
            Triton kernel on a GPU, if it serves the case.
    """
    if backend != "reference" and jax.default_backend() == "gpu":
        try:
            return triton.rotate_and_write(
                qkv, cos, sin, kv, slot_mapping, norm=norm, norm_eps=norm_eps
            )
        except NotImplementedError:
            pass
    return reference.rotate_and_write(qkv, cos, sin, kv, slot_mapping, norm=norm, norm_eps=norm_eps)
