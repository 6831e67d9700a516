"""Who holds the device's memory, and how many cache blocks are left for it."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.runner import kv_cache
from jaxllm.runner.kv_cache import GIB, CacheShape
from jaxllm.runner.model_runner import make_buckets, make_programs, make_state_shapes
from jaxllm.runner.sampler import SamplingMode
from jaxllm.runner.weights import AbstractModel, Params, flatten


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes a device; `total` is what the engine may use, None on the CPU."""

    total: int | None
    weights: int
    sampler: int
    activations: int
    cache: int
    num_blocks: int
    tokens: int

    def lines(self) -> list[str]:
        """The table, a line a holder."""
        rows = [("weights", self.weights), ("sampler state", self.sampler)]
        rows += [("largest step", self.activations), ("block cache", self.cache)]
        if self.total is not None:
            rows.append(("free", self.total - sum(size for _, size in rows)))
        lines = [f"{name:>14} {size / GIB:8.3f} GiB" for name, size in rows]
        return [*lines, f"{'cache holds':>14} {self.num_blocks} blocks, {self.tokens} tokens"]


def _device_bytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None
    count = 1
    for size in leaf.sharding.shard_shape(leaf.shape):
        count *= size
    return count * leaf.dtype.itemsize


def plan_memory(
    config: EngineConfig,
    model: AbstractModel,
    params: Params,
    cache_shape: CacheShape,
    vocab_size: int,
    mesh: Mesh,
) -> MemoryPlan:
    """Decides the number of blocks from what weights, sampler and the largest step take.

    On a GPU the largest step is compiled and asked; on the CPU the cache gets a fixed share of
    the free memory.

    Raises:
        ValueError: not even one block fits; the message names a flag value that would work.
    """
    assert config.max_model_len
    assert config.max_num_seqs
    device = mesh.devices.flat[0]
    total = kv_cache.device_memory(device)
    weights = sum(map(_device_bytes, flatten(params).values()))
    shapes = make_state_shapes(config, cache_shape, 1, vocab_size, mesh)
    sampler = sum(map(_device_bytes, jax.tree.leaves((shapes.rows, shapes.last_tokens))))
    activations = 0
    if total is not None:
        programs = make_programs(config, model, params, shapes, mesh)
        programs.step(make_buckets(config, gpu=True).largest, SamplingMode.FULL)
        # Two steps may be alive at once, each with its own outputs.
        activations = programs.peak_temp_bytes + 2 * programs.peak_output_bytes
    budget = _budget(config, total, weights + sampler + activations)
    tp_share = _device_bytes(shapes.kv_cache[0]) * cache_shape.num_layers
    num_blocks = config.num_gpu_blocks_override or _count_blocks(
        config, cache_shape, budget, lambda missing: _advice(config, total, missing)
    )
    return MemoryPlan(
        total=total,
        weights=weights,
        sampler=sampler,
        activations=activations,
        cache=num_blocks * tp_share,
        num_blocks=num_blocks,
        tokens=num_blocks * config.block_size,
    )


def _budget(config: EngineConfig, total: int | None, taken: int) -> int:
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if total is None:
        return kv_cache.cpu_budget()
    # Room for uploads, allocator fragments and the rows set at admission.
    return total - taken - GIB // 2


def _count_blocks(
    config: EngineConfig, shape: CacheShape, budget: int, advice: Callable[[int], str]
) -> int:
    assert config.max_model_len
    assert config.max_num_seqs
    try:
        return kv_cache.count_blocks(
            shape,
            budget,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
        )
    except ValueError as error:
        raise ValueError(f"{error} {advice(shape.bytes_per_block - budget)}") from None


def _advice(config: EngineConfig, total: int | None, missing: int) -> str:
    if config.kv_cache_memory_bytes is not None:
        needed = config.kv_cache_memory_bytes + missing
        return f"--kv-cache-memory-bytes {needed} would fit one block."
    if total is None:
        return "Free some memory, or set --kv-cache-memory-bytes."
    whole = total / config.gpu_memory_utilization
    needed_share = (total + missing) / whole
    if needed_share <= 1:
        return f"--gpu-memory-utilization {needed_share + 0.005:.2f} would fit one block."
    return (
        "The device is too small even at --gpu-memory-utilization 1: take a smaller model or "
        "--dtype, or lower --max-num-batched-tokens and --max-num-seqs."
    )
