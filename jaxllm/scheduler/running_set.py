"""Requests with a slot, in order of admission."""

from collections.abc import Iterator

from jaxllm.outputs import ScheduledRequest
from jaxllm.request import Request, RequestStatus
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.waiting_queue import WaitingQueue


class Lane:
    """Requests that run together, in the same steps.

    Attributes:
        decoding: requests with one token to compute a step, oldest first.
        prefilling: requests with more of their prompt to compute; admitted after all of
            `decoding`, since a chunk is only ever cut short where the budget of a step ends.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.decoding: list[Request] = []
        self.prefilling: list[Request] = []

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def num_tokens_to_prefill(self) -> int:
        return sum(len(r.token_ids) - r.num_computed_tokens for r in self.prefilling)

    def start_decoding(self, request: Request) -> None:
        """Notes that the last chunk of a prefill is scheduled."""
        self.prefilling.remove(request)
        self.decoding.append(request)


class RunningSet:
    """Slots, and who has them, and the lanes."""

    def __init__(self, max_num_seqs: int, num_lanes: int = 1):
        self.lanes = [Lane(index) for index in range(num_lanes)]
        self._max_num_seqs = max_num_seqs
        self._free_slots = list(reversed(range(max_num_seqs)))
        self._admitted: dict[Request, None] = {}
        self._served = self.lanes[-1]

    def __len__(self) -> int:
        return len(self._admitted)

    def __iter__(self) -> Iterator[Request]:
        """In order of admission."""
        yield from self._admitted

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def last(self) -> Request:
        """The request admitted last."""
        return next(reversed(self._admitted))

    @property
    def num_busy_lanes(self) -> int:
        """Lanes with requests; all of them while any prefills, whose chunks need no sampled
        token, so that steps of one lane need not wait for each other."""
        if any(lane.prefilling for lane in self.lanes):
            return len(self.lanes)
        return sum(1 for lane in self.lanes if lane.decoding)

    def in_turn(self) -> list[Lane]:
        """The lanes in the order of their turns, beginning after the one `serve` named last."""
        first = self._served.index + 1
        return self.lanes[first:] + self.lanes[:first]

    def serve(self, lane: Lane) -> None:
        """Notes that a lane has had its turn."""
        self._served = lane

    def has_room(self, lane: Lane, waiting: WaitingQueue, pool: BlockPool) -> bool:
        """Whether a slot is free, and the lane has less than its share of all requests and those
        that may soon run."""
        newcomers = waiting.num_newcomers(len(self._free_slots), pool)
        share, rest = divmod(len(self) + newcomers, len(self.lanes))
        larger = sum(1 for other in self.lanes if len(other) > share)
        return bool(self._free_slots) and len(lane) < share + (larger < rest)

    def all_decode(self, count: int) -> bool:
        """Whether there is one lane only, all of whose requests have at least `count` tokens to
        decode, and there are any."""
        lane, *others = self.lanes
        return (
            not others
            and bool(lane.decoding)
            and not lane.prefilling
            and all(
                request.num_computed_tokens + count - len(request.prompt_token_ids)
                < request.max_tokens
                for request in lane.decoding
            )
        )

    def add(self, request: Request, lane: Lane) -> None:
        """Gives a slot in `lane` to a request that begins to prefill."""
        request.slot = self._free_slots.pop()
        request.lane = lane.index
        request.status = RequestStatus.RUNNING
        lane.prefilling.append(request)
        self._admitted[request] = None

    def remove(self, request: Request) -> None:
        """Takes the slot back."""
        lane = self.lanes[request.lane]
        (lane.decoding if request in lane.decoding else lane.prefilling).remove(request)
        del self._admitted[request]
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
        """Raises AssertionError if a slot is lost or used twice, lanes are mixed up, or a request
        lacks blocks."""
        slots = sorted(self._free_slots + [request.slot for request in self])
        assert slots == list(range(self._max_num_seqs)), f"slots lost or used twice: {slots}"
        order = list(self)
        for lane in self.lanes:
            members = lane.decoding + lane.prefilling
            wanted = [request for request in order if request.lane == lane.index]
            assert members == wanted, f"lane {lane.index} is not in order of admission"
        for request in order:
            name, room = request.request_id, len(request.block_ids) * block_size
            assert request.status is RequestStatus.RUNNING, f"{name} is not running"
            assert request.num_computed_tokens <= room, f"{name} outgrew its blocks"
