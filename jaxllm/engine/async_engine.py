"""AsyncEngine: the front's asyncio view of the engine process."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from jaxllm.config import EngineConfig
from jaxllm.engine.engine_loop import Engine, make_llm_engine
from jaxllm.engine.engine_process import EngineProcess
from jaxllm.engine.errors import (
    EngineDeadError,
    EngineError,
    EngineStartError,
    EngineStoppedError,
    RequestRejectedError,
)
from jaxllm.engine.inputs import GenerationInput
from jaxllm.engine.messages import (
    AbortRequests,
    Failed,
    Outputs,
    Ready,
    Rejected,
    Stats,
    ToFront,
)
from jaxllm.engine.output_processor import OutputProcessor
from jaxllm.engine.request_times import Observer
from jaxllm.engine.streams import Stream, StreamTable
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.engine.watchdog import Watchdog
from jaxllm.outputs import EngineStats, RequestOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")
State = Literal["starting", "ready", "stopping", "dead"]

STATS_TIMEOUT_S = 0.5
TOKENIZER_THREADS = 2
CLOSE_TIMEOUT_S = 3.0


class AsyncEngine:
    """Starts the engine process and gives each caller the outputs of its requests.

    Lives on one event loop. All of its state changes in that loop's callbacks, so there are no
    locks; nothing here blocks.

    Args:
        stall_after_s: how long the engine may be silent, with work pending, before it counts as
            stalled.
        observer: told of latencies and ends of requests (for /metrics).
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        make_engine: Callable[[EngineConfig], Engine] = make_llm_engine,
        stall_after_s: float = 60.0,
        observer: Observer | None = None,
    ) -> None:
        self.config = config
        self.state: State = "starting"
        self.error = ""
        self.observer = observer or Observer()
        self.tokenizer: Tokenizer | None = None
        self.generation_config: dict[str, Any] = {}
        self.vocab_size = 0
        self.last_stats = EngineStats()
        self.died = asyncio.Event()
        self._streams: StreamTable | None = None
        self._pool = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._process = EngineProcess(config, make_engine)
        self._loop.add_reader(self._process.fd, self._on_messages)
        self._loop.add_reader(self._process.sentinel, self._on_end)
        self._watchdog = Watchdog(self._process, stall_after_s)
        self._watching: asyncio.Task[None] | None = None

    # ---- start and end

    async def wait_ready(self) -> None:
        """Waits until the engine is warm.

        Raises:
            EngineStartError: it failed; the message is fit for the user.
        """
        await asyncio.shield(self._ready)

    def open(self, tokenizer: Tokenizer | None) -> None:
        """Begins to take requests; to be called after `wait_ready`.

        Args:
            tokenizer: None to give token ids only.
        """
        ready = self._ready.result()
        self.tokenizer = tokenizer
        self.config = ready.config
        self.vocab_size = ready.vocab_size
        self.generation_config = ready.generation_config
        self.last_stats = ready.stats
        eos = frozenset() if tokenizer is None else frozenset(tokenizer.eos_token_ids)
        processor = OutputProcessor(
            tokenizer,
            max_model_len=self.max_model_len,
            vocab_size=ready.vocab_size,
            max_logprobs=ready.config.max_logprobs,
            eos_token_ids=eos.union(ready.eos_token_ids),
        )
        self._streams = StreamTable(processor, self.observer)
        self._watching = self._loop.create_task(self._watchdog.run())
        if self.state == "starting":
            self.state = "ready"

    def drain(self) -> None:
        """Takes no more requests; those that run go on."""
        if self.state in ("starting", "ready"):
            self.state = "stopping"

    def stop(self) -> None:
        """Takes no more requests and ends those that run with EngineStoppedError."""
        self.drain()
        if self.state == "stopping":
            self._fail_all(EngineStoppedError("The server is shutting down."))

    async def close(self) -> None:
        """Ends the engine process, by force if it does not end in a few seconds."""
        self.stop()
        if self._watching is not None:
            self._watching.cancel()
        self._loop.remove_reader(self._process.fd)
        self._loop.remove_reader(self._process.sentinel)
        # While it starts, it reads no messages.
        timeout = CLOSE_TIMEOUT_S if self._ready.done() else 0.0
        if not self._ready.done():
            self._ready.set_exception(EngineStartError("The start was interrupted."))
        self._ready.exception()  # marks it as seen
        await asyncio.to_thread(self._process.close, timeout)
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def pid(self) -> int | None:
        """Of the engine process."""
        return self._process.pid

    @property
    def opened(self) -> bool:
        """Whether `open` has been called: it once took requests."""
        return self._streams is not None

    @property
    def max_model_len(self) -> int:
        assert self.config.max_model_len is not None
        return self.config.max_model_len

    # ---- requests

    async def run_in_pool(self, function: Callable[..., T], *args: Any) -> T:
        """Runs tokenizer work on a thread, so that long prompts hold up no other stream."""
        return await self._loop.run_in_executor(self._pool, function, *args)

    async def generate(self, *requests: GenerationInput) -> AsyncGenerator[RequestOutput]:
        """Yields the outputs of all `requests` as they come, until each is finished.

        Leaving early, by cancellation or by `aclose`, aborts what still runs.

        Raises:
            ValueError: a request cannot be served; none of them is.
            EngineDeadError, EngineStoppedError: the engine ended, or is about to.
        """
        stream = self._submit(requests)
        try:
            while stream.running:
                output = await stream.get()
                if output.finished:
                    stream.running.discard(output.request_id)
                yield output
        finally:
            self._abort(stream)

    def _submit(self, requests: tuple[GenerationInput, ...]) -> Stream:
        stream, messages = self._check_running().submit(requests)
        for message in messages:
            self._process.send_encoded(message)
        self._watchdog.owe()
        return stream

    def _abort(self, stream: Stream) -> None:
        sequences = self._streams.forget(stream) if self._streams else []
        if sequences and self.state != "dead":
            self._process.send(AbortRequests(sequences))
            for _ in sequences:
                self.observer.aborted()

    def _check_running(self) -> StreamTable:
        if self.state == "dead":
            raise EngineDeadError(self.error)
        if self.state == "stopping":
            raise EngineStoppedError("The server is shutting down.")
        if self._streams is None:
            raise EngineStoppedError("The model is still loading.")
        return self._streams

    # ---- health and statistics

    @property
    def num_unfinished(self) -> int:
        return 0 if self._streams is None else self._streams.num_unfinished

    @property
    def silence_s(self) -> float:
        """For how long the engine has owed us a step or an answer."""
        return self._watchdog.silence_s

    @property
    def stalled(self) -> bool:
        return self.state == "ready" and self._watchdog.stalled

    async def stats(self) -> EngineStats:
        """A fresh snapshot; the last one known if the engine is busy or gone."""
        if self.state == "ready":
            try:
                await asyncio.wait_for(self._watchdog.ask(), STATS_TIMEOUT_S)
            except (TimeoutError, EngineError):
                logger.debug("no fresh statistics from the engine")
        return self.last_stats

    # ---- news from the engine

    def _on_messages(self) -> None:
        for message in self._process.receive():
            self._handle(message)
            self._watchdog.heard(busy=self.num_unfinished > 0)

    def _handle(self, message: ToFront) -> None:
        match message:
            case Outputs(outputs=outputs, stats=stats):
                self.last_stats = stats or self.last_stats
                aborts = self._streams.deliver(outputs) if self._streams else []
                if aborts:
                    self._process.send(AbortRequests(aborts))
            case Stats(ticket=ticket, stats=stats):
                self.last_stats = stats
                self._watchdog.answer(ticket, stats)
            case Rejected(request_ids=request_ids, message=text, internal=internal):
                error = EngineError(f"Internal error: {text}") if internal else None
                if self._streams is not None:
                    self._streams.fail_one(request_ids[0], error or RequestRejectedError(text))
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(message)
            case Failed():
                self._fail(message)

    def _on_end(self) -> None:
        """The process has ended: seen at once, also when nobody waits for anything."""
        self._loop.remove_reader(self._process.sentinel)
        self._on_messages()  # its last words may still be unread
        if self.state != "dead":
            self._fail(Failed(self._process.exit_message(), "", expected=True))

    def _fail(self, failure: Failed) -> None:
        if not failure.expected and failure.traceback:
            logger.error("The engine failed:\n%s", failure.traceback.rstrip())
        if not self._ready.done():
            self._ready.set_exception(EngineStartError(failure.message))
        self.state = "dead"
        self.error = f"The engine is dead: {failure.message}"
        if self._watching is not None:
            self._watching.cancel()
        self._fail_all(EngineDeadError(self.error))
        self.died.set()

    def _fail_all(self, error: Exception) -> None:
        if self._streams is not None:
            self._streams.fail_all(error)
        self._watchdog.give_up(error)
