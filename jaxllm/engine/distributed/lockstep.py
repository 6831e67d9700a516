"""The same calls in the same order on the engines of all processes.

Scheduler and sampler depend on nothing but those calls and their results: no clock, no order of
arrival at a process, no seed that process 0 has not told.
"""

import logging
import zlib
from array import array
from itertools import chain

import zmq

from jaxllm.engine.distributed.facts import facts_of
from jaxllm.engine.distributed.group import Follower, Group, Leader
from jaxllm.engine.distributed.links import Step
from jaxllm.engine.engine_loop import Engine, EngineLoop, ready
from jaxllm.engine.messages import AbortRequests, AddRequest
from jaxllm.engine.messages import encode as encode_to_front
from jaxllm.outputs import EngineOutput, EngineStats
from jaxllm.request import Request

logger = logging.getLogger(__name__)


def run_in_group(engine: Engine, group: Group, inbox: zmq.Socket, outbox: zmq.Socket) -> None:
    """What runs in the engine process of one of several processes, once it is warm.

    Raises:
        ValueError: the processes came to different settings or facts of the model.
        RuntimeError: see `follow`.
    """
    facts = facts_of(
        engine.config,
        **{
            "the number of cache blocks": engine.stats().num_blocks,
            "the vocabulary's size": engine.vocab_size,
        },
    )
    if isinstance(group, Leader):
        group.wait_loaded(facts)
        EngineLoop(LeadingEngine(engine, group), inbox, outbox).run()
        group.end()
    else:
        group.loaded(facts)
        outbox.send(encode_to_front(ready(engine)))
        follow(engine, group)


class LeadingEngine:
    """Process 0's engine: tells the others of every call before it makes it."""

    def __init__(self, engine: Engine, group: Leader) -> None:
        self._engine, self._group = engine, group
        self.config = engine.config
        self.vocab_size = engine.vocab_size
        self.eos_token_ids = engine.eos_token_ids
        self.generation_config = engine.generation_config
        self._digest = 0

    def add_request(self, request: Request) -> None:
        # Before our engine fills in a seed: theirs do the same, also where they refuse it.
        self._group.send(AddRequest.of([request]))
        self._engine.add_request(request)

    def abort(self, request_id: str) -> None:
        self._group.send(AbortRequests([request_id]))
        self._engine.abort(request_id)

    def step(self) -> list[EngineOutput]:
        self._group.send(Step(self._digest))
        outputs = self._engine.step()
        self._digest = digest(outputs, self._digest)
        return outputs

    def has_unfinished(self) -> bool:
        return self._engine.has_unfinished()

    def stats(self) -> EngineStats:
        return self._engine.stats()


def follow(engine: Engine, group: Follower) -> None:
    """Does what process 0 does, until the group ends this process.

    Raises:
        RuntimeError: a step gave something else here than there.
    """
    so_far = 0
    while True:
        match group.receive():
            case AddRequest() as message:
                for request in message.requests():
                    try:
                        engine.add_request(request)
                    except Exception as error:  # process 0 refused it as well, and answers
                        logger.debug("%s was refused: %s", request.request_id, error)
            case AbortRequests(request_ids=request_ids):
                for request_id in request_ids:
                    engine.abort(request_id)
            case Step(digest=expected):
                if expected != so_far:
                    raise RuntimeError(
                        "the steps gave other tokens than in process 0; its devices must be of "
                        "the same kind, and the weights equal."
                    )
                so_far = digest(engine.step(), so_far)
            case message:
                raise RuntimeError(f"{type(message).__name__} is no order")


def digest(outputs: list[EngineOutput], before: int) -> int:
    """A number that differs where the tokens of `outputs`, or those before, do."""
    tokens = array("q", chain.from_iterable(output.new_token_ids for output in outputs))
    return zlib.crc32(tokens.tobytes(), before)
