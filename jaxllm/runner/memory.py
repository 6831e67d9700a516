"""Who holds the device's memory, and how many cache blocks are left for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from jaxllm.config import EngineConfig
from jaxllm.runner import kv_cache
from jaxllm.runner.build import make_buckets, make_programs, make_state_shapes
from jaxllm.runner.kv_cache import GIB, CacheShape
from jaxllm.runner.sampler import SamplingMode
from jaxllm.runner.stage_step import PipelineState
from jaxllm.runner.stages import Stage
from jaxllm.runner.step import DeviceState
from jaxllm.runner.weights import ModelStage, Params, StagedParams


@dataclass(frozen=True, slots=True)
class Holders:
    """Bytes a device that are taken before the cache; `total` is what the engine may use, None on
    the CPU."""

    total: int | None
    weights: int
    sampler: int
    activations: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Who gets which bytes of a device.

    Attributes:
        budget: what the cache may take.
        cache: what it takes.
    """

    holders: Holders
    budget: int
    cache: int
    num_blocks: int
    tokens: int

    def with_blocks(self, num_blocks: int) -> "MemoryPlan":
        """The plan with that many blocks of the same size."""
        if num_blocks == self.num_blocks:
            return self
        cache, tokens = self.cache // self.num_blocks, self.tokens // self.num_blocks
        return replace(
            self, cache=cache * num_blocks, num_blocks=num_blocks, tokens=tokens * num_blocks
        )

    def lines(self) -> list[str]:
        """The table, a line a holder."""
        taken = self.holders
        rows = [("weights", taken.weights), ("sampler state", taken.sampler)]
        rows += [("largest step", taken.activations), ("block cache", self.cache)]
        if taken.total is not None:
            rows.append(("free", taken.total - sum(size for _, size in rows)))
        lines = [f"{name:>14} {size / GIB:8.3f} GiB" for name, size in rows]
        return [*lines, f"{'cache holds':>14} {self.num_blocks} blocks, {self.tokens} tokens"]


