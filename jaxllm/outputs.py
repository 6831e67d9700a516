"""All that passes between scheduler, runner, engine and the front: plain records."""

from dataclasses import dataclass, field
from typing import Literal

from jaxllm.request import Request

FinishReason = Literal["stop", "length", "abort", "error"]

NO_TOKEN = -1
"""In ModelRunnerOutput.token_ids: this request sampled nothing in this step."""
NON_FINITE = -2
"""In ModelRunnerOutput.token_ids: the logits held NaN or infinity; nothing was sampled."""


# Hundreds of these are made a step: a frozen dataclass takes five times as long to make.
@dataclass(slots=True)
class ScheduledRequest:
    """What one request does in one step.

    Attributes:
        start: position of its first new token (tokens before it are in the cache).
        num_new_tokens: positions start … start + num_new_tokens - 1 are computed.
        samples: whether a token is sampled after the last of them.
        output_index: how many output tokens precede the sampled one.
        admitted: first step since it got its slot: per-slot device state is set anew.
    """

    request: Request
    slot: int
    start: int
    num_new_tokens: int
    samples: bool
    output_index: int
    admitted: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. Requests with one new token stand first, in slot order of arrival.

    Attributes:
        lane: to which all its requests belong; steps of other lanes share none with it.
    """

    requests: list[ScheduledRequest]
    lane: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(r.num_new_tokens for r in self.requests)

    @property
    def decode_only(self) -> bool:
        return all(r.num_new_tokens == 1 for r in self.requests)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs at one position: the token itself first, then the top ones in falling order.

    Attributes:
        rank: 1-based rank of the token itself in the whole vocabulary.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step gave, in the order of SchedulerOutput.requests.

    Attributes:
        token_ids: the sampled id, NO_TOKEN or NON_FINITE.
        logprobs: None where the request asked for none or sampled nothing.
        prompt_logprobs: request_id -> one entry for each prompt token that a position of this
            step's chunk predicts: position p predicts token p + 1, so the first token has none.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)


@dataclass(slots=True)
class EngineOutput:
    """News of one sequence after a step; crosses the process border.

    Attributes:
        stop_reason: the stop token id that ended it; None for eos or another reason.
        error: why it failed, where finish_reason is "error".
    """

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for /metrics and /health; counters are since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    """Blocks that no request holds, cached ones included."""
    num_cached_blocks: int = 0
    """Free blocks whose content can still be hit."""
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_steps: int = 0
    last_step_time: float = 0.0
    """time.monotonic() of the last finished step, in the engine's process."""


@dataclass(slots=True)
class Logprob:
    """One entry of a logprobs dict: token id -> Logprob."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the n completions of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request's completions so far, under vLLM's field names."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
