"""From a resolved config to buckets, state and programs: of one program, or of pipeline stages."""

from typing import Any

import jax

from jaxllm.config import EngineConfig
from jaxllm.runner import kv_cache
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.compiler import ProgramOptions
from jaxllm.runner.compiler_options import has_room_for_sums, sum_scratch
from jaxllm.runner.mesh import replicated
from jaxllm.runner.pipeline import PipelinePrograms, pipeline_shapes
from jaxllm.runner.program_context import open_cache
from jaxllm.runner.programs import StepPrograms
from jaxllm.runner.sampler import SamplingMode
from jaxllm.runner.stage_step import PipelineState
from jaxllm.runner.step import DeviceState, StepOptions, state_shapes
from jaxllm.runner.weights import ModelStage, Params, StagedParams, unflatten

MULTI_STEPS = 8
MULTI_STEP_BYTES = 64 * 10**9
MULTI_STEP_REQUESTS = 8
"""Most requests of a decode step that is given to the device with others, unless asked for."""


def make_buckets(config: EngineConfig, *, gpu: bool) -> Buckets:
    """The buckets of a resolved config."""
    assert config.max_num_seqs
    assert config.max_num_batched_tokens
    return Buckets.create(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        gpu=gpu,
    )


def make_state_shapes(
    config: EngineConfig,
    cache_shape: kv_cache.CacheShape,
    num_blocks: int,
    vocab_size: int,
    stages: list[ModelStage],
) -> DeviceState | PipelineState:
    """Shapes of everything that stays on the devices beside the parameters."""
    assert config.max_num_seqs
    if len(stages) > 1:
        return pipeline_shapes(stages, cache_shape, num_blocks, config.max_num_seqs, vocab_size)
    mesh = stages[0].mesh
    cache = kv_cache.array_shapes(cache_shape, num_blocks, mesh)
    return state_shapes(cache, config.max_num_seqs, vocab_size, mesh)


def _num_steps(config: EngineConfig, params: Params, gpu: bool) -> int:
    """Decode steps to give to the device at once: as many as read MULTI_STEP_BYTES of weights.

    On an H200 that takes about 16 ms, against 2 to 4 ms that a dispatch costs the host; more
    would only delay newcomers.
    """
    if config.num_scheduler_steps is not None:
        return config.num_scheduler_steps
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    size //= config.tensor_parallel_size
    return min(max(MULTI_STEP_BYTES // size, 1), MULTI_STEPS) if gpu else 1


def make_programs(
    config: EngineConfig,
    stages: list[ModelStage],
    params: Params | StagedParams,
    state: DeviceState | PipelineState,
) -> StepPrograms | PipelinePrograms:
    """The programs for `state` (shapes suffice, also of `params`), none compiled yet."""
    assert config.max_model_len
    last = stages[-1]
    gpu = last.mesh.devices.flat[0].platform == "gpu"
    model = last.merge(unflatten(last.shapes))
    model_config = model.config
    num_steps = 1 if isinstance(params, list) else _num_steps(config, params, gpu)

    common = ProgramOptions(
        step=lambda mode: StepOptions(
            last.merge,
            config.block_size,
            config.attention_backend,
            config.max_logprobs,
            mode,
            model_config.vocab_size,
            last.mesh if last.mesh.size > 1 else None,
        ),
        table_width=-(-config.max_model_len // config.block_size),
        # On a GPU a choice at run time would make the host wait for it.
        modes=tuple(SamplingMode) if gpu else (None,),
        hidden=(config.dtype, model_config.hidden_size),
        num_devices=last.mesh.size,
        sum_kernels=_sums_have_room(config, stages, model_config, num_steps),
        gpu=gpu,
        lazy=config.enforce_eager,
        warn_only=config.allow_compile_after_warmup,
        cache=open_cache(config, stages, model),
    )
    if isinstance(params, list):
        assert isinstance(state, PipelineState)
        return PipelinePrograms(params, state, common, stages)
    assert isinstance(state, DeviceState)
    return StepPrograms(
        params,
        state,
        common,
        packed_sharding=replicated(last.mesh),
        num_steps=num_steps,
        most_requests=_most_requests(config),
    )


def _most_requests(config: EngineConfig) -> int:
    """Who names a number of steps wants it for every decode step."""
    assert config.max_num_seqs
    return config.max_num_seqs if config.num_scheduler_steps else MULTI_STEP_REQUESTS


def _sums_have_room(
    config: EngineConfig, stages: list[ModelStage], model_config: Any, num_steps: int
) -> bool:
    """Whether XLA may use its own kernels for the sums of a stage's GPUs."""
    managed = kv_cache.device_memory(stages[0].mesh.local_devices[0])
    if stages[0].mesh.size == 1 or managed is None:
        return True
    buckets = [*make_buckets(config, gpu=True)]
    if num_steps > 1:
        most = _most_requests(config)
        buckets += 2 * [b for b in buckets if b.decode_only and b.num_requests <= most]
    steps = [bucket.num_tokens for bucket in buckets]
    sums = 2 * max(len(stage.stage.layers) for stage in stages) + 1
    token_bytes = model_config.hidden_size * jax.numpy.dtype(config.dtype).itemsize
    unmanaged = managed / config.gpu_memory_utilization - managed
    return has_room_for_sums(sum_scratch(steps, sums, token_bytes), unmanaged)
