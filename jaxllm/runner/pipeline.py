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
from jaxllm.runner.compiler import (
    Compiler,
    Job,
    ProgramKey,
    ProgramOptions,
    abstract,
    lower_logprobs,
)
from jaxllm.runner.mesh import replicated, upload
from jaxllm.runner.sampler import SamplingMode, row_shapes
from jaxllm.runner.stage_step import PipelineState, run_first, run_last, run_middle
from jaxllm.runner.step import StepOptions
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
        super().__init__(common)
        self._params, self._state = abstract(params), abstract(state)
        self._stages = stages
        self._shardings = [replicated(stage.mesh) for stage in stages]
        self.sharding = self._shardings[-1]
        self._programs: dict[tuple[int, ProgramKey], Any] = {}
        self._logprob_programs: dict[Bucket, Any] = {}
        self._hidden: dict[Bucket, Any] = {}

    def jobs(self, buckets: list[Bucket]) -> Iterable[Job]:
        for key in self._keys(buckets):
            bucket = key[0]
            for index, part in self._parts(key):
                if (index, part) not in self._programs:
                    self._programs[index, part] = None  # the modes of a bucket share it
                    store = partial(self._programs.__setitem__, (index, part))
                    yield Job(store, partial(self._lower, index, part), bucket.num_tokens, index)
        last = len(self._stages) - 1
        for bucket in buckets:
            if not bucket.decode_only:
                store = partial(self._logprob_programs.__setitem__, bucket)
                yield Job(store, partial(self._lower_logprobs, bucket), bucket.num_tokens, last)

    def upload(self, packed: np.ndarray) -> list[jax.Array]:
        """A step's numbers, on the devices of each stage."""
        return [upload(packed, sharding) for sharding in self._shardings]

    def step(
        self, bucket: Bucket, mode: SamplingMode, lane: int
    ) -> Callable[[StagedParams, PipelineState, list[jax.Array]], Step]:
        """A step of `lane`: (params, state, upload) -> (state, result, hidden or None)."""
        key = self.key(bucket, mode)
        programs = [self._program(index, part, mode) for index, part in self._parts(key)]
        return partial(self._run, programs, lane)

    def prompt_logprobs(self, bucket: Bucket) -> Callable[..., jax.Array]:
        """The program that turns hidden states of a mixed bucket into prompt logprobs."""
        if bucket not in self._logprob_programs:
            self._check_allowed(f"prompt logprobs of {bucket}")
            self._logprob_programs[bucket] = self._compile(
                self._lower_logprobs(bucket), bucket.num_tokens, len(self._stages) - 1
            )
        program = self._logprob_programs[bucket]
        return lambda params, *arguments: program(params[-1], *arguments)

    def activation_bytes(self, stage: int, alive: int) -> int:
        """Every stage but the first holds what the one before sent it, too."""
        received = max((x.size * x.dtype.itemsize for x in self._hidden.values()), default=0)
        return super().activation_bytes(stage, alive) + (alive * received if stage else 0)

    def _run(
        self,
        programs: list[Any],
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
        (caches[-1], rows), last_tokens[lane], result, hidden = programs[-1](
            params[-1], (caches[-1], state.rows), uploaded[-1], given, last_tokens[lane]
        )
        fed[lane] = jax.device_put(last_tokens[lane], self._shardings[0])
        return PipelineState(caches, rows, last_tokens, fed), result, hidden

    def _parts(self, key: ProgramKey) -> list[tuple[int, ProgramKey]]:
        """What each stage runs: the sampling mode concerns the last one only."""
        bucket, last = key[0], len(self._stages) - 1
        return [*((index, (bucket, None)) for index in range(last)), (last, key)]

    def _program(self, index: int, part: ProgramKey, mode: SamplingMode) -> Any:
        program = self._programs.get((index, part))
        if program is None:
            bucket = part[0]
            self._check_allowed(f"stage {index + 1} of {bucket} in sampling mode {mode.name}")
            program = self._compile(self._lower(index, part), bucket.num_tokens, index)
            self._programs[index, part] = program
        return program

    def _options(self, stage: ModelStage, mode: SamplingMode | None) -> StepOptions:
        mesh = stage.mesh if stage.mesh.size > 1 else None
        return replace(self._common.step(mode), merge=stage.merge, mesh=mesh)

    def _packed(self, index: int, bucket: Bucket) -> Any:
        size = self.layout(bucket).size
        return jax.ShapeDtypeStruct((size,), np.int32, sharding=self._shardings[index])

    def _function(self, index: int, part: ProgramKey) -> Any:
        bucket, mode = part
        stage = self._stages[index]
        functions = {0: run_first, len(self._stages) - 1: run_last}
        return partial(
            functions.get(index, run_middle),
            stage=stage.stage,
            layout=self.layout(bucket),
            options=self._options(stage, mode),
        )

    def _arguments(self, index: int, bucket: Bucket) -> tuple[Any, ...]:
        """Shapes of what a stage's program takes."""
        params, cache = self._params[index], self._state.caches[index]
        packed = self._packed(index, bucket)
        if index == 0:
            return params, cache, packed, self._state.fed[0]
        if bucket not in self._hidden:
            first = self._function(0, (bucket, None))
            self._hidden[bucket] = jax.eval_shape(first, *self._arguments(0, bucket))[1]
        x = self._hidden[bucket]
        x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._shardings[index])
        if index < len(self._stages) - 1:
            return params, cache, packed, x
        return params, (cache, self._state.rows), packed, x, self._state.last_tokens[0]

    def _lower(self, index: int, part: ProgramKey) -> Any:
        arguments = self._arguments(index, part[0])
        kept = jax.tree.map(lambda leaf: leaf.sharding, arguments[1])
        count = 3 if index == len(self._stages) - 1 else 1
        jitted = jax.jit(
            self._function(index, part),
            donate_argnums=(1,),
            out_shardings=(kept, *[self._shardings[index]] * count),
        )
        return jitted.trace(*arguments).lower()

    def _lower_logprobs(self, bucket: Bucket) -> Any:
        last = len(self._stages) - 1
        function = self._function(last, (bucket, None))
        hidden = jax.eval_shape(function, *self._arguments(last, bucket))[3]
        options = self._options(self._stages[last], None)
        return lower_logprobs(self._params[last], hidden, options, self.sharding)
