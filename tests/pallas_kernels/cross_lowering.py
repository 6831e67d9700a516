"""Lowers a function for an NVIDIA GPU on a machine that has none."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, use_abstract_mesh


def lower_for_cuda(function: Callable[..., Any], *args: Any, device: str = "NVIDIA H200") -> str:
    """The StableHLO of `function` for a GPU of that name, kernels included."""
    gpu = AbstractDevice(device_kind=device, num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def attention_shapes(
    *,
    tokens: int = 512,
    requests: int = 16,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    block_size: int = 16,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, kv, block_tables, seq_lens, query_start and sinks of a real model's size."""
    width = 2048 // block_size
    return (
        jax.ShapeDtypeStruct((tokens, heads, head_dim), dtype),
        jax.ShapeDtypeStruct((requests * 2048, 2, kv_heads, head_dim), dtype),
        jax.ShapeDtypeStruct((requests, width), jnp.int32),
        jax.ShapeDtypeStruct((requests,), jnp.int32),
        jax.ShapeDtypeStruct((requests + 1,), jnp.int32),
        jax.ShapeDtypeStruct((heads,), jnp.float32),
    )
