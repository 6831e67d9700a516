"""Requests without a slot, in order of arrival."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxllm.request import Request, RequestStatus
from jaxllm.scheduler.block_pool import BlockPool


@dataclass(slots=True)
class _Group:
    leader: Request
    followers: list[Request] = field(default_factory=list)


class WaitingQueue:
    """First come, first served; but siblings wait until one of them has computed their prompt.

    The n sequences of a request have one group_id and one prompt. The first leads; the others
    stand apart until `release`, so that they find its blocks and hold up nobody. If the leader
    leaves before, the next one leads.
    """

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()
        self._groups: dict[str, _Group] = {}
        self._num_followers = 0
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._queue) + self._num_followers

    @property
    def head(self) -> Request | None:
        """The next request to be admitted."""
        return self._queue[0] if self._queue else None

    def num_newcomers(self, slots: int, pool: BlockPool) -> int:
        """How many requests may soon run with so many free slots, if all were like the head."""
        if not self._queue:
            return 0
        fitting = max(1, pool.num_free // pool.num_blocks_for(len(self._queue[0].token_ids)))
        return min(fitting, len(self), slots)

    def holds(self, tokens: int, slots: int, pool: BlockPool, spare: int) -> bool:
        """Whether the first requests, as many as find slots and blocks, have that many tokens."""
        blocks = pool.num_free - spare
        for request in self._queue:
            blocks -= pool.num_blocks_for(len(request.token_ids))
            if tokens <= 0 or slots == 0 or blocks < 0 or request.num_inflight:
                break
            tokens, slots = tokens - len(request.token_ids), slots - 1
        return tokens <= 0

    def add(self, request: Request, *, awaits_siblings: bool) -> None:
        """Takes in a new request; the flag tells whether siblings have a prompt worth awaiting."""
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        if awaits_siblings and request.group_id is not None:
            group = self._groups.get(request.group_id)
            if group is not None:
                group.followers.append(request)
                self._num_followers += 1
                return
            self._groups[request.group_id] = _Group(request)
        self._queue.append(request)

    def pop(self) -> Request:
        """Takes out the head."""
        return self._queue.popleft()

    def put_back(self, request: Request) -> None:
        """Takes in a request that arrived earlier, at its old place in the order."""
        index = 0
        for other in self._queue:
            if other.arrival_index > request.arrival_index:
                break
            index += 1
        self._queue.insert(index, request)

    def release(self, leader: Request) -> list[Request]:
        """The siblings that waited for the leader's prompt and may be admitted from now on."""
        group = self._groups.get(leader.group_id) if leader.group_id is not None else None
        if group is None or group.leader is not leader:
            return []
        del self._groups[leader.group_id]  # type: ignore[arg-type]
        for follower in group.followers:
            self.put_back(follower)
        self._num_followers -= len(group.followers)
        return group.followers

    def leave(self, request: Request, *, queued: bool) -> None:
        """Forgets a request that ended; `queued` tells whether it was here or running."""
        group = self._groups.get(request.group_id) if request.group_id is not None else None
        if group is not None and group.leader is not request and request in group.followers:
            group.followers.remove(request)
            self._num_followers -= 1
            return
        if queued:
            self._queue.remove(request)
        if group is None or group.leader is not request:
            return
        if group.followers:
            group.leader = group.followers.pop(0)
            self._num_followers -= 1
            self.put_back(group.leader)
        else:
            del self._groups[request.group_id]  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Request]:
        yield from self._queue
        for group in self._groups.values():
            yield from group.followers

    def check_integrity(self) -> None:
        """Raises AssertionError if a waiting request has a slot or blocks, or is out of order."""
        arrivals = [request.arrival_index for request in self._queue]
        assert arrivals == sorted(arrivals), f"not first come, first served: {arrivals}"
        for request in self:
            waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert waits, f"{request.request_id} waits, but is {request.status}"
            assert request.slot == -1, f"{request.request_id} waits but has a slot"
            assert not request.block_ids, f"{request.request_id} waits but has blocks"
        count = sum(len(group.followers) for group in self._groups.values())
        assert count == self._num_followers, f"{count} siblings, not {self._num_followers}"
