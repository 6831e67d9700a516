"""Compiled steps: built ahead of time in parallel threads, and none after that."""

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxllm.runner.batch_layout import BatchLayout
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.compiler_options import Options, gpu_options
from jaxllm.runner.sampler import SamplingMode
from jaxllm.runner.step import StepOptions, prompt_logprobs, run_step, run_steps

logger = logging.getLogger(__name__)

ProgramKey = tuple[Bucket, SamplingMode | None]
MULTI_STEP_REQUESTS = 8
"""Largest decode bucket with programs of several steps."""
LOGPROB_ROWS = 256
"""Prompt positions whose logprobs are computed at a time."""


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


class StepPrograms:
    """Bucket and sampling mode -> compiled step.

    Args:
        params, state: the real arrays, or shapes of them with shardings.
        packed_sharding: where a step's upload goes.
        modes: bucket -> the sampling modes that get programs of their own, the lesser first;
            (None,) leaves the mode to run time.
        num_steps: decode steps of the programs that `steps` gives.
        lazy: compile on first use, and do not mind.
    """

    def __init__(
        self,
        params: Any,
        state: Any,
        *,
        options: Callable[[SamplingMode | None], StepOptions],
        table_width: int,
        packed_sharding: Any,
        modes: Callable[[Bucket], tuple[SamplingMode | None, ...]],
        num_steps: int,
        lazy: bool,
        warn_only: bool,
    ) -> None:
        self._params, self._state = abstract(params), abstract(state)
        self._options = options
        self.table_width = table_width
        self._packed_sharding = packed_sharding
        self._gpu = packed_sharding.mesh.devices.flat[0].platform == "gpu"
        self._modes = modes
        self._programs: dict[ProgramKey, Any] = {}
        self._logprob_programs: dict[Bucket, Any] = {}
        self._multi_programs: dict[ProgramKey, Any] = {}
        self.num_steps = num_steps
        self._layouts: dict[Bucket, BatchLayout] = {}
        self._lazy = lazy
        self._warn_only = warn_only
        self._warm = False
        self.num_compiled = 0
        self.peak_temp_bytes = 0
        self.peak_output_bytes = 0

    def layout(self, bucket: Bucket) -> BatchLayout:
        """The upload's layout for `bucket`."""
        if bucket not in self._layouts:
            self._layouts[bucket] = BatchLayout(bucket, self.table_width)
        return self._layouts[bucket]

    def compile_all(
        self, buckets: Iterable[Bucket], threads: int, log: Callable[[str], None]
    ) -> None:
        """Compiles every bucket and mode; tracing is serial, XLA runs in `threads`.

        A bucket's first mode comes before all others': its matrix products are tuned once, and
        the other modes find the result.
        """
        buckets = list(buckets)
        keys = [(bucket, mode) for bucket in buckets for mode in self._modes(bucket)]
        keys.sort(key=lambda key: self._modes(key[0]).index(key[1]))
        jobs: list[tuple[Callable[[Any], None], Callable[[], Any], int]] = [
            (
                partial(self._programs.__setitem__, key),
                partial(self._lower, *key),
                key[0].num_tokens,
            )
            for key in keys
        ]
        for key in filter(self.has_steps, keys):
            store = partial(self._multi_programs.__setitem__, key)
            jobs.append((store, partial(self._lower_steps, *key), key[0].num_tokens))
        for bucket in buckets:
            if not bucket.decode_only:
                store = partial(self._logprob_programs.__setitem__, bucket)
                jobs.append((store, partial(self._lower_logprobs, bucket), bucket.num_tokens))
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            futures = [
                (store, pool.submit(self._compile, lower(), num_tokens))
                for store, lower, num_tokens in jobs
            ]
            for done, (store, future) in enumerate(futures, 1):
                store(future.result())
                if done % 8 == 0 or done == len(futures):
                    log(f"compiled {done}/{len(futures)} ({time.perf_counter() - start:.1f} s)")

    def seal(self) -> None:
        """Ends the warm-up: from now on a missing program is an error (unless lazy)."""
        self._warm = True

    @property
    def num_compiled_steps(self) -> int:
        """Programs of several steps that have been compiled."""
        return len(self._multi_programs)

    def has_steps(self, key: ProgramKey) -> bool:
        """Whether a bucket and mode have a program of several steps: where the host is slower."""
        bucket, mode = key
        few = bucket.decode_only and bucket.num_requests <= MULTI_STEP_REQUESTS
        return self.num_steps > 1 and few and mode is not SamplingMode.FULL

    def key(self, bucket: Bucket, mode: SamplingMode) -> ProgramKey:
        """The least program that serves `mode`."""
        return bucket, next(m for m in self._modes(bucket) if m is None or m >= mode)

    def steps(self, bucket: Bucket, mode: SamplingMode) -> Any:
        """The program for `num_steps` decode steps; only where `has_steps`."""
        key = self.key(bucket, mode)
        if key not in self._multi_programs:
            self._check_allowed(f"{self.num_steps} steps of {bucket}")
            self._multi_programs[key] = self._compile(self._lower_steps(*key), bucket.num_tokens)
        return self._multi_programs[key]

    def step(self, bucket: Bucket, mode: SamplingMode) -> Any:
        """The program for a step."""
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

    def _check_allowed(self, what: str) -> None:
        if self._lazy or not self._warm:
            return
        message = (
            f"No program was compiled for {what} before serving began; "
            "--allow-compile-after-warmup lets it compile now, --enforce-eager always."
        )
        if not self._warn_only:
            raise RuntimeError(message)
        logger.warning(message)

    def _compiler_options(self, num_tokens: int) -> Options | None:
        return gpu_options(num_tokens, self._packed_sharding.mesh.size) if self._gpu else None

    def _packed(self, bucket: Bucket) -> jax.ShapeDtypeStruct:
        size = self.layout(bucket).size
        return jax.ShapeDtypeStruct((size,), np.int32, sharding=self._packed_sharding)

    def _results(self, count: int) -> Any:
        """The shardings of a step's new state, where it was, and of its `count` results."""
        if self._packed_sharding.mesh.size == 1:
            return None
        state = jax.tree.map(lambda leaf: leaf.sharding, self._state)
        return state, *[self._packed_sharding] * count

    def _lower(self, bucket: Bucket, mode: SamplingMode | None) -> Any:
        step = partial(run_step, layout=self.layout(bucket), options=self._options(mode))
        jitted = jax.jit(step, donate_argnums=(1,), out_shardings=self._results(2))
        return jitted.trace(self._params, self._state, self._packed(bucket)).lower()

    def _lower_steps(self, bucket: Bucket, mode: SamplingMode | None) -> Any:
        steps = partial(
            run_steps,
            layout=self.layout(bucket),
            options=self._options(mode),
            count=self.num_steps,
        )
        jitted = jax.jit(steps, donate_argnums=(1,), out_shardings=self._results(1))
        return jitted.trace(self._params, self._state, self._packed(bucket)).lower()

    def _lower_logprobs(self, bucket: Bucket) -> Any:
        options = self._options(None)
        function = partial(
            prompt_logprobs,
            merge=options.merge,
            max_logprobs=options.max_logprobs,
            mesh=options.mesh,
        )
        hidden = jax.eval_shape(
            partial(run_step, layout=self.layout(bucket), options=options),
            self._params,
            self._state,
            self._packed(bucket),
        )[2]
        assert hidden is not None
        scalar, rows = (
            jax.ShapeDtypeStruct(shape, np.int32, sharding=self._packed_sharding)
            for shape in ((), (min(LOGPROB_ROWS, bucket.num_tokens),))
        )
        hidden = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=self._packed_sharding)
        return jax.jit(function).trace(self._params, hidden, scalar, rows).lower()

    def _compile(self, lowered: Any, num_tokens: int = 0) -> Any:
        compiled = lowered.compile(compiler_options=self._compiler_options(num_tokens))
        self.num_compiled += 1
        memory = compiled.memory_analysis()
        if memory is not None:
            self.peak_temp_bytes = max(self.peak_temp_bytes, memory.temp_size_in_bytes)
            fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
            self.peak_output_bytes = max(self.peak_output_bytes, fresh)
        return compiled
