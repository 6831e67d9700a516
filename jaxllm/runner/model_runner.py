"""ModelRunner: owns parameters, cache and programs, and runs what the scheduler decided."""

import atexit
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.outputs import ScheduledRequest, SchedulerOutput
from jaxllm.runner import kv_cache
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.build import make_buckets, make_programs, make_state_shapes
from jaxllm.runner.compiler import LOGPROB_ROWS
from jaxllm.runner.input_batch import InputBatch
from jaxllm.runner.mesh import upload
from jaxllm.runner.pending import PendingLogprobs, PendingStep, prompt_logprobs_left
from jaxllm.runner.sampler import SamplingMode, row_setter
from jaxllm.runner.step import allocate
from jaxllm.runner.weights import ModelStage, Params, StagedParams
from jaxllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# A thread of XLA's takes Python's lock when a copy to the host is done, also after its reader has
# gone on. If the interpreter is ending by then, the process aborts, as a short script's may.
atexit.register(time.sleep, 0.05)


def _needs_rows(params: SamplingParams) -> bool:
    """Whether the request needs its own SamplerRows (see sampler.py)."""
    return bool(params.has_penalties or params.logit_bias or params.min_tokens)


def sampling_mode(params: SamplingParams) -> SamplingMode:
    """The least mode that serves a request."""
    if _needs_rows(params) or params.logprobs is not None:
        return SamplingMode.FULL
    if params.greedy:
        return SamplingMode.GREEDY
    if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
        return SamplingMode.FULL
    return SamplingMode.RANDOM


