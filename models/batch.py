"""What a forward pass takes and gives: ForwardBatch, AttentionMetadata, KVCache.

Letters of shapes, used in every signature: T tokens, B requests, D model, N query heads, K kv
heads, H head dim, F ffn, V vocab, E experts, P blocks, S block size, W blocks a request.
"""

from dataclasses import dataclass

import jax
from jax.sharding import Mesh

KVCache = list[jax.Array]
"""One array a layer, [P*S, 2, K, H]: the keys and values of all slots, block after block.

Slot = block * S + offset. Axis 1 holds key, then value. Rows are only ever written by a scatter
on axis 0, which XLA does in place on a donated array.
"""


@dataclass(frozen=True)
class AttentionMetadata:
    """Which tokens of a step belong to which request, and where their context lies.

    Padding: requests beyond the real ones have seq_lens 0 and query_start equal to the number of
    real tokens; tokens beyond the real ones have slot_mapping >= P*S, each another value, so the
    cache write drops them and its indices stay unique.

    With decode_only, T == B and token i is the one new token of request i.
    """

    query_start: jax.Array  # i32[B+1]: tokens query_start[b] … query_start[b+1]-1 are b's
    seq_lens: jax.Array  # i32[B]: tokens in the cache once this step's are written
    block_tables: jax.Array  # i32[B, W]
    slot_mapping: jax.Array  # i32[T]
    block_size: int
    decode_only: bool
    backend: str = "auto"
    mesh: Mesh | None = None  # whose axis "tp" shares out the heads; None: there is one device


jax.tree_util.register_dataclass(
    AttentionMetadata,
    data_fields=["query_start", "seq_lens", "block_tables", "slot_mapping"],
    meta_fields=["block_size", "decode_only", "backend", "mesh"],
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one step, padded to a bucket."""

    token_ids: jax.Array  # i32[T]
    positions: jax.Array  # i32[T]
    attention: AttentionMetadata
