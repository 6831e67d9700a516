"""Ahead-of-time compilation, and none after the warm-up."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.runner.batch_layout import BatchLayout
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.compiler_options import Options, gpu_options
from jaxllm.runner.mesh import TP_AXIS, mesh_devices
from jaxllm.runner.program_builder import Job, ProgramBuilder
from jaxllm.runner.program_cache import ProgramCache
from jaxllm.runner.program_context import tree_hash
from jaxllm.runner.sampler import SamplingMode
from jaxllm.runner.step import StepOptions, prompt_logprobs, run_sampler

logger = logging.getLogger(__name__)

ProgramKey = tuple[Bucket, SamplingMode | None]
LOGPROB_ROWS = 256
"""Prompt positions whose logprobs are computed at a time."""


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def shardings_of(tree: Any) -> Any:
    """The shardings of a tree of arrays."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def mode_label(mode: SamplingMode | None) -> str:
    """For a program's name."""
    return "any" if mode is None else mode.name.lower()


@dataclass(frozen=True)
class ProgramOptions:
    """What all of an engine's programs have in common.

    Attributes:
        step: sampling mode -> what a step's program depends on beside its bucket.
        modes: the sampling modes that get samplers of their own, the lesser first; (None,) leaves
            the mode to run time.
        hidden: dtype and size of a token's hidden state.
        num_devices: that run a program together.
        sum_kernels: see `gpu_options`.
        lazy: compile on first use, and do not mind.
        cache: of compiled programs, if they are kept.
    """

    step: Callable[[SamplingMode | None], StepOptions]
    table_width: int
    modes: tuple[SamplingMode | None, ...]
    hidden: tuple[Any, int]
    num_devices: int
    sum_kernels: bool
    gpu: bool
    lazy: bool
    warn_only: bool
    cache: ProgramCache | None = None


class Compiler(ProgramBuilder):
    """What the compiled steps of one program and those of several stages share.

    The sampler is a program of its own, so that the sampling modes of a bucket share the model's.

    Args:
        params: of the part of the model that makes the logits, or shapes of them.
        sampler: shapes of the sampler's state.
        sharding: of a step's numbers on the devices that have the logits.
        last: the stage of these devices.
    """

    num_steps = 1
    """Decode steps of the programs that `steps` gives."""

    def __init__(
        self,
        common: ProgramOptions,
        params: Any,
        sampler: Any,
        sharding: NamedSharding,
        last: int = 0,
    ) -> None:
        super().__init__(common.cache)
        self._common, self._last = common, last
        self._head_params, self._sampler_state = abstract(params), abstract(sampler)
        self._head_hash, self._sampler_hash = tree_hash(params), tree_hash(sampler)
        self.sharding = sharding
        self._layouts: dict[Bucket, BatchLayout] = {}
        self._samplers: dict[tuple[int, SamplingMode | None], Any] = {}
        self._logprob_programs: dict[Bucket, Any] = {}
        self._warm = False

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
        return bucket, next(m for m in self._common.modes if m is None or m >= mode)

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
        """Makes the programs of every bucket and mode (see `ProgramBuilder.build_all`)."""
        self.build_all(list(self.jobs(list(buckets))), threads, log)

    def seal(self) -> None:
        """Ends the warm-up: from now on a missing program is an error (unless lazy)."""
        self._warm = True

    def prompt_logprobs(self, bucket: Bucket) -> Any:
        """The program that turns hidden states of a mixed bucket into prompt logprobs."""
        if bucket not in self._logprob_programs:
            self._check_allowed(f"prompt logprobs of {bucket}")
            self._build(self._logprobs_job(bucket))
        return self._logprob_programs[bucket]

    def _sampler(self, bucket: Bucket, mode: SamplingMode) -> Any:
        """The program from logits to tokens: (state, for the sampler) -> (state, result)."""
        key = bucket.num_requests, self.key(bucket, mode)[1]
        if key not in self._samplers:
            self._check_allowed(f"{bucket} in sampling mode {mode.name}")
            self._build(self._sampler_job(*key))
        return self._samplers[key]

    def _keys(self, buckets: list[Bucket]) -> list[ProgramKey]:
        return [(bucket, mode) for bucket in buckets for mode in self._common.modes]

    def _shared_jobs(self, buckets: list[Bucket]) -> Iterable[Job]:
        """The prompt logprobs and the samplers."""
        for bucket in buckets:
            if not bucket.decode_only:
                yield self._logprobs_job(bucket)
        for key in dict.fromkeys((b.num_requests, mode) for b, mode in self._keys(buckets)):
            yield self._sampler_job(*key)

    def _logprobs_job(self, bucket: Bucket) -> Job:
        store = partial(self._logprob_programs.__setitem__, bucket)
        lower = partial(self._lower_logprobs, bucket)
        name = f"logprobs-{bucket.label}"
        return Job(name, self._head_hash, store, lower, bucket.num_tokens, self._last)

    def _sampler_job(self, num_requests: int, mode: SamplingMode | None) -> Job:
        key = num_requests, mode
        store = partial(self._samplers.__setitem__, key)
        lower = partial(self._lower_sampler, *key)
        name = f"sampler-{num_requests}-{mode_label(mode)}"
        return Job(name, self._sampler_hash, store, lower, num_requests, self._last)

    def _packed(self, bucket: Bucket, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct((self.layout(bucket).size,), np.int32, sharding=sharding)

    def _logits_sharding(self) -> NamedSharding:
        return NamedSharding(self.sharding.mesh, PartitionSpec(None, TP_AXIS))

    def _lower_sampler(self, num_requests: int, mode: SamplingMode | None) -> Any:
        layout = self.layout(Bucket(num_requests, num_requests, True))
        state, sharding = self._sampler_state, self._logits_sharding()
        shape = num_requests, state[0].logit_bias.shape[1]
        given = (
            jax.ShapeDtypeStruct((layout.sampler_size,), np.int32, sharding=self.sharding),
            jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding),
        )
        function = partial(run_sampler, layout=layout, options=self._common.step(mode))
        shardings = self._where_shared(shardings_of(state), self.sharding)
        jitted = jax.jit(function, donate_argnums=0, out_shardings=shardings)
        return jitted.trace(state, given).lower()

    def _lower_logprobs(self, bucket: Bucket) -> Any:
        """The program that turns a mixed step's hidden states into prompt logprobs."""
        dtype, size = self._common.hidden
        hidden, start, targets = (
            jax.ShapeDtypeStruct(shape, kind, sharding=self.sharding)
            for shape, kind in (
                ((bucket.num_tokens, size), dtype),
                ((), np.int32),
                ((min(LOGPROB_ROWS, bucket.num_tokens),), np.int32),
            )
        )
        function = partial(prompt_logprobs, options=self._common.step(None))
        return jax.jit(function).trace(self._head_params, hidden, start, targets).lower()

    def _where_shared(self, *shardings: Any) -> tuple[Any, ...] | None:
        """Of a program's results; one device leaves nothing to say."""
        return shardings if self.sharding.mesh.size > 1 else None

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
        if not common.gpu:
            return None
        return gpu_options(num_tokens, common.num_devices, sum_kernels=common.sum_kernels)

    def _devices(self, stage: int) -> list[Any]:
        return mesh_devices(self.sharding)