class ModelRunner:
    """Runs steps on the devices. Holds no queue and takes no decision.

    Args:
        config: resolved (see EngineConfig.resolve).
        stages: the model's pipeline stages, or the one that is all of it.
        params: its arrays: those of each stage, where there are several.
        cache_shape: what the cache holds a token.
        num_blocks: cache blocks to allocate.
    """

    def __init__(
        self,
        config: EngineConfig,
        stages: list[ModelStage],
        params: Params | StagedParams,
        *,
        cache_shape: kv_cache.CacheShape,
        num_blocks: int,
        vocab_size: int,
    ) -> None:
        assert config.max_num_seqs
        self._config = config
        self.stages = stages
        self.params: Any = params
        self.cache_shape = cache_shape
        self._vocab_size = vocab_size
        self._gpu = stages[0].mesh.devices.flat[0].platform == "gpu"
        self.buckets = make_buckets(config, gpu=self._gpu)
        self._shapes = make_state_shapes(config, cache_shape, num_blocks, vocab_size, stages)
        self._state: Any = self._shapes
        self.programs = make_programs(config, stages, params, self._shapes)
        self._input = InputBatch(
            config.max_num_seqs,
            self.programs.table_width,
            config.block_size,
            num_blocks * config.block_size,
        )
        self._set_row = row_setter(self._shapes.rows)
        self._dirty_rows: set[int] = set()
        self._slot_modes = [SamplingMode.GREEDY] * config.max_num_seqs

    def warm_up(self, log: Callable[[str], None] = logger.info) -> None:
        """Compiles all programs, allocates the cache and runs each program twice, on padding.

        Compiling comes first, while there is room: XLA tries out kernels on scratch memory.
        Twice, because it captures a CUDA graph on the second run.
        """
        start = time.perf_counter()
        if not self._config.enforce_eager:
            self.programs.compile_all(self.buckets, threads=16 if self._gpu else 2, log=log)
        self._state = allocate(self._shapes)
        if self._config.enforce_eager:
            return
        compiled = time.perf_counter()
        nothing = SchedulerOutput([])
        self._reset_row(0, None)
        # Decode first: a mixed step's sampler is that of the decode step of as many requests, and
        # has run by then, so that the long steps run in one mode only.
        for bucket in sorted(self.buckets, key=lambda bucket: not bucket.decode_only):
            # One mode a program: several may share one.
            keys = {self.programs.key(bucket, m): m for m in reversed(SamplingMode)}
            modes = [*keys.values()] if bucket.decode_only else [SamplingMode.GREEDY]
            for mode in modes * (2 if self._gpu else 1):
                hidden = self._dispatch(nothing, bucket, mode)[1]
                if self.programs.has_steps(self.programs.key(bucket, mode)):
                    self._dispatch_steps(nothing, bucket, mode)
            if not bucket.decode_only:
                rows = np.zeros(min(LOGPROB_ROWS, bucket.num_tokens), np.int32)
                self._put_and_run_logprobs(bucket, hidden, 0, rows)
        jax.block_until_ready(self._state)
        self.programs.seal()
        log(
            f"{self.programs.report()} in {compiled - start:.1f} s, "
            f"{time.perf_counter() - compiled:.1f} s to warm up"
        )

    def can_execute(self, step: SchedulerOutput) -> int:
        """How many steps like this decode step, one after the other, one program would run."""
        if not step.decode_only or any(item.admitted for item in step.requests):
            return 1
        key = self.programs.key(self.buckets.fit(step), self._mode(step))
        return self.programs.num_steps if self.programs.has_steps(key) else 1

    def execute(self, steps: list[SchedulerOutput]) -> PendingStep:
        """Gives steps to the device and returns at once.

        Args:
            steps: one, or as many as `can_execute` says, all with the same requests.
        """
        step = steps[0]
        for item in step.requests:
            if item.admitted:
                self._admit(item)
        prompt_logprobs = any(map(prompt_logprobs_left, step.requests))
        bucket = self.buckets.fit(step, mixed=prompt_logprobs)
        hidden = None
        if len(steps) > 1:
            result = self._dispatch_steps(step, bucket, self._mode(step))
        else:
            result, hidden = self._dispatch(step, bucket, self._mode(step))
        result.copy_to_host_async()
        pending = self._prompt_logprobs(step, bucket, hidden) if prompt_logprobs else []
        return PendingStep(steps, result, pending, self._config.max_logprobs)

    def _admit(self, item: ScheduledRequest) -> None:
        params = item.request.sampling_params
        self._slot_modes[item.slot] = sampling_mode(params)
        if _needs_rows(params) or item.slot in self._dirty_rows:
            self._reset_row(item.slot, item)

    def _mode(self, step: SchedulerOutput) -> SamplingMode:
        return max(self._slot_modes[item.slot] for item in step.requests)

    def _dispatch(
        self, step: SchedulerOutput, bucket: Bucket, mode: SamplingMode
    ) -> tuple[jax.Array, jax.Array | None]:
        program = self.programs.step(bucket, mode, step.lane)
        uploaded = self._upload(step, bucket, mode)
        self._state, result, hidden = program(self.params, self._state, uploaded)
        return result, hidden

    def _dispatch_steps(
        self, step: SchedulerOutput, bucket: Bucket, mode: SamplingMode
    ) -> jax.Array:
        program = self.programs.steps(bucket, mode)
        uploaded = self._upload(step, bucket, mode)
        self._state, results = program(self.params, self._state, uploaded)
        return results

    def _upload(self, step: SchedulerOutput, bucket: Bucket, mode: SamplingMode) -> Any:
        return self.programs.upload(self._input.pack(step, self.programs.layout(bucket), mode))

    def _reset_row(self, slot: int, item: ScheduledRequest | None) -> None:
        """Sets a slot's SamplerRows for the request that now owns it; neutral for None."""
        vocab, padded = self._vocab_size, self._shapes.rows.logit_bias.shape[1]
        prompt = np.zeros(padded, np.bool_)
        counts = np.zeros(padded, np.int32)
        bias = np.zeros(padded, np.float32)
        stop = np.zeros(padded, np.bool_)
        self._dirty_rows.discard(slot)
        if item is not None and _needs_rows(item.request.sampling_params):
            request, params = item.request, item.request.sampling_params
            prompt[request.prompt_token_ids] = True
            np.add.at(counts, request.token_ids[request.num_prompt_tokens :], 1)
            for token, value in (params.logit_bias or {}).items():
                bias[token] = value
            stop[[token for token in request.stop_ids if token < vocab]] = True
            self._dirty_rows.add(slot)
        rows = self._set_row(self._state.rows, slot, prompt, counts, bias, stop)
        self._state = replace(self._state, rows=rows)

    def _put_and_run_logprobs(
        self, bucket: Bucket, hidden: Any, start: int, targets: np.ndarray
    ) -> jax.Array:
        placed = upload((np.int32(start), targets), self.programs.sharding)
        return self.programs.prompt_logprobs(bucket)(self.params, hidden, *placed)

    def _prompt_logprobs(
        self, step: SchedulerOutput, bucket: Bucket, hidden: jax.Array | None
    ) -> list[PendingLogprobs]:
        """Starts the prompt logprobs that this step's chunks give."""
        pending: list[PendingLogprobs] = []
        offset = 0
        rows = min(LOGPROB_ROWS, bucket.num_tokens)
        for item in step.requests:
            request, wanted = item.request, item.request.sampling_params.prompt_logprobs
            count = prompt_logprobs_left(item)
            tokens = request.prompt_token_ids[item.start + 1 : item.start + 1 + count]
            for done in range(0, count, rows):
                part = tokens[done : done + rows]
                # The slice must lie inside the bucket: near its end it starts earlier.
                start = min(offset + done, bucket.num_tokens - rows)
                first = offset + done - start
                targets = np.zeros(rows, np.int32)
                targets[first : first + len(part)] = part
                array = self._put_and_run_logprobs(bucket, hidden, start, targets)
                array.copy_to_host_async()
                pending.append(PendingLogprobs(request.request_id, part, first, array, wanted or 0))
            offset += item.num_new_tokens
        return pending
