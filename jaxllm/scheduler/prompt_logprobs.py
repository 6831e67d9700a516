"""How far the logprobs of prompts have been delivered."""

from collections.abc import Iterable

from jaxllm.outputs import ModelRunnerOutput, ScheduledRequest, TokenLogprobs
from jaxllm.request import Request


class PromptLogprobs:
    """The requests that deliver the logprobs of their prompt: one of each group of siblings."""

    def __init__(self) -> None:
        self._num_sent: dict[Request, int] = {}

    def add(self, request: Request) -> bool:
        """Takes in a new request; whether it asks for any."""
        if request.sampling_params.prompt_logprobs is None:
            return False
        self._num_sent[request] = 0
        return True

    def drop(self, request: Request) -> None:
        """Forgets a request that ended, or whose sibling delivers."""
        self._num_sent.pop(request, None)

    def pending(self, request: Request) -> bool:
        """Whether prompt positions must be computed for it, even if they are in the cache."""
        num_sent = self._num_sent.get(request)
        return num_sent is not None and num_sent < request.num_prompt_tokens - 1

    def take(
        self, scheduled: ScheduledRequest, result: ModelRunnerOutput
    ) -> list[TokenLogprobs] | None:
        """What a step gave beyond what was delivered before a preemption; None if nothing."""
        num_sent = self._num_sent.get(scheduled.request) if result.prompt_logprobs else None
        if num_sent is None:
            return None
        entries = result.prompt_logprobs.get(scheduled.request.request_id, [])
        fresh = entries[max(0, num_sent - scheduled.start) :]
        self._num_sent[scheduled.request] = num_sent + len(fresh)
        return fresh or None

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raises AssertionError if an ended request is still known."""
        ended = [request.request_id for request in self._num_sent.keys() - set(requests)]
        assert not ended, f"ended requests still deliver prompt logprobs: {ended}"
