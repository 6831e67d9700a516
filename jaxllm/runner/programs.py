"""The compiled steps of an engine whose devices all run the same program."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxllm.runner.buckets import Bucket
from jaxllm.runner.compiler import (
    Compiler,
    Job,
    ProgramKey,
    ProgramOptions,
    abstract,
    lower_logprobs,
)
from jaxllm.runner.mesh import upload
from jaxllm.runner.sampler import SamplingMode
from jaxllm.runner.step import run_step, run_steps

MULTI_STEP_REQUESTS = 8
"""Largest decode bucket with programs of several steps."""


class StepPrograms(Compiler):
    """Bucket and sampling mode -> compiled step.

    Args:
        params, state: the real arrays, or shapes of them with shardings.
        packed_sharding: where a step's upload goes.
        num_steps: decode steps of the programs that `steps` gives.
    """

    def __init__(
        self,
        params: Any,
        state: Any,
        common: ProgramOptions,
        *,
        packed_sharding: NamedSharding,
        num_steps: int,
    ) -> None:
        super().__init__(common)
        self._params, self._state = abstract(params), abstract(state)
        self.sharding = packed_sharding
        self._programs: dict[ProgramKey, Any] = {}
        self._logprob_programs: dict[Bucket, Any] = {}
        self._multi_programs: dict[ProgramKey, Any] = {}
        self.num_steps = num_steps

    def jobs(self, buckets: list[Bucket]) -> Iterable[Job]:
        keys = self._keys(buckets)
        for key in keys:
            store = partial(self._programs.__setitem__, key)
            yield Job(store, partial(self._lower, *key), key[0].num_tokens)
        for key in filter(self.has_steps, keys):
            store = partial(self._multi_programs.__setitem__, key)
            yield Job(store, partial(self._lower_steps, *key), key[0].num_tokens)
        for bucket in buckets:
            if not bucket.decode_only:
                store = partial(self._logprob_programs.__setitem__, bucket)
                yield Job(store, partial(self._lower_logprobs, bucket), bucket.num_tokens)

    def upload(self, packed: np.ndarray) -> jax.Array:
        """A step's numbers, on all devices."""
        return upload(packed, self.sharding)

    @property
    def num_compiled_steps(self) -> int:
        """Programs of several steps that have been compiled."""
        return len(self._multi_programs)

    def has_steps(self, key: ProgramKey) -> bool:
        bucket, mode = key
        few = bucket.decode_only and bucket.num_requests <= MULTI_STEP_REQUESTS
        return self.num_steps > 1 and few and mode is not SamplingMode.FULL

    def steps(self, bucket: Bucket, mode: SamplingMode) -> Any:
        key = self.key(bucket, mode)
        if key not in self._multi_programs:
            self._check_allowed(f"{self.num_steps} steps of {bucket}")
            self._multi_programs[key] = self._compile(self._lower_steps(*key), bucket.num_tokens)
        return self._multi_programs[key]

    def step(self, bucket: Bucket, mode: SamplingMode, lane: int) -> Any:
        """The program for a step: (params, state, upload) -> (state, result, hidden or None).
        There is one lane only."""
        key = self.key(bucket, mode)
        if key not in self._programs:
            self._check_allowed(f"{bucket} in sampling mode {mode.name}")
            self._programs[key] = self._compile(self._lower(*key), bucket.num_tokens)
        return self._programs[key]

    def prompt_logprobs(self, bucket: Bucket) -> Any:
        """The program that turns hidden states of a mixed bucket into prompt logprobs."""
        if bucket not in self._logprob_programs:
            self._check_allowed(f"prompt logprobs of {bucket}")
            self._logprob_programs[bucket] = self._compile(
                self._lower_logprobs(bucket), bucket.num_tokens
            )
        return self._logprob_programs[bucket]

    def _packed(self, bucket: Bucket) -> jax.ShapeDtypeStruct:
        size = self.layout(bucket).size
        return jax.ShapeDtypeStruct((size,), np.int32, sharding=self.sharding)

    def _results(self, count: int) -> Any:
        """The shardings of a step's new state, where it was, and of its `count` results."""
        if self.sharding.mesh.size == 1:
            return None
        state = jax.tree.map(lambda leaf: leaf.sharding, self._state)
        return state, *[self.sharding] * count

    def _lower(self, bucket: Bucket, mode: SamplingMode | None) -> Any:
        step = partial(run_step, layout=self.layout(bucket), options=self._common.step(mode))
        jitted = jax.jit(step, donate_argnums=(1,), out_shardings=self._results(2))
        return jitted.trace(self._params, self._state, self._packed(bucket)).lower()

    def _lower_steps(self, bucket: Bucket, mode: SamplingMode | None) -> Any:
        steps = partial(
            run_steps,
            layout=self.layout(bucket),
            options=self._common.step(mode),
            count=self.num_steps,
        )
        jitted = jax.jit(steps, donate_argnums=(1,), out_shardings=self._results(1))
        return jitted.trace(self._params, self._state, self._packed(bucket)).lower()

    def _lower_logprobs(self, bucket: Bucket) -> Any:
        options = self._common.step(None)
        step = partial(run_step, layout=self.layout(bucket), options=options)
        hidden = jax.eval_shape(step, self._params, self._state, self._packed(bucket))[2]
        return lower_logprobs(self._params, hidden, options, self.sharding)
