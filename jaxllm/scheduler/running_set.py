"""Requests with a slot, in order of admission."""

from collections.abc import Iterator

from jaxllm.outputs import ScheduledRequest
from jaxllm.request import Request, RequestStatus


class RunningSet:
    """Slots, and who has them.

    Attributes:
        decoding: requests with one token to compute a step, oldest first.
        prefilling: requests with more of their prompt to compute; admitted after all of
            `decoding`, since a chunk is only ever cut short where the budget of a step ends.
    """

    def __init__(self, max_num_seqs: int):
        self.decoding: list[Request] = []
        self.prefilling: list[Request] = []
        self._max_num_seqs = max_num_seqs
        self._free_slots = list(reversed(range(max_num_seqs)))

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def __iter__(self) -> Iterator[Request]:
        yield from self.decoding
        yield from self.prefilling

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return not self._free_slots

    @property
    def last(self) -> Request:
        """The request admitted last."""
        return (self.prefilling or self.decoding)[-1]

    def all_decode(self, count: int) -> bool:
        """Whether all requests have at least `count` tokens to decode, and there are any."""
        return (
            bool(self.decoding)
            and not self.prefilling
            and all(
                request.num_computed_tokens + count - len(request.prompt_token_ids)
                < request.max_tokens
                for request in self.decoding
            )
        )

    def add(self, request: Request) -> None:
        """Gives a slot to a request that begins to prefill."""
        request.slot = self._free_slots.pop()
        request.status = RequestStatus.RUNNING
        self.prefilling.append(request)

    def start_decoding(self, request: Request) -> None:
        """Notes that the last chunk of a prefill is scheduled."""
        self.prefilling.remove(request)
        self.decoding.append(request)

    def remove(self, request: Request) -> None:
        """Takes the slot back."""
        (self.decoding if request in self.decoding else self.prefilling).remove(request)
        self._free_slots.append(request.slot)
        request.slot = -1

    def schedule_chunk(self, request: Request, budget: int, admitted: bool) -> ScheduledRequest:
        """The next at most `budget` tokens of a prefill, counted as computed from now on."""
        start = request.num_computed_tokens
        remaining = len(request.token_ids) - start
        count = min(remaining, budget)
        samples = count == remaining
        request.num_computed_tokens = start + count
        request.num_inflight += samples
        index = request.num_output_tokens
        return ScheduledRequest(request, request.slot, start, count, samples, index, admitted)

    def check_integrity(self, block_size: int) -> None:
        """Raises AssertionError if a slot is lost or used twice, or a request lacks blocks."""
        slots = sorted(self._free_slots + [request.slot for request in self])
        assert slots == list(range(self._max_num_seqs)), f"slots lost or used twice: {slots}"
        for request in self:
            name, room = request.request_id, len(request.block_ids) * block_size
            assert request.status is RequestStatus.RUNNING, f"{name} is not running"
            assert request.num_computed_tokens <= room, f"{name} outgrew its blocks"