def device_bytes(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    """What one device holds of a sharded array."""
    assert leaf.sharding is not None
    count = 1
    for size in leaf.sharding.shard_shape(leaf.shape):
        count *= size
    return count * leaf.dtype.itemsize


def plan_memory(
    config: EngineConfig,
    stages: list[ModelStage],
    params: Params | StagedParams,
    cache_shape: CacheShape,
    vocab_size: int,
) -> list[MemoryPlan]:
    """Decides the number of blocks from what weights, sampler and the largest step take: a plan
    for the devices of each stage, all with the blocks of the stage that has room for the fewest.

    On a GPU the largest step is compiled and asked; on the CPU the cache gets a fixed share of
    the free memory.

    Raises:
        ValueError: not one request of full length fits; names a flag value that would work.
    """
    total = kv_cache.device_memory(stages[0].mesh.local_devices[0])
    state = make_state_shapes(config, cache_shape, 1, vocab_size, stages)
    programs = make_programs(config, stages, params, state)
    if total is not None:
        programs.step(make_buckets(config, gpu=True).largest, SamplingMode.FULL, lane=0)
    plans = []
    for part in stages:
        stage = part.stage
        holders = Holders(
            total=total,
            weights=sum(map(device_bytes, part.shapes.values())),
            sampler=_sampler_bytes(state, stage),
            activations=programs.activation_bytes(stage.index, alive=stage.count + 1),
        )
        shape = stage_cache(cache_shape, stage, config.tensor_parallel_size)
        plan = divide(config, shape, holders)
        check_fit(config, shape, plan)
        plans.append(plan)
    return with_fewest_blocks(plans)


def _sampler_bytes(state: DeviceState | PipelineState, stage: Stage) -> int:
    kept = [state.rows, state.last_tokens] if stage.last else []
    if stage.first and isinstance(state, PipelineState):
        kept.append(state.fed)
    return sum(map(device_bytes, jax.tree.leaves(kept)))


def stage_cache(shape: CacheShape, stage: Stage, tp: int) -> CacheShape:
    """What one device of a stage keeps of a token."""
    return replace(shape, num_layers=len(stage.layers)).on_one_of(tp)


def with_fewest_blocks(plans: Sequence[MemoryPlan]) -> list[MemoryPlan]:
    """The stages' plans with as many blocks as fit on all of them: a block is of all layers."""
    num_blocks = min(plan.num_blocks for plan in plans)
    return [plan.with_blocks(num_blocks) for plan in plans]


def divide(config: EngineConfig, shape: CacheShape, holders: Holders) -> MemoryPlan:
    """The blocks that are left a device; may be none (see `check_fit`).

    Args:
        config: resolved.
        shape: what one device keeps of a token.
    """
    assert config.max_model_len
    assert config.max_num_seqs
    taken = holders.weights + holders.sampler + holders.activations
    budget = _budget(config, shape, holders.total, taken)
    num_blocks = config.num_gpu_blocks_override or kv_cache.count_blocks(
        shape, budget, max_model_len=config.max_model_len, max_num_seqs=config.max_num_seqs
    )
    return MemoryPlan(
        holders=holders,
        budget=budget,
        cache=num_blocks * shape.bytes_per_block,
        num_blocks=num_blocks,
        tokens=num_blocks * config.block_size,
    )


def check_fit(config: EngineConfig, shape: CacheShape, plan: MemoryPlan) -> None:
    """Refuses a cache that cannot hold one request of full length, as vLLM does.

    --num-gpu-blocks-override is taken as it is: who gives it wants that very number.

    Raises:
        ValueError: it does not fit; names a flag value that would work.
    """
    if config.num_gpu_blocks_override is not None:
        return
    assert config.max_model_len
    left, block = max(plan.budget, 0), shape.bytes_per_block
    if plan.num_blocks < 1:
        raise ValueError(
            f"No memory for even one cache block: it takes {block / GIB:.3f} GiB "
            f"({shape.block_size} tokens), but {left / GIB:.3f} GiB are left. "
            f"{_advice(config, plan.holders.total, block - plan.budget, 'one block')}"
        )
    needed = -(-config.max_model_len // config.block_size) * block
    if plan.tokens < config.max_model_len:
        raise ValueError(
            f"One request of --max-model-len {config.max_model_len} tokens needs "
            f"{needed / GIB:.3f} GiB of cache, but {left / GIB:.3f} GiB are left: "
            f"--max-model-len {plan.tokens} would fit. "
            f"{_advice(config, plan.holders.total, needed - plan.budget, 'the full length')}"
        )


def _budget(config: EngineConfig, shape: CacheShape, total: int | None, taken: int) -> int:
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if total is None:
        assert config.max_model_len
        # They share one memory.
        devices = config.tensor_parallel_size * config.pipeline_parallel_size
        one_request = -(-config.max_model_len // config.block_size) * shape.bytes_per_block
        available = kv_cache.available_memory()
        return kv_cache.cpu_budget(available, one_request * devices) // devices
    # Room for uploads, allocator fragments and the rows set at admission.
    return total - taken - GIB // 2


def _advice(config: EngineConfig, total: int | None, missing: int, what: str) -> str:
    if config.kv_cache_memory_bytes is not None:
        needed = config.kv_cache_memory_bytes + missing
        return f"--kv-cache-memory-bytes {needed} would fit {what}."
    if total is None:
        return "Free some memory, or set --kv-cache-memory-bytes."
    whole = total / config.gpu_memory_utilization
    needed_share = (total + missing) / whole
    if needed_share <= 1:
        return f"--gpu-memory-utilization {needed_share + 0.005:.2f} would fit {what}."
    return (
        f"For {what} the device is too small even at --gpu-memory-utilization 1: take a smaller "
        "model or --dtype, or lower --max-num-batched-tokens and --max-num-seqs."
    )
