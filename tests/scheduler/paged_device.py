"""A device to schedule for: it keeps a block cache and continues any prefix by a fixed rule.

It holds in each cache slot what was computed there, a number that depends on all tokens up to
that position. So it notices a block that was shared, freed or handed on wrongly, and a request's
tokens can be told from its prompt alone. Non-finite values spread to all that is computed from
them, as they do in a real cache.
"""

from collections import deque
from collections.abc import Callable
from functools import reduce

from jaxllm.outputs import (
    NO_TOKEN,
    NON_FINITE,
    EngineOutput,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from jaxllm.request import Request
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.running_set import Lane
from jaxllm.scheduler.scheduler import Scheduler

VOCAB_SIZE = 7
EOS = 0
NAN = -1


def state_after(state: int, token: int) -> int:
    """What a position holds, from what the one before it holds and its token."""
    return NAN if state == NAN else (state * 1_000_003 + token + 1) % 2_147_483_647


def sample(state: int) -> int:
    """The token that follows a prefix."""
    return NON_FINITE if state == NAN else (state // 7919) % VOCAB_SIZE


def continuation(prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that follow a prompt, when nothing stops them."""
    state = reduce(state_after, prompt, 1)
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(sample(state))
        state = state_after(state, tokens[-1])
    return tokens


class PagedDevice:
    """Executes steps in order; the tokens that the host does not know yet stay in their slots.

    Attributes:
        infected: requests that met non-finite values which another one had computed.
    """

    def __init__(self, block_size: int):
        self.infected: set[str] = set()
        self._block_size = block_size
        self._cache: dict[int, int] = {}
        self._tokens: dict[tuple[int, int], list[int]] = {}  # of a lane and slot

    def execute(
        self, step: SchedulerOutput, poisoned: Callable[[Request], bool] = lambda request: False
    ) -> ModelRunnerOutput:
        """Runs a step; the logits of requests that are `poisoned` come out as NaN."""
        slots = [scheduled.slot for scheduled in step.requests]
        assert len(set(slots)) == len(slots), f"a slot has two requests: {slots}"
        lanes = {scheduled.request.lane for scheduled in step.requests}
        assert lanes == {step.lane}, f"a step of lane {step.lane} has requests of {lanes}"
        states = [self._read(scheduled) for scheduled in step.requests]
        bad = [r.samples and poisoned(r.request) for r in step.requests]
        states = [NAN if b else state for b, state in zip(bad, states, strict=True)]
        token_ids: list[int] = []
        prompt_logprobs = {}
        for scheduled, state in zip(step.requests, states, strict=True):
            token = NO_TOKEN
            state = self._write(scheduled, state)
            if scheduled.samples:
                token = sample(state)
                self._tokens[scheduled.request.lane, scheduled.slot].append(max(token, 0))
            token_ids.append(token)
            if scheduled.request.sampling_params.prompt_logprobs is not None:
                prompt_logprobs[scheduled.request.request_id] = _prompt_logprobs(scheduled)
        return ModelRunnerOutput(token_ids, [None] * len(token_ids), prompt_logprobs)

    def _read(self, scheduled: ScheduledRequest) -> int:
        """The state before the first new position; checks all cached positions."""
        if scheduled.admitted:
            self._tokens[scheduled.request.lane, scheduled.slot] = list(scheduled.request.token_ids)
        tokens = self._tokens[scheduled.request.lane, scheduled.slot]
        known = scheduled.request.token_ids
        assert tokens[: len(known)] == known, "the slot holds another request's tokens"
        state = 1
        name = scheduled.request.request_id
        for position in range(scheduled.start):
            state = state_after(state, tokens[position])
            found = self._cache.get(self._cache_slot(scheduled.request, position))
            if found == NAN:
                self.infected.add(name)
                return NAN
            assert found == state, f"position {position} of {name} is lost"
        return state

    def _write(self, scheduled: ScheduledRequest, state: int) -> int:
        tokens = self._tokens[scheduled.request.lane, scheduled.slot]
        for position in range(scheduled.start, scheduled.start + scheduled.num_new_tokens):
            state = state_after(state, tokens[position])
            self._cache[self._cache_slot(scheduled.request, position)] = state
        assert scheduled.samples == (scheduled.start + scheduled.num_new_tokens == len(tokens))
        return state

    def _cache_slot(self, request: Request, position: int) -> int:
        block_id = request.block_ids[position // self._block_size]
        return block_id * self._block_size + position % self._block_size


def _prompt_logprobs(scheduled: ScheduledRequest) -> list[TokenLogprobs]:
    request = scheduled.request
    end = min(scheduled.start + scheduled.num_new_tokens, request.num_prompt_tokens - 1)
    positions = range(scheduled.start + 1, end + 1)
    return [TokenLogprobs([request.token_ids[p]], [-float(p)], 1) for p in positions]


class Loop:
    """A scheduler and a device with up to `depth` steps under way when the next is scheduled."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        block_size: int = 4,
        enable_prefix_caching: bool = True,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 64,
        num_lanes: int = 1,
        prefill_first: bool = False,
        depth: int = 0,
    ):
        self.pool = BlockPool(num_blocks, block_size, enable_prefix_caching)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_lanes=num_lanes,
            prefill_first=prefill_first,
        )
        self._last_lane = num_lanes - 1
        self.depth = depth
        self.device = PagedDevice(block_size)
        self.pending: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.outputs: dict[str, list[EngineOutput]] = {}

    def add(
        self,
        request_id: str,
        prompt: int | list[int],
        *,
        group_id: str | None = None,
        cache_salt: str | None = None,
        **params,
    ) -> Request:
        """Adds a request; a prompt given as a length is the same for every request."""
        if isinstance(prompt, int):
            prompt = [i % VOCAB_SIZE for i in range(prompt)]
        params = {"ignore_eos": True, **params}
        request = Request(
            request_id,
            prompt,
            SamplingParams(**params),
            frozenset({EOS}),
            group_id=group_id,
            cache_salt=cache_salt,
        )
        self.scheduler.add(request)
        return request

    def dispatch(
        self, poisoned: Callable[[Request], bool] = lambda request: False
    ) -> SchedulerOutput | None:
        """Schedules a step and gives it to the device."""
        lanes = self.scheduler._running.lanes
        preemptions = self.scheduler.stats().num_preemptions
        ready = [index for index, lane in enumerate(lanes) if _has_work(lane)]
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is not None:
            _check_step(step, self.scheduler)
            if preemptions == self.scheduler.stats().num_preemptions:
                self._check_turn(step.lane, ready)
            self._last_lane = step.lane
            self.pending.append((step, self.device.execute(step, poisoned)))
        return step

    def _check_turn(self, served: int, ready: list[int]) -> None:
        """No lane with work is passed over; one without may begin with a newcomer."""
        count = len(self.scheduler._running.lanes)
        waits = [(lane - self._last_lane - 1) % count for lane in (served, *ready)]
        assert waits[0] == min(waits), f"lane {served} after {self._last_lane}, not one of {ready}"

    def deliver(self) -> list[EngineOutput]:
        """Gives the scheduler the results of the oldest step under way."""
        outputs = self.scheduler.update(*self.pending.popleft())
        self.scheduler.check_integrity()
        for output in outputs:
            news = self.outputs.setdefault(output.request_id, [])
            assert not news or not news[-1].finished, f"{output.request_id} ended twice"
            news.append(output)
        return outputs

    def step(
        self, poisoned: Callable[[Request], bool] = lambda request: False
    ) -> dict[str, tuple[int, int]]:
        """Dispatches a step, reads those that are due; request id -> (start, new tokens)."""
        step = self.dispatch(poisoned)
        while len(self.pending) > (self.depth if step is not None else 0):
            self.deliver()
        requests = step.requests if step is not None else []
        return {r.request.request_id: (r.start, r.num_new_tokens) for r in requests}

    def run(self, most_steps: int = 10_000) -> None:
        """Steps until every request has ended."""
        for _ in range(most_steps):
            if not self.scheduler.has_unfinished() and not self.pending:
                return
            idle = not self.pending
            assert self.step() or not idle, "requests wait, yet nothing can be computed"
        raise AssertionError(f"requests are unfinished after {most_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        """All tokens that a request has given."""
        return [t for output in self.outputs.get(request_id, []) for t in output.new_token_ids]

    def last(self, request_id: str) -> EngineOutput:
        """The latest news of a request."""
        return self.outputs[request_id][-1]


def _has_work(lane: Lane) -> bool:
    unfinished = any(
        request.num_computed_tokens + 1 - request.num_prompt_tokens < request.max_tokens
        for request in lane.decoding
    )
    return unfinished or bool(lane.prefilling)


def _check_step(step: SchedulerOutput, scheduler: Scheduler) -> None:
    assert step.num_tokens <= scheduler.max_num_batched_tokens
    assert len(step.requests) <= scheduler.max_num_seqs
    sizes = [r.num_new_tokens > 1 for r in step.requests]
    assert sizes == sorted(sizes), "requests with one new token must stand first"
    for r in step.requests:
        assert r.slot == r.request.slot
        assert r.num_new_tokens >= 1
        assert 0 <= r.output_index < r.request.max_tokens
        # The last token of a request is sampled, but nothing is ever computed from it.
        last = r.request.num_prompt_tokens + r.request.max_tokens - 1
        assert r.start + r.num_new_tokens <= last
