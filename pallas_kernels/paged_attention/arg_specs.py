"""The attention cases that tests and benchmarks share, as data.

A case is turned into arrays by `make_arguments`; every implementation is held to the reference,
and the reference to dense attention, over the same list.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class AttentionCase:
    """Query and context lengths of the real requests, and the shapes around them."""

    name: str
    query_lens: tuple[int, ...]  # all 1: a decode case
    seq_lens: tuple[int, ...]  # the query tokens included
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    sliding_window: int | None = None
    logit_soft_cap: float | None = None
    sinks: bool = False
    dtype: str = "float32"
    padded_requests: int = 0
    padded_tokens: int = 0

    @property
    def decode_only(self) -> bool:
        return all(length == 1 for length in self.query_lens)


_LONG = (1, 15, 16, 17, 127, 128, 129, 300)

CASES = (
    AttentionCase("decode_one", (1,), (200,)),
    AttentionCase("decode_first_token", (1,), (1,)),
    AttentionCase("decode_lengths", (1,) * 8, _LONG, padded_requests=3),
    AttentionCase("decode_all_padded", (), (), padded_requests=2),
    AttentionCase("decode_mha", (1, 1), (33, 70), num_heads=4, num_kv_heads=4),
    AttentionCase("decode_mqa", (1, 1), (33, 70), num_heads=8, num_kv_heads=1),
    AttentionCase("decode_group_of_three", (1, 1), (33, 70), num_heads=9, num_kv_heads=3),
    AttentionCase("decode_group_of_seven", (1,), (90,), num_heads=14, num_kv_heads=2),
    AttentionCase("decode_head_128", (1, 1), (33, 270), head_dim=128),
    AttentionCase("decode_head_96", (1, 1), (33, 70), head_dim=96),
    AttentionCase("decode_block_8", (1,) * 8, _LONG, block_size=8),
    AttentionCase("decode_block_32", (1,) * 8, _LONG, block_size=32),
    AttentionCase("decode_block_64", (1,) * 8, _LONG, block_size=64),
    AttentionCase("decode_block_256", (1,) * 8, _LONG, block_size=256),
    AttentionCase("decode_window", (1,) * 8, _LONG, sliding_window=20, padded_requests=1),
    AttentionCase("decode_window_one", (1, 1), (5, 200), sliding_window=1),
    AttentionCase("decode_soft_cap", (1, 1), (5, 200), logit_soft_cap=5.0),
    AttentionCase("decode_sinks", (1, 1), (5, 200), sinks=True, padded_requests=1),
    AttentionCase("decode_bf16", (1,) * 8, _LONG, dtype="bfloat16"),
    AttentionCase("prefill_one", (40,), (40,)),
    AttentionCase("prefill_long", (300,), (300,)),
    AttentionCase("prefill_chunk", (64,), (260,)),
    AttentionCase("prefill_one_token", (1, 2), (1, 2), padded_tokens=5),
    AttentionCase("mixed", (1, 33, 1, 16, 7), (130, 33, 1, 200, 55), padded_requests=3),
    AttentionCase("mixed_padded", (1, 33, 1), (130, 33, 1), padded_requests=2, padded_tokens=29),
    AttentionCase("mixed_block_8", (1, 33, 50), (130, 33, 177), block_size=8),
    AttentionCase("mixed_block_64", (1, 33, 50), (130, 33, 177), block_size=64),
    AttentionCase("mixed_group_of_three", (9, 1), (40, 70), num_heads=9, num_kv_heads=3),
    AttentionCase("mixed_head_128", (9, 1, 65), (40, 70, 65), head_dim=128),
    AttentionCase("mixed_window", (1, 33, 50), (130, 33, 177), sliding_window=20),
    AttentionCase("mixed_soft_cap", (1, 33), (130, 60), logit_soft_cap=5.0),
    AttentionCase("mixed_sinks", (1, 33), (130, 60), sinks=True, padded_tokens=3),
    AttentionCase("mixed_bf16", (1, 33, 50), (130, 33, 177), dtype="bfloat16"),
)


def make_arguments(
    case: AttentionCase, seed: int = 0
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Random arrays (by parameter name) and keyword options of a case.

    The blocks lie in random order, and each slot that no request owns holds a NaN, which must
    never reach a real row.
    """
    rng = np.random.default_rng(seed)
    size, dtype = case.block_size, jnp.dtype(case.dtype)
    num_tokens = sum(case.query_lens) + case.padded_tokens
    if case.decode_only:
        num_tokens += case.padded_requests
    num_blocks = [-(-length // size) for length in case.seq_lens]
    width = max(num_blocks, default=0) + 3
    total = sum(num_blocks) + 2
    requests = len(case.seq_lens) + case.padded_requests

    order = iter(rng.permutation(total))
    tables = np.zeros((requests, width), np.int32)
    kv = np.full((total * size, 2, case.num_kv_heads, case.head_dim), np.nan, np.float32)
    for row, (length, count) in enumerate(zip(case.seq_lens, num_blocks, strict=True)):
        tables[row, :count] = [next(order) for _ in range(count)]
        tokens = np.arange(length)
        slots = tables[row, tokens // size] * size + tokens % size
        kv[slots] = rng.standard_normal((length, *kv.shape[1:]))
    query_start = np.full(requests + 1, sum(case.query_lens), np.int32)
    query_start[: len(case.query_lens) + 1] = np.cumsum((0, *case.query_lens))

    arrays = {
        "q": jnp.asarray(rng.standard_normal((num_tokens, case.num_heads, case.head_dim)), dtype),
        "kv": jnp.asarray(kv, dtype),
        "block_tables": jnp.asarray(tables),
        "seq_lens": jnp.asarray([*case.seq_lens] + [0] * case.padded_requests, jnp.int32),
        "query_start": jnp.asarray(query_start),
    }
    if case.decode_only:
        del arrays["query_start"]
    options = {
        "block_size": size,
        "scale": case.head_dim**-0.5,
        "sliding_window": case.sliding_window,
        "logit_soft_cap": case.logit_soft_cap,
    }
    if case.sinks:
        options["sinks"] = jnp.asarray(rng.standard_normal(case.num_heads), jnp.float32)
    return arrays, options
