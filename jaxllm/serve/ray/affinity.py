"""Requests that begin alike go to the replica that holds their prefix, unless it is too busy."""

import hashlib
import random
from collections import Counter
from typing import Any

import msgspec
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

CHARACTERS_PER_TOKEN = 4
PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


def affinity_key(path: str, body: bytes, characters: int) -> str:
    """A digest of how the prompt begins; "" if there is none to go by.

    Of a conversation it covers the messages up to the user's first, `characters` of each: later
    turns keep the key, while conversations under one system prompt differ.
    """
    if path not in PATHS or not characters:
        return ""
    try:
        request = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return ""  # the replica says what is wrong with it
    if not isinstance(request, dict):
        return ""
    beginning = _of_messages if path.endswith("/chat/completions") else _of_prompt
    text = beginning(request, characters)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest() if text else ""


def _of_prompt(request: dict[str, Any], characters: int) -> str:
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return repr(prompt[: -(-characters // CHARACTERS_PER_TOKEN)]) if prompt else ""
    return prompt[:characters] if isinstance(prompt, str) else ""


def _of_messages(request: dict[str, Any], characters: int) -> str:
    messages = request.get("messages")
    parts: list[str] = []
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            break
        content, role = message.get("content"), message.get("role")
        text = content if isinstance(content, str) else repr(content)
        parts.append(f"{role}\n{text[:characters]}")
        if role == "user":
            break
    return "\n".join(parts)


class PrefixAffinityRouter(RequestRouter):
    """Ranks the replicas for a call with the keyword arguments `affinity` and `avoid`.

    A key belongs to the replica with the highest digest of both, so every front chooses alike
    without asking, and a lost replica moves its own keys only.
    """

    def initialize_state(self, slack: int = 8) -> None:
        """`slack`: requests by which the key's replica may be busier than the least busy one."""
        self.slack = slack
        self.under_way: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas: the one to take, then those to take if it has no room."""
        call = pending_request.kwargs if pending_request is not None else {}
        avoid, key = call.get("avoid", ()), call.get("affinity", "")
        replicas = [r for r in candidate_replicas if r.replica_id.unique_id not in avoid]
        replicas = replicas or list(candidate_replicas)
        if not replicas:
            return []
        random.shuffle(replicas)  # or the first of equally busy ones would get everything
        best = min(replicas, key=self._busy)
        if key:
            home = max(replicas, key=lambda r: _rank(key, r.replica_id.unique_id))
            if self._busy(home) <= self._busy(best) + self.slack:
                best = home
        return [[best], [r for r in replicas if r is not best]]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self.under_way[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self.under_way[replica_id] -= 1
        if self.under_way[replica_id] <= 0:
            del self.under_way[replica_id]

    def _busy(self, replica: RunningReplica) -> int:
        """Requests there: Ray's figure has those of other fronts, but is late in a burst."""
        told = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return max(told, self.under_way[replica.replica_id])


def _rank(key: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{key} {replica}".encode(), digest_size=8).digest()
