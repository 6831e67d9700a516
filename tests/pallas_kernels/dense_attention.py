"""Attention of each query spelled out in float64 numpy: the judge of the paged reference."""

from typing import Any

import jax
import numpy as np

from jaxllm.pallas_kernels.paged_attention.arg_specs import AttentionCase


def dense_attention(
    case: AttentionCase, arrays: dict[str, jax.Array], options: dict[str, Any]
) -> np.ndarray:
    """The outputs of the case's real tokens, [sum(query_lens), N, H]."""
    q, kv = (np.asarray(arrays[name], np.float64) for name in ("q", "kv"))
    tables, group = np.asarray(arrays["block_tables"]), case.num_heads // case.num_kv_heads
    sinks = options.get("sinks")
    out, token = [], 0
    for request, (query_len, seq_len) in enumerate(
        zip(case.query_lens, case.seq_lens, strict=True)
    ):
        for position in range(seq_len - query_len, seq_len):
            first = 0
            if case.sliding_window is not None:
                first = max(0, position - case.sliding_window + 1)
            seen = np.arange(first, position + 1)
            slots = tables[request, seen // case.block_size] * case.block_size
            context = kv[slots + seen % case.block_size]
            heads = []
            for head in range(case.num_heads):
                scores = context[:, 0, head // group] @ q[token, head] * options["scale"]
                if case.logit_soft_cap is not None:
                    scores = case.logit_soft_cap * np.tanh(scores / case.logit_soft_cap)
                weights = np.exp(scores)
                total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[head])))
                heads.append(weights @ context[:, 1, head // group] / total)
            out.append(heads)
            token += 1
    return np.asarray(out, np.float64).reshape(-1, case.num_heads, case.head_dim)
