"""What crosses the border between the front and the engine process, and its encoding."""

from typing import Any

import msgspec

from jaxllm.config import EngineConfig
from jaxllm.outputs import EngineOutput, EngineStats
from jaxllm.request import Request
from jaxllm.sampling_params import SamplingParams


class AddRequest(msgspec.Struct, tag="add"):
    """The n sequences of one request; they differ only in id and seed."""

    request_ids: list[str]
    seeds: list[int]
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: list[int]
    group_id: str | None = None
    cache_salt: str | None = None

    @classmethod
    def of(cls, requests: list[Request]) -> "AddRequest":
        """The message for `requests`, which are the sequences of one request."""
        first = requests[0]
        return cls(
            request_ids=[r.request_id for r in requests],
            seeds=[r.seed for r in requests],
            prompt_token_ids=first.prompt_token_ids,
            sampling_params=first.sampling_params,
            eos_token_ids=sorted(first.eos_token_ids),
            group_id=first.group_id,
            cache_salt=first.cache_salt,
        )

    def requests(self) -> list[Request]:
        """The sequences, rebuilt on the engine's side."""
        return [
            Request(
                request_id=request_id,
                prompt_token_ids=self.prompt_token_ids,
                sampling_params=self.sampling_params,
                eos_token_ids=frozenset(self.eos_token_ids),
                seed=seed,
                group_id=self.group_id,
                cache_salt=self.cache_salt,
            )
            for request_id, seed in zip(self.request_ids, self.seeds, strict=True)
        ]


class AbortRequests(msgspec.Struct, tag="abort"):
    request_ids: list[str]


class AskStats(msgspec.Struct, tag="ask_stats"):
    """Asks for a Stats message; also the watchdog's sign of life."""

    ticket: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    pass


class Ready(msgspec.Struct, tag="ready"):
    """The engine is warm; facts of the model that the front needs.

    Attributes:
        config: resolved, so that max_model_len and the like are numbers.
    """

    config: EngineConfig
    vocab_size: int
    eos_token_ids: list[int]
    generation_config: dict[str, Any]
    stats: EngineStats


class Outputs(msgspec.Struct, tag="outputs"):
    """The news of one step; stats come along now and then."""

    outputs: list[EngineOutput]
    stats: EngineStats | None = None


class Rejected(msgspec.Struct, tag="rejected"):
    """The engine refused a request when it was added; nothing of it is kept.

    Attributes:
        internal: a bug of ours and no fault of the request.
    """

    request_ids: list[str]
    message: str
    internal: bool = False


class Stats(msgspec.Struct, tag="stats"):
    ticket: int
    stats: EngineStats


class Failed(msgspec.Struct, tag="failed"):
    """The engine cannot go on: its last message.

    Attributes:
        expected: the message says it all (a bad model, no memory); else `traceback` is wanted.
    """

    message: str
    traceback: str
    expected: bool


ToEngine = AddRequest | AbortRequests | AskStats | Shutdown
ToFront = Ready | Outputs | Rejected | Stats | Failed

_encoder = msgspec.msgpack.Encoder(enc_hook=str)
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_front = msgspec.msgpack.Decoder(ToFront)


def encode(message: ToEngine | ToFront) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    return _to_engine.decode(data)


def decode_to_front(data: bytes) -> ToFront:
    return _to_front.decode(data)
