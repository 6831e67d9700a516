"""A request as the scheduler and the runner see it: token ids in, token ids out."""

import enum
import time
from dataclasses import dataclass, field

from jaxllm.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands. PREEMPTED waits like WAITING, with output tokens already made."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to be generated (a request with n > 1 becomes n of these).

    The scheduler owns and changes it; the runner only reads it, within `execute`.

    Attributes:
        token_ids: prompt and output tokens known to the host, in order.
        num_computed_tokens: leading tokens whose keys and values are in the cache, or will be
            once the steps already given to the device have run.
        num_inflight: tokens sampled by steps given to the device whose ids have not come back.
        slot: row of the device's per-request state while running, else -1.
        lane: the group of requests that it runs with (see Scheduler).
        group_id: common to the n sequences of one request, which share the prompt's blocks.
        seed: of the sampler; filled in by the engine where the request names none.
        block_hashes: chained hashes of the leading full blocks of `token_ids`, as far as known.
        num_hashed_blocks: leading blocks of `block_ids` that were offered to the prefix cache.
        arrival_index: its place in the order of arrival.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    group_id: str | None = None
    cache_salt: str | None = None
    arrival_time: float = field(default_factory=time.monotonic)

    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_inflight: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    slot: int = -1
    lane: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_hashed_blocks: int = 0
    arrival_index: int = 0
    max_tokens: int = 0  # resolved by the scheduler: never more than the context allows
    stop_ids: frozenset[int] = frozenset()  # eos (unless ignored) and stop_token_ids

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        params = self.sampling_params
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        self.stop_ids = eos | frozenset(params.stop_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known to the host."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens and those in flight."""
        return len(self.token_ids) + self.num_inflight
