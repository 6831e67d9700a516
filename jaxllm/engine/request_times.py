"""Latencies of sequences as the front sees them, for whoever observes them."""

from dataclasses import dataclass

from jaxllm.outputs import EngineOutput
from jaxllm.request import Request


class Observer:
    """Hears of latencies (seconds) and ends of sequences; this one does nothing with them."""

    def first_token(self, seconds: float) -> None:
        """Time from the request's arrival to its first token."""

    def inter_token(self, seconds: float) -> None:
        """Time between two tokens of a sequence."""

    def finished(
        self, reason: str, seconds: float, prompt_tokens: int, generation_tokens: int
    ) -> None:
        """A sequence ended by itself; `seconds` since its arrival."""

    def aborted(self) -> None:
        """A sequence was aborted, by a client that left or by a shutdown."""


@dataclass(slots=True)
class RequestTimes:
    """When one sequence came and gave its last token; time.monotonic() seconds."""

    arrival: float
    prompt_tokens: int
    last_token: float | None = None
    generation_tokens: int = 0

    @classmethod
    def of(cls, request: Request) -> "RequestTimes":
        return cls(request.arrival_time, request.num_prompt_tokens)

    def take(self, output: EngineOutput, now: float, observer: Observer) -> bool:
        """Reports the news of a step; returns whether the sequence has ended."""
        count = len(output.new_token_ids)
        if count:
            if self.last_token is None:
                observer.first_token(now - self.arrival)
            else:
                for _ in range(count):
                    observer.inter_token((now - self.last_token) / count)
            self.last_token = now
            self.generation_tokens += count
        if output.finish_reason is not None:
            self.finish(output.finish_reason, now, observer)
        return output.finished

    def finish(self, reason: str, now: float, observer: Observer) -> None:
        observer.finished(reason, now - self.arrival, self.prompt_tokens, self.generation_tokens)
