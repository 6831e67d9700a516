"""The compiled steps of an engine whose devices all run the same program."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxllm.runner.buckets import Bucket
from jaxllm.runner.compiler import (
    Compiler,
    ProgramKey,
    ProgramOptions,
    abstract,
    mode_label,
    shardings_of,
)
from jaxllm.runner.mesh import upload
from jaxllm.runner.program_builder import Job
from jaxllm.runner.program_context import tree_hash
from jaxllm.runner.sampler import SamplingMode
from jaxllm.runner.step import DeviceState, run_model, run_steps

Step = tuple[DeviceState, jax.Array, jax.Array | None]


class StepPrograms(Compiler):
    """Bucket and sampling mode -> compiled step.

    Args:
        params, state: the real arrays, or shapes of them with shardings.
        packed_sharding: where a step's upload goes.
        num_steps: decode steps of the programs that `steps` gives.
        most_requests: of the largest decode bucket with such programs.
    """

    def __init__(
        self,
        params: Any,
        state: DeviceState,
        common: ProgramOptions,
        *,
        packed_sharding: NamedSharding,
        num_steps: int,
        most_requests: int,
    ) -> None:
        super().__init__(common, params, (state.rows, state.last_tokens), packed_sharding)
        self._params, self._state = abstract(params), abstract(state)
        self._hash = tree_hash((params, state))
        self._programs: dict[Bucket, Any] = {}
        self._multi_programs: dict[ProgramKey, Any] = {}
        self.num_steps, self._most_requests = num_steps, most_requests

    def jobs(self, buckets: list[Bucket]) -> Iterable[Job]:
        for bucket in buckets:
            yield self._step_job(bucket)
        for key in filter(self.has_steps, self._keys(buckets)):
            yield self._steps_job(key)
        yield from self._shared_jobs(buckets)

    def upload(self, packed: np.ndarray) -> jax.Array:
        """A step's numbers, on all devices."""
        return upload(packed, self.sharding)

    def has_steps(self, key: ProgramKey) -> bool:
        bucket, mode = key
        few = bucket.decode_only and bucket.num_requests <= self._most_requests
        return self.num_steps > 1 and few and mode is not SamplingMode.FULL

    def steps(self, bucket: Bucket, mode: SamplingMode) -> Any:
        key = self.key(bucket, mode)
        if key not in self._multi_programs:
            self._check_allowed(f"{self.num_steps} steps of {bucket}")
            self._build(self._steps_job(key))
        return self._multi_programs[key]

    def step(self, bucket: Bucket, mode: SamplingMode, lane: int) -> Callable[..., Step]:
        """A step: (params, state, upload) -> (state, result, hidden or None). There is one lane
        only."""
        if bucket not in self._programs:
            self._check_allowed(str(bucket))
            self._build(self._step_job(bucket))
        return partial(_run, self._programs[bucket], self._sampler(bucket, mode))

    def _step_job(self, bucket: Bucket) -> Job:
        store = partial(self._programs.__setitem__, bucket)
        lower = partial(self._lower, bucket)
        return Job(f"step-{bucket.label}", self._hash, store, lower, bucket.num_tokens)

    def _steps_job(self, key: ProgramKey) -> Job:
        bucket, mode = key
        store = partial(self._multi_programs.__setitem__, key)
        lower = partial(self._lower_steps, bucket, mode)
        name = f"{self.num_steps}-steps-{bucket.label}-{mode_label(mode)}"
        return Job(name, self._hash, store, lower, bucket.num_tokens)

    def _lower(self, bucket: Bucket) -> Any:
        step = partial(run_model, layout=self.layout(bucket), options=self._common.step(None))
        cache, for_sampler = shardings_of(self._state.kv_cache), self._logits_sharding()
        shardings = self._where_shared(cache, (self.sharding, for_sampler), self.sharding)
        jitted = jax.jit(step, donate_argnums=(1,), out_shardings=shardings)
        state, packed = self._state, self._packed(bucket, self.sharding)
        return jitted.trace(self._params, state.kv_cache, state.last_tokens, packed).lower()

    def _lower_steps(self, bucket: Bucket, mode: SamplingMode | None) -> Any:
        steps = partial(
            run_steps,
            layout=self.layout(bucket),
            options=self._common.step(mode),
            count=self.num_steps,
        )
        shardings = self._where_shared(shardings_of(self._state), self.sharding)
        jitted = jax.jit(steps, donate_argnums=(1,), out_shardings=shardings)
        packed = self._packed(bucket, self.sharding)
        return jitted.trace(self._params, self._state, packed).lower()


def _run(program: Any, sampler: Any, params: Any, state: DeviceState, uploaded: jax.Array) -> Step:
    cache, given, hidden = program(params, state.kv_cache, state.last_tokens, uploaded)
    (rows, last_tokens), result = sampler((state.rows, state.last_tokens), given)
    return DeviceState(cache, last_tokens, rows), result, hidden
