"""Self-attention over the paged cache: the only caller of the attention and cache kernels."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxllm.models.batch import AttentionMetadata
from jaxllm.models.layers.linear import Linear
from jaxllm.models.layers.norm import RMSNorm
from jaxllm.models.layers.rope import Rotation
from jaxllm.pallas_kernels.paged_attention.api import (
    AttentionOptions,
    decode_attention,
    ragged_attention,
)
from jaxllm.pallas_kernels.rope_kv_write.api import rotate_and_write
from jaxllm.pallas_kernels.rope_kv_write.reference import HeadRotation


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) with rotary positions.

    qkv_proj holds, for each kv head, its query heads, then its key, then its value, so that a
    device of a tensor-parallel mesh has whole groups.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: jnp.dtype,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        sliding_window: int | None = None,
    ) -> None:
        """Args: qk_norm_eps: if given, queries and keys are normalized by head before rotation."""
        group = num_heads // num_kv_heads
        self.scale = head_dim**-0.5
        self.sliding_window = sliding_window
        self.qkv_proj = Linear(
            (hidden_size,),
            (num_kv_heads, group + 2, head_dim),
            dtype=dtype,
            sharding=(None, "tp", None, None),
            bias=qkv_bias,
        )
        self.o_proj = Linear(
            (num_kv_heads, group, head_dim),
            (hidden_size,),
            dtype=dtype,
            sharding=("tp", None, None, None),
            bias=output_bias,
        )
        eps = qk_norm_eps
        self.q_norm = None if eps is None else RMSNorm(head_dim, eps, dtype=dtype)
        self.k_norm = None if eps is None else RMSNorm(head_dim, eps, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "T D"],
        rope: Rotation,
        kv: Float[Array, "PS 2 K H"],
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], Float[Array, "PS 2 K H"]]:
        """The block's output, and the cache with this step's keys and values written."""
        with jax.named_scope("qkv"):
            qkv = self.qkv_proj(x)
        rotation = HeadRotation(rope.cos, rope.sin)
        if self.q_norm is not None and self.k_norm is not None:
            weights = self.q_norm.weight[...], self.k_norm.weight[...]
            rotation = HeadRotation(rope.cos, rope.sin, *weights, eps=self.q_norm.eps)
        write_and_attend = self._write_and_attend
        if metadata.mesh is not None:
            # XLA cannot see into the kernels: left to itself it would gather what they take.
            heads, cache = PartitionSpec(None, "tp"), PartitionSpec(None, None, "tp")
            write_and_attend = jax.shard_map(
                write_and_attend,
                mesh=metadata.mesh,
                in_specs=(heads, PartitionSpec(), cache, PartitionSpec()),
                out_specs=(heads, cache),
                check_vma=False,
            )
        out, kv = write_and_attend(qkv, rotation, kv, metadata)
        with jax.named_scope("output"):
            return self.o_proj(out), kv

    def _write_and_attend(
        self,
        qkv: Float[Array, "T K R H"],
        rotation: HeadRotation,
        kv: Float[Array, "PS 2 K H"],
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T K R-2 H"], Float[Array, "PS 2 K H"]]:
        """The heads of one device."""
        options: AttentionOptions = {
            "block_size": metadata.block_size,
            "scale": self.scale,
            "sliding_window": self.sliding_window,
        }
        with jax.named_scope("rope_kv_write"):
            q, kv = rotate_and_write(
                qkv, rotation, kv, metadata.slot_mapping, backend=metadata.backend
            )
        with jax.named_scope("attention"):
            tokens, kv_heads, group, head_dim = q.shape
            q = q.reshape(tokens, kv_heads * group, head_dim)
            arrays = (q, kv, metadata.block_tables, metadata.seq_lens)
            if metadata.decode_only:
                out = decode_attention(*arrays, backend=metadata.backend, **options)
            else:
                start = metadata.query_start
                out = ragged_attention(*arrays, start, backend=metadata.backend, **options)
            return out.reshape(tokens, kv_heads, group, head_dim), kv
