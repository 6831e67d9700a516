"""Which consumer waits for which request, and what it is given."""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxllm.engine.errors import EngineError
from jaxllm.engine.inputs import GenerationInput, OutputKind
from jaxllm.engine.messages import AddRequest, encode
from jaxllm.engine.output_processor import OutputProcessor, merge_delta
from jaxllm.engine.request_times import Observer, RequestTimes
from jaxllm.outputs import EngineOutput, RequestOutput

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Stream:
    """The requests of one consumer and the queue that they share.

    Attributes:
        running: ids of the requests whose end the consumer has not taken yet.
    """

    running: set[str] = field(default_factory=set)
    _queue: asyncio.Queue[RequestOutput | Exception] = field(default_factory=asyncio.Queue)
    _unread: dict[str, RequestOutput] = field(default_factory=dict)  # the last delta of a request

    def put(self, output: RequestOutput, *, delta: bool) -> None:
        """Queues news; a delta joins the one before it if that still waits to be taken.

        So a consumer that cannot keep up gets fewer and larger pieces, and nothing piles up.
        """
        waiting = self._unread.get(output.request_id) if delta else None
        if waiting is not None:
            merge_delta(waiting, output)
            return
        self._queue.put_nowait(output)
        if delta:
            self._unread[output.request_id] = output

    def fail(self, error: Exception) -> None:
        self._queue.put_nowait(error)

    async def get(self) -> RequestOutput:
        """The next news; raises the error that ended the stream."""
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        self._unread.pop(item.request_id, None)
        return item


class StreamTable:
    """All running requests: their state in the output processor, their times, their streams."""

    def __init__(self, processor: OutputProcessor, observer: Observer) -> None:
        self.processor = processor
        self.observer = observer
        self._streams: dict[str, Stream] = {}  # by request id
        self._kinds: dict[str, OutputKind] = {}  # by request id
        self._times: dict[str, RequestTimes] = {}  # by sequence id

    @property
    def num_unfinished(self) -> int:
        return self.processor.num_unfinished

    def submit(self, requests: Iterable[GenerationInput]) -> tuple[Stream, list[bytes]]:
        """A stream for `requests` and the encoded messages that start them.

        Raises:
            ValueError: a request cannot be served; none of them is kept.
        """
        stream = Stream()
        messages: list[bytes] = []
        try:
            for request in requests:
                sequences = self.processor.add(request)
                stream.running.add(request.request_id)
                self._streams[request.request_id] = stream
                self._kinds[request.request_id] = request.kind
                messages.append(encode(AddRequest.of(sequences)))
                for sequence in sequences:
                    self._times[sequence.request_id] = RequestTimes.of(sequence)
        except Exception:
            self.forget(stream)
            raise
        return stream, messages

    def forget(self, stream: Stream) -> list[str]:
        """Drops all state of the stream; returns its sequences that the engine still runs."""
        sequences: list[str] = []
        for request_id in stream.running:
            self._streams.pop(request_id, None)
            self._kinds.pop(request_id, None)
            sequences += self.processor.abort(request_id)
        stream.running.clear()
        for sequence_id in sequences:
            self._times.pop(sequence_id, None)
        return sequences

    def deliver(self, outputs: list[EngineOutput]) -> list[str]:
        """Hands a step's news to the streams; returns sequences that the engine must drop."""
        now = time.monotonic()
        aborts: list[str] = []
        for output in outputs:
            times = self._times.get(output.request_id)
            if times is not None and times.take(output, now, self.observer):
                del self._times[output.request_id]
            try:
                aborts += self._deliver_one(output, now)
            except Exception as error:  # one request's text must not harm its neighbours
                logger.exception("Request %s failed in the front", output.request_id)
                self.fail_one(output.request_id, EngineError(f"Internal error: {error}"))
        return aborts

    def _deliver_one(self, output: EngineOutput, now: float) -> list[str]:
        processed = self.processor.process([output])
        for sequence_id in processed.aborts:  # a stop string ended it
            self._times.pop(sequence_id).finish("stop", now, self.observer)
        for request_output in processed.request_outputs:
            request_id = request_output.request_id
            stream = self._streams[request_id]
            if request_output.finished:
                del self._streams[request_id]
            stream.put(request_output, delta=self._kinds[request_id] == "delta")
            if request_output.finished:
                del self._kinds[request_id]
        return processed.aborts

    def fail_one(self, sequence_id: str, error: Exception) -> None:
        """Ends the stream that the sequence belongs to; its consumer forgets the rest."""
        stream = self._streams.get(sequence_id.rpartition("-")[0])
        if stream is not None:
            stream.fail(error)

    def fail_all(self, error: Exception) -> None:
        for stream in set(self._streams.values()):
            stream.fail(error)
