"""How many cache blocks fit, and the arrays that hold them."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.models.batch import KVCache
from jaxllm.runner.mesh import TP_AXIS

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token of context takes.

    Attributes:
        num_layers: layers that keep keys and values.
        num_kv_heads: K, over all devices.
        head_dim: H.
        block_size: S.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: jnp.dtype

    @property
    def bytes_per_token(self) -> int:
        per_layer = 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return self.num_layers * per_layer

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def on_one_of(self, devices: int) -> "CacheShape":
        """What each of `devices` keeps, which share the kv heads evenly."""
        return replace(self, num_kv_heads=self.num_kv_heads // devices)


def array_shapes(shape: CacheShape, num_blocks: int, mesh: Mesh) -> KVCache:
    """Shapes [num_blocks * S, 2, K, H] of the cache arrays, one a layer, sharded over kv heads."""
    sharding = NamedSharding(mesh, PartitionSpec(None, None, TP_AXIS, None))
    slots = num_blocks * shape.block_size
    dims = (slots, 2, shape.num_kv_heads, shape.head_dim)
    struct: Any = jax.ShapeDtypeStruct(dims, shape.dtype, sharding=sharding)
    return [struct] * shape.num_layers


def device_memory(device: Any) -> int | None:
    """Bytes that JAX may use on `device`, or None on the CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats["bytes_limit"] if stats else None


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping.

    Linux counts in what the file cache would give back; elsewhere only unused pages are known.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cpu_budget(available: int, one_request: int) -> int:
    """Bytes for the cache on the CPU: an eighth of the available memory, rounded down to a power
    of two, or what one request of full length takes, if that leaves half of the memory alone.

    Rounded, since the memory changes from start to start, and another number of blocks would
    find no program in the compilation cache.
    """
    eighth = 1 << max((available // 8).bit_length() - 1, 0)
    return max(eighth, one_request) if one_request <= available // 2 else eighth


def count_blocks(shape: CacheShape, budget: int, *, max_model_len: int, max_num_seqs: int) -> int:
    """Blocks that fit into `budget` bytes, and no more than all requests together can fill."""
    most = max_num_seqs * -(-max_model_len // shape.block_size)
    return int(max(0, min(budget // shape.bytes_per_block, most)))
