"""Tuned sizes of the kernels, read from configs.json, and the rules that choose among them."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class DecodeConfig:
    """Sizes of the Triton decode kernel."""

    block_kv: int  # tokens a tile
    num_splits: int  # programs that share one context
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class RaggedConfig:
    """Sizes of the Triton ragged kernel."""

    block_q: int  # rows a tile: query tokens times the heads of a group
    block_kv: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class MosaicConfig:
    """Sizes of the Mosaic GPU ragged kernel."""

    block_kv: int
    num_stages: int
    num_programs: int  # 0: one program a tile instead of a persistent grid


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("configs.json").read_text())


_SHARED_KIB = {"7.5": 64, "8.0": 163, "8.6": 99, "8.7": 163, "8.9": 99, "12.0": 99, "12.1": 99}
"""Shared memory that a program may use, by compute capability; others have Hopper's 227 KiB."""


def _shared_kib() -> int:
    capability = getattr(jax.devices()[0], "compute_capability", "")
    return _SHARED_KIB.get(str(capability), 227)


def _sizes(kernel: str, head_dim: int, dtype: jax.typing.DTypeLike) -> dict[str, int]:
    """A kernel's first entry for this head dim and element size whose tiles fit the GPU."""
    for entry in _table()[kernel]:
        if (
            head_dim <= entry["max_head_dim"]
            and jnp.dtype(dtype).itemsize == entry["itemsize"]
            and entry["shared_kib"] <= _shared_kib()
        ):
            return entry["sizes"]
    raise NotImplementedError(
        f"no tile sizes of {kernel} for head_dim {head_dim} in {jnp.dtype(dtype)} fit this GPU"
    )


def decode_config(
    requests: int, kv_heads: int, head_dim: int, context: int, dtype: jax.typing.DTypeLike
) -> DecodeConfig:
    """Tile sizes and the number of splits for a batch whose tables hold `context` tokens each."""
    sizes = _sizes("triton_decode", head_dim, dtype)
    return DecodeConfig(
        num_splits=num_splits(requests * kv_heads, -(-context // sizes["block_kv"])), **sizes
    )


def num_splits(programs: int, tiles: int) -> int:
    """Splits a context, a power of two, so that `programs` of one split each fill the GPU.

    Below that, a few programs wait for memory one after the other and leave it idle; above it,
    merging costs more than it gains. More splits than tiles would have nothing to do.
    """
    limits = _table()["splits"]
    splits = 1
    while programs * splits < limits["programs"] and splits < min(limits["max_splits"], tiles):
        splits *= 2
    return splits


def ragged_config(head_dim: int, dtype: jax.typing.DTypeLike) -> RaggedConfig:
    """Tile sizes of the Triton ragged kernel."""
    return RaggedConfig(**_sizes("triton_ragged", head_dim, dtype))


def mosaic_config(head_dim: int, dtype: jax.typing.DTypeLike) -> MosaicConfig:
    """Tile sizes of the Mosaic GPU ragged kernel."""
    return MosaicConfig(**_sizes("mosaic_ragged", head_dim, dtype))
