"""Which requests compute which tokens in the next step."""

from jaxllm.outputs import (
    NO_TOKEN,
    NON_FINITE,
    EngineOutput,
    EngineStats,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from jaxllm.request import Request, RequestStatus
from jaxllm.scheduler import limits
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.counters import Counters
from jaxllm.scheduler.prompt_logprobs import PromptLogprobs
from jaxllm.scheduler.running_set import Lane, RunningSet
from jaxllm.scheduler.waiting_queue import WaitingQueue


class Scheduler:
    """First come, first served; continuous batching, chunked prefill, preemption by recompute.

    A step holds one token of each request that is decoding, then chunks of prompts, oldest first,
    up to `max_num_batched_tokens`. When the blocks run out, the request admitted last gives up
    its own and is computed anew later.

    `schedule` may be called while the tokens of earlier steps are unknown: it assumes that every
    request goes on, and `update` may be late by any number of steps, but sees every step that
    `schedule` gave, in order. A stop is then noticed late; the surplus tokens are dropped. Ends
    by length are foreseen. What `schedule` gives must be dispatched to the device before any
    other method is called: it hands blocks and slots on at once, relying on steps running in
    order.

    A running request belongs to a lane. Lanes take turns, an idle one is passed over, and a step
    holds requests of its lane only: so many steps can be under way without one waiting for what
    another samples. Newcomers are shared out evenly. With one lane, each step takes all.

    Args:
        max_num_seqs: slots, so the most requests in a step.
        max_num_batched_tokens: most tokens in a step; at least `max_num_seqs`.
        max_model_len: most tokens of a request, prompt and output.
        num_lanes: pipeline stages.
        prefill_first: decoding waits while prompts fill whole steps: larger batches, but stalls.
        non_finite_error: what a request with non-finite logits is told.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_lanes: int = 1,
        prefill_first: bool = False,
        non_finite_error: str = limits.NON_FINITE_ERROR,
    ):
        limits.check_sizes(max_num_seqs, max_num_batched_tokens, max_model_len, block_pool)
        self.block_pool = block_pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self._prefill_first = prefill_first
        self._non_finite_error = non_finite_error
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running = RunningSet(max_num_seqs, num_lanes)
        self._prompt_logprobs = PromptLogprobs()
        # Filled to the last block, decoding requests would preempt the newcomer at once.
        self._spare_blocks = block_pool.num_blocks // 100
        self._counters = Counters()

    def add(self, request: Request) -> None:
        """Takes in a new request and sets its `max_tokens`.

        Raises:
            ValueError: its prompt is empty or too long, or its id is in use.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is still in use.")
        pool = self.block_pool
        limits.check_prompt(request, self.max_model_len, pool)
        request.max_tokens = limits.resolve_max_tokens(request, self.max_model_len, pool)
        self._requests[request.request_id] = request
        delivers = self._prompt_logprobs.add(request)
        shared = delivers or request.num_prompt_tokens > pool.block_size
        self._waiting.add(request, awaits_siblings=shared)

    def abort(self, request_id: str) -> bool:
        """Ends a request at once; False if there is none of that id (it may have ended)."""
        if request_id not in self._requests:
            return False
        self._finish(self._requests[request_id])
        return True

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if nothing can be computed before an `update`."""
        for lane in self._running.in_turn():
            requests = self._schedule_lane(lane)
            if requests:
                self._running.serve(lane)
                return SchedulerOutput(requests, lane.index)
        return None

    @property
    def num_steps_ahead(self) -> int:
        """How many steps are worth giving to the device beyond the one whose tokens are awaited:
        more of them would only wait for each other, and newcomers for them."""
        return max(1, self._running.num_busy_lanes)

    def is_steady(self, count: int) -> bool:
        """Whether the next `count` steps hold one token each of the same requests.

        `count` must not exceed a block, so that each request needs one more at most.
        """
        if len(self._waiting) or self.block_pool.num_free < len(self._running):
            return False
        return self._running.all_decode(count)

    def update(self, step: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineOutput]:
        """Applies what a step gave; returns the news of every request that has any."""
        outputs: list[EngineOutput] = []
        for scheduled, token, logprobs in zip(
            step.requests, result.token_ids, result.logprobs, strict=True
        ):
            request = scheduled.request
            if scheduled.samples:
                request.num_inflight -= 1
            if token == NON_FINITE:
                self.block_pool.forget(request)
            if request.status is RequestStatus.FINISHED:
                continue  # surplus: it ended while this step was under way
            if token == NO_TOKEN and scheduled.samples:
                raise RuntimeError(f"the runner gave no token for request {request.request_id}.")
            prompt_logprobs = self._prompt_logprobs.take(scheduled, result)
            if scheduled.samples or prompt_logprobs or token == NON_FINITE:
                outputs.append(self._apply(request, token, logprobs, prompt_logprobs))
        self._counters.step_done()
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot of queues, blocks and counters; prefix cache counters are in tokens."""
        return self._counters.stats(
            self.block_pool, num_running=len(self._running), num_waiting=len(self._waiting)
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless slots, queues and blocks agree with the live requests."""
        queued = [request.request_id for request in (*self._running, *self._waiting)]
        assert sorted(queued) == sorted(self._requests), f"{queued} are not {[*self._requests]}"
        self._running.check_integrity(self.block_pool.block_size)
        self._waiting.check_integrity()
        self._prompt_logprobs.check_integrity(self._requests.values())
        self.block_pool.check_integrity(self._requests.values())

    def _schedule_lane(self, lane: Lane) -> list[ScheduledRequest]:
        """What the lane computes in its next step, single tokens first."""
        singles, chunks = list[ScheduledRequest](), list[ScheduledRequest]()
        if not (self._prefill_first and self._prompts_fill_a_step(lane)):
            self._schedule_decodes(lane.decoding, singles)
        budget = self.max_num_batched_tokens - len(singles)
        for scheduled in self._schedule_prefills(lane, budget):
            (singles if scheduled.num_new_tokens == 1 else chunks).append(scheduled)
            # Not earlier: within the step that fills them, blocks must not be found.
            self._after_prefill(scheduled)
        return singles + chunks

    def _schedule_decodes(self, decoding: list[Request], singles: list[ScheduledRequest]) -> None:
        """Adds a token of each decoding request, preempting others where blocks run out."""
        block_size = self.block_pool.block_size
        index = 0
        while index < len(decoding):  # preemption shortens it from the end
            request = decoding[index]
            start = request.num_computed_tokens
            output_index = start + 1 - len(request.prompt_token_ids)
            index += 1
            if output_index >= request.max_tokens:
                continue  # its last token is in flight
            if start == len(request.block_ids) * block_size:
                self.block_pool.register(request)
                while not self.block_pool.num_free and request.slot >= 0:
                    self._preempt_last()
                if request.slot < 0:
                    break  # it was the last one itself
                request.block_ids += self.block_pool.allocate(1)
            request.num_computed_tokens = start + 1
            request.num_inflight += 1
            slot = request.slot
            singles.append(ScheduledRequest(request, slot, start, 1, True, output_index, False))

    def _schedule_prefills(self, lane: Lane, budget: int) -> list[ScheduledRequest]:
        """A chunk of each running prefill, then of newcomers, of at most `budget` tokens in all."""
        scheduled: list[ScheduledRequest] = []
        admitted = False
        queue = lane.prefilling[::-1]
        while budget > 0:
            if queue:
                request = queue.pop()
            elif (newcomer := self._admit(lane)) is not None:
                request, admitted = newcomer, True
            else:
                break
            chunk = self._running.schedule_chunk(request, budget, admitted)
            budget -= chunk.num_new_tokens
            scheduled.append(chunk)
        return scheduled

    def _after_prefill(self, scheduled: ScheduledRequest) -> None:
        request = scheduled.request
        self.block_pool.register(request)
        if scheduled.samples:
            self._running.lanes[request.lane].start_decoding(request)
            for follower in self._waiting.release(request):
                self._prompt_logprobs.drop(follower)

    def _admit(self, lane: Lane) -> Request | None:
        """The oldest waiting request, now with a slot and blocks for all its tokens, if it fits."""
        request = self._waiting.head
        # A preempted request's tokens in flight must come back before it can be computed anew.
        if request is None or request.num_inflight or not self._has_room(lane):
            return None
        # Prompt logprobs come from computing: a cached position has none.
        read = not self._prompt_logprobs.pending(request)
        spare = self._spare_blocks if len(self._running) else 0
        if not self.block_pool.acquire(request, read_cache=read, spare=spare):
            return None
        self._waiting.pop()
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self._counters.prompt_tokens += request.num_prompt_tokens
        self._running.add(request, lane)
        return request

    def _has_room(self, lane: Lane) -> bool:
        return self._running.has_room(lane, self._waiting, self.block_pool)

    def _prompts_fill_a_step(self, lane: Lane) -> bool:
        missing = self.max_num_batched_tokens - lane.num_tokens_to_prefill
        slots, pool = self._running.num_free_slots, self.block_pool
        return missing <= 0 or (
            self._has_room(lane) and self._waiting.holds(missing, slots, pool, self._spare_blocks)
        )

    def _preempt_last(self) -> None:
        """Takes blocks and slot from the request admitted last; it is computed anew later."""
        request = self._running.last
        self.block_pool.register(request)
        self._running.remove(request)
        self.block_pool.release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._counters.preemptions += 1
        self._waiting.put_back(request)

    def _finish(self, request: Request, *, reusable: bool = True) -> None:
        """Takes all from a request; `reusable`: others may find what it computed."""
        running = request.slot >= 0
        if running:
            if reusable:
                self.block_pool.register(request)
            self._running.remove(request)
            self.block_pool.release(request)
        request.status = RequestStatus.FINISHED
        self._waiting.leave(request, queued=not running)
        self._prompt_logprobs.drop(request)
        del self._requests[request.request_id]

    def _apply(
        self,
        request: Request,
        token: int,
        logprobs: TokenLogprobs | None,
        prompt_logprobs: list[TokenLogprobs] | None,
    ) -> EngineOutput:
        finish_reason = stop_reason = error = None
        new_token_ids = []
        if token == NON_FINITE:
            finish_reason, error = "error", self._non_finite_error
        elif token != NO_TOKEN:
            new_token_ids = [token]
            request.token_ids.append(token)
            self._counters.generation_tokens += 1
            finish_reason, stop_reason = limits.find_stop(request)
        if finish_reason is not None:
            self._finish(request, reusable=error is None)
        return EngineOutput(
            request.request_id,
            new_token_ids,
            [] if logprobs is None else [logprobs],
            prompt_logprobs,
            finish_reason,
            stop_reason,
            request.num_cached_tokens,
            error,
        )
