"""Ahead-of-time compilation, in parallel threads, and none after the warm-up."""

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxllm.runner.batch_layout import BatchLayout
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.compiler_options import Options, gpu_options
from jaxllm.runner.sampler import SamplingMode
from jaxllm.runner.step import StepOptions, prompt_logprobs

logger = logging.getLogger(__name__)

ProgramKey = tuple[Bucket, SamplingMode | None]
LOGPROB_ROWS = 256
"""Prompt positions whose logprobs are computed at a time."""


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def lower_logprobs(params: Any, hidden: Any, options: StepOptions, sharding: NamedSharding) -> Any:
    """The program that turns a mixed step's `hidden` (shapes) into prompt logprobs."""
    function = partial(
        prompt_logprobs, merge=options.merge, max_logprobs=options.max_logprobs, mesh=options.mesh
    )
    count = min(LOGPROB_ROWS, hidden.shape[0])
    scalar, rows = (
        jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding) for shape in ((), (count,))
    )
    hidden = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=sharding)
    return jax.jit(function).trace(params, hidden, scalar, rows).lower()


@dataclass(frozen=True, slots=True)
class Job:
    """A program to be compiled.

    Attributes:
        stage: whose devices run it.
    """

    store: Callable[[Any], None]
    lower: Callable[[], Any]
    num_tokens: int
    stage: int = 0


@dataclass(slots=True)
class _Peak:
    """The most bytes that any program of a stage takes while it runs, and leaves."""

    scratch: int = 0
    results: int = 0


@dataclass(frozen=True)
class ProgramOptions:
    """What all of an engine's programs have in common.

    Attributes:
        step: sampling mode -> what a step's program depends on beside its bucket.
        modes: bucket -> the sampling modes that get programs of their own, the lesser first;
            (None,) leaves the mode to run time.
        num_devices: that run a program together.
        lazy: compile on first use, and do not mind.
    """

    step: Callable[[SamplingMode | None], StepOptions]
    table_width: int
    modes: Callable[[Bucket], tuple[SamplingMode | None, ...]]
    num_devices: int
    gpu: bool
    lazy: bool
    warn_only: bool


class Compiler:
    """What the compiled steps of one program and those of several stages share."""

    num_steps = 1
    """Decode steps of the programs that `steps` gives."""

    def __init__(self, common: ProgramOptions) -> None:
        self._common = common
        self._layouts: dict[Bucket, BatchLayout] = {}
        self._warm = False
        self._peaks: dict[int, _Peak] = {}
        self.num_compiled = 0

    @property
    def table_width(self) -> int:
        return self._common.table_width

    def layout(self, bucket: Bucket) -> BatchLayout:
        """The upload's layout for `bucket`."""
        if bucket not in self._layouts:
            self._layouts[bucket] = BatchLayout(bucket, self.table_width)
        return self._layouts[bucket]

    def key(self, bucket: Bucket, mode: SamplingMode) -> ProgramKey:
        """The least program that serves `mode`."""
        return bucket, next(m for m in self._common.modes(bucket) if m is None or m >= mode)

    def has_steps(self, key: ProgramKey) -> bool:
        """Whether a bucket and mode have a program of several steps: where the host is slower."""
        return False

    def steps(self, bucket: Bucket, mode: SamplingMode) -> Any:
        """The program for `num_steps` decode steps; only where `has_steps`."""
        raise NotImplementedError

    def jobs(self, buckets: list[Bucket]) -> Iterable[Job]:
        """All that there is to compile, in the order of urgency."""
        raise NotImplementedError

    def compile_all(
        self, buckets: Iterable[Bucket], threads: int, log: Callable[[str], None]
    ) -> None:
        """Compiles every bucket and mode; tracing is serial, XLA runs in `threads`."""
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            futures = [
                (job, pool.submit(self._compile, job.lower(), job.num_tokens, job.stage))
                for job in self.jobs(list(buckets))
            ]
            for done, (job, future) in enumerate(futures, 1):
                job.store(future.result())
                if done % 8 == 0 or done == len(futures):
                    log(f"compiled {done}/{len(futures)} ({time.perf_counter() - start:.1f} s)")

    def seal(self) -> None:
        """Ends the warm-up: from now on a missing program is an error (unless lazy)."""
        self._warm = True

    def activation_bytes(self, stage: int, alive: int) -> int:
        """What a stage's largest program takes, with the results of `alive` steps."""
        peak = self._peaks.get(stage, _Peak())
        return peak.scratch + alive * peak.results

    def _keys(self, buckets: list[Bucket]) -> list[ProgramKey]:
        """A bucket's first mode comes before all others': its matrix products are tuned once, and
        the other modes find the result."""
        modes = self._common.modes
        keys = [(bucket, mode) for bucket in buckets for mode in modes(bucket)]
        return sorted(keys, key=lambda key: modes(key[0]).index(key[1]))

    def _check_allowed(self, what: str) -> None:
        if self._common.lazy or not self._warm:
            return
        message = (
            f"No program was compiled for {what} before serving began; "
            "--allow-compile-after-warmup lets it compile now, --enforce-eager always."
        )
        if not self._common.warn_only:
            raise RuntimeError(message)
        logger.warning(message)

    def _compiler_options(self, num_tokens: int) -> Options | None:
        common = self._common
        return gpu_options(num_tokens, common.num_devices) if common.gpu else None

    def _compile(self, lowered: Any, num_tokens: int = 0, stage: int = 0) -> Any:
        compiled = lowered.compile(compiler_options=self._compiler_options(num_tokens))
        self.num_compiled += 1
        memory = compiled.memory_analysis()
        if memory is not None:
            peak = self._peaks.setdefault(stage, _Peak())
            peak.scratch = max(peak.scratch, memory.temp_size_in_bytes)
            fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
            peak.results = max(peak.results, fresh)
        return compiled
