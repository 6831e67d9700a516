"""LLMEngine: scheduler and runner in a loop that stays a step ahead of the device."""

import logging
import random
from collections import deque

from jaxllm.config import EngineConfig
from jaxllm.engine.startup import Log, load_model
from jaxllm.outputs import EngineOutput, EngineStats, SchedulerOutput
from jaxllm.request import Request
from jaxllm.runner.pending import PendingStep
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class LLMEngine:
    """Token ids in, token ids out; no text, no HTTP, one thread.

    Args:
        config: as the user gave it; `self.config` is the resolved one.
        offline: throughput defaults (`LLM`) rather than the server's.

    Raises:
        ValueError, FileNotFoundError: the model cannot be served as asked; says why.
    """

    def __init__(self, config: EngineConfig, *, offline: bool = True, log: Log = logger.info):
        model = load_model(config, offline=offline, log=log)
        self.config = model.config
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.generation_config = model.generation_config
        self.memory = min(model.memory, key=lambda plan: plan.budget)
        self.stage_memory = model.memory
        self.phases = model.phases
        assert self.config.max_num_seqs
        assert self.config.max_num_batched_tokens
        assert self.config.max_model_len
        self.runner = model.runner
        self.scheduler = Scheduler(
            BlockPool(
                self.memory.num_blocks,
                self.config.block_size,
                enable_prefix_caching=self.config.enable_prefix_caching,
            ),
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.config.max_model_len,
            num_lanes=self.config.pipeline_parallel_size,
            prefill_first=offline,
        )
        self._pending: deque[PendingStep] = deque()
        self._seeds = random.Random(self.config.seed)

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: it can never be served: a parameter or its length is out of range.
        """
        params = request.sampling_params
        params.check_vocab(self.vocab_size, self.config.max_logprobs)
        ids = request.prompt_token_ids
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"prompt token id {token} is not in the vocabulary (size {self.vocab_size})."
                )
        if params.seed is None:
            request.seed = self._seeds.getrandbits(32)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its blocks; an unknown id is no error: it may have ended."""
        self.scheduler.abort(request_id)

    @property
    def has_pending(self) -> bool:
        """Whether the device has been given steps whose tokens have not been taken in."""
        return bool(self._pending)

    def has_unfinished(self) -> bool:
        return bool(self._pending) or self.scheduler.has_unfinished()

    def step(self) -> list[EngineOutput]:
        """Dispatches the next step, then takes in an earlier one, while the device works.

        Beyond the step whose tokens are awaited the device has one more, or with pipeline stages
        as many as there are.
        """
        scheduled = self._schedule()
        if scheduled:
            self._pending.append(self.runner.execute(scheduled))
        ahead = self.scheduler.num_steps_ahead
        if not self._pending or (scheduled and len(self._pending) <= ahead):
            return []
        pending = self._pending.popleft()
        outputs: list[EngineOutput] = []
        for step, result in zip(pending.steps, pending.results(), strict=True):
            outputs += self.scheduler.update(step, result)
        return outputs

    def _schedule(self) -> list[SchedulerOutput]:
        """The next step, and as many equal ones as the device can take at once."""
        step = self.scheduler.schedule()
        if step is None:
            return []
        count = self.runner.can_execute(step)
        if count == 1 or not self.scheduler.is_steady(count - 1):
            return [step]
        more = [self.scheduler.schedule() for _ in range(count - 1)]
        return [step, *filter(None, more)]

    def stats(self) -> EngineStats:
        """A snapshot for /metrics and /health."""
        return self.scheduler.stats()
