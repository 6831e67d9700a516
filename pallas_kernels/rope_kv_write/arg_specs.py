"""The cases that tests and benchmarks share, as data."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.pallas_kernels.rope_kv_write.reference import HeadRotation


@dataclass(frozen=True)
class RopeCase:
    """The shapes of one call."""

    name: str
    tokens: int
    padded_tokens: int = 0
    num_kv_heads: int = 2
    group: int = 4
    head_dim: int = 64
    slots: int = 64
    norm: bool = False
    dtype: str = "float32"


CASES = (
    RopeCase("one_token", 1),
    RopeCase("all_padded", 0, padded_tokens=2),
    RopeCase("padded", 5, padded_tokens=3, norm=True),
    RopeCase("group_of_three", 3, num_kv_heads=3, group=3),
    RopeCase("head_128_bf16", 4, head_dim=128, dtype="bfloat16"),
    RopeCase("head_80", 3, head_dim=80, num_kv_heads=1, norm=True),
    RopeCase("norm_bf16", 3, group=2, norm=True, dtype="bfloat16"),
    RopeCase("many_tokens", 510, padded_tokens=3, num_kv_heads=1, group=1, head_dim=8, slots=600),
)


def make_arguments(case: RopeCase, seed: int = 0) -> dict[str, Any]:
    """Random arguments, by name, of a case."""
    rng = np.random.default_rng(seed)
    tokens, size = case.tokens + case.padded_tokens, case.head_dim
    shape = (tokens, case.num_kv_heads, case.group + 2, size)
    angles = rng.uniform(0, 100, (tokens, size // 2))
    slots = case.slots + np.arange(tokens)
    slots[: case.tokens] = rng.permutation(case.slots)[: case.tokens]
    dtype = jnp.dtype(case.dtype)
    weights: list[Any] = [None, None]
    if case.norm:
        weights = [jnp.asarray(rng.standard_normal(size), dtype) for _ in range(2)]
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    return {
        "qkv": jnp.asarray(rng.standard_normal(shape), dtype),
        "rotation": HeadRotation(cos, sin, *weights, eps=1e-6),
        "kv": jnp.asarray(rng.standard_normal((case.slots, 2, case.num_kv_heads, size)), dtype),
        "slot_mapping": jnp.asarray(slots, jnp.int32),
    }
