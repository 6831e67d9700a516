"""Pipeline parallelism: a program a stage, dispatched one after the other without waiting.

A step's hidden states and tokens go from device to device; the host only says what is to be done
and never waits for it, so all stages work at once on the steps of different lanes.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.runner import kv_cache
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.compiler import Compiler, ProgramOptions, abstract, shardings_of
from jaxllm.runner.mesh import mesh_devices, replicated, upload
from jaxllm.runner.program_builder import Job
from jaxllm.runner.program_context import tree_hash
from jaxllm.runner.sampler import SamplingMode, row_shapes
from jaxllm.runner.stage_step import PipelineState, run_stage
from jaxllm.runner.weights import ModelStage, StagedParams

Step = tuple[PipelineState, jax.Array, jax.Array | None]


def pipeline_shapes(
    stages: list[ModelStage],
    cache_shape: kv_cache.CacheShape,
    num_blocks: int,
    num_slots: int,
    vocab_size: int,
) -> PipelineState:
    """Shapes of the state, each on the devices of its stage; a lane a stage."""

    def tokens(stage: ModelStage) -> list[Any]:
        sharding = replicated(stage.mesh)
        return [jax.ShapeDtypeStruct((num_slots,), jnp.int32, sharding=sharding)] * len(stages)

    return PipelineState(
        caches=[
            kv_cache.array_shapes(
                replace(cache_shape, num_layers=len(stage.stage.layers)), num_blocks, stage.mesh
            )
            for stage in stages
        ],
        rows=row_shapes(num_slots, vocab_size, stages[-1].mesh),
        last_tokens=tokens(stages[-1]),
        fed=tokens(stages[0]),
    )


class PipelinePrograms(Compiler):
    """Stage, bucket and, on the last stage, sampling mode -> compiled part of a step.

    Args:
        params, state: the real arrays, or shapes of them with shardings.
    """

    def __init__(
        self,
        params: StagedParams,
        state: PipelineState,
        common: ProgramOptions,
        stages: list[ModelStage],
    ) -> None:
        self._shardings = [replicated(stage.mesh) for stage in stages]
        sampler = state.rows, state.last_tokens[0]
        super().__init__(common, params[-1], sampler, self._shardings[-1], len(stages) - 1)
        self._params, self._state = abstract(params), abstract(state)
        self._hashes = [tree_hash((part, state)) for part in params]
        self._stages = stages
        self._programs: dict[tuple[int, Bucket], Any] = {}

    def jobs(self, buckets: list[Bucket]) -> Iterable[Job]:
        for bucket in buckets:
            for index in range(len(self._stages)):
                yield self._stage_job(index, bucket)
        yield from self._shared_jobs(buckets)

    def upload(self, packed: np.ndarray) -> list[jax.Array]:
        """A step's numbers, on the devices of each stage."""
        return [upload(packed, sharding) for sharding in self._shardings]

    def step(
        self, bucket: Bucket, mode: SamplingMode, lane: int
    ) -> Callable[[StagedParams, PipelineState, list[jax.Array]], Step]:
        """A step of `lane`: (params, state, upload) -> (state, result, hidden or None)."""
        programs = [self._program(index, bucket) for index in range(len(self._stages))]
        return partial(self._run, programs, self._sampler(bucket, mode), lane)

    def prompt_logprobs(self, bucket: Bucket) -> Callable[..., jax.Array]:
        program = super().prompt_logprobs(bucket)
        return lambda params, *arguments: program(params[-1], *arguments)

    def activation_bytes(self, stage: int, alive: int) -> int:
        """Every stage but the first holds what the one before sent it, too."""
        dtype, size = self._common.hidden
        most = max((bucket.num_tokens for _, bucket in self._programs), default=0)
        received = most * size * np.dtype(dtype).itemsize
        return super().activation_bytes(stage, alive) + (alive * received if stage else 0)

    def _run(
        self,
        programs: list[Any],
        sampler: Any,
        lane: int,
        params: StagedParams,
        state: PipelineState,
        uploaded: list[jax.Array],
    ) -> Step:
        """Dispatches all stages. Nothing here waits: what is not there yet is a promise."""
        caches, last_tokens, fed = [*state.caches], [*state.last_tokens], [*state.fed]
        given = fed[lane]
        for index, program in enumerate(programs[:-1]):
            caches[index], x = program(params[index], caches[index], uploaded[index], given)
            given = jax.device_put(x, self._shardings[index + 1])
        arguments = params[-1], caches[-1], uploaded[-1], given
        caches[-1], for_sampler, hidden = programs[-1](*arguments)
        (rows, last_tokens[lane]), result = sampler((state.rows, last_tokens[lane]), for_sampler)
        fed[lane] = jax.device_put(last_tokens[lane], self._shardings[0])
        return PipelineState(caches, rows, last_tokens, fed), result, hidden

    def _program(self, index: int, bucket: Bucket) -> Any:
        if (index, bucket) not in self._programs:
            self._check_allowed(f"stage {index + 1} of {bucket}")
            self._build(self._stage_job(index, bucket))
        return self._programs[index, bucket]

    def _stage_job(self, index: int, bucket: Bucket) -> Job:
        store = partial(self._programs.__setitem__, (index, bucket))
        lower = partial(self._lower, index, bucket)
        name, made_from = f"stage-{index}-{bucket.label}", self._hashes[index]
        return Job(name, made_from, store, lower, bucket.num_tokens, index)

    def _devices(self, stage: int) -> list[Any]:
        return mesh_devices(self._shardings[stage])

    def _lower(self, index: int, bucket: Bucket) -> Any:
        stage, common, sharding = self._stages[index], self._common, self._shardings[index]
        mesh = stage.mesh if stage.mesh.size > 1 else None
        function = partial(
            run_stage,
            stage=stage.stage,
            layout=self.layout(bucket),
            options=replace(common.step(None), merge=stage.merge, mesh=mesh),
        )
        cache, (dtype, size) = self._state.caches[index], common.hidden
        given: Any = jax.ShapeDtypeStruct((bucket.num_tokens, size), dtype, sharding=sharding)
        results: tuple[Any, ...] = (sharding,)
        if index == self._last:
            results = (sharding, self._logits_sharding()), sharding
        jitted = jax.jit(
            function,
            donate_argnums=(1,),
            out_shardings=(shardings_of(cache), *results),
        )
        arguments = self._packed(bucket, sharding), self._state.fed[0] if index == 0 else given
        return jitted.trace(self._params[index], cache, *arguments).lower()
