"""What runs in the engine process: messages in, steps, outputs out."""

import faulthandler
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NoReturn, Protocol

import zmq
from tqdm import tqdm

from jaxllm.config import EngineConfig
from jaxllm.engine.messages import (
    AbortRequests,
    AddRequest,
    AskStats,
    Failed,
    Outputs,
    Ready,
    Rejected,
    Shutdown,
    Stats,
    ToEngine,
    ToFront,
    decode_to_engine,
    encode,
)
from jaxllm.outputs import EngineOutput, EngineStats
from jaxllm.request import Request

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(levelname)s %(asctime)s %(name)s: %(message)s"
LOG_DATE_FORMAT = "%m-%d %H:%M:%S"
STATS_INTERVAL_S = 0.25
FLUSH_MS = 2000
# What a start raises when the user can mend it; the message alone is shown then.
EXPECTED_ERRORS = (ValueError, OSError, NotImplementedError, MemoryError, ImportError)


class Engine(Protocol):
    """The part of LLMEngine that the process needs."""

    config: EngineConfig
    vocab_size: int
    eos_token_ids: Any
    generation_config: dict[str, Any]

    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> Any: ...
    def step(self) -> list[EngineOutput]: ...
    def has_unfinished(self) -> bool: ...
    def stats(self) -> EngineStats: ...


def make_llm_engine(config: EngineConfig) -> Engine:
    """The real engine; imported here, since the front must not load jax."""
    from jaxllm.engine.llm_engine import LLMEngine

    return LLMEngine(config, offline=False)


def ready(engine: Engine) -> Ready:
    """What the front is told once `engine` is warm."""
    return Ready(
        config=engine.config,
        vocab_size=engine.vocab_size,
        eos_token_ids=sorted(engine.eos_token_ids),
        generation_config=dict(engine.generation_config),
        stats=engine.stats(),
    )


class EngineLoop:
    """Takes messages, steps the engine, sends what came of it. Runs in the engine process."""

    def __init__(self, engine: Engine, inbox: zmq.Socket, outbox: zmq.Socket) -> None:
        self.engine = engine
        self.inbox = inbox
        self.outbox = outbox
        self.running = True
        self.next_stats = 0.0

    def run(self) -> None:
        engine = self.engine
        self.send(ready(engine))
        while self.running:
            self.take_messages(block=not engine.has_unfinished())
            if self.running and engine.has_unfinished():
                self.send_outputs(engine.step())

    def take_messages(self, *, block: bool) -> None:
        """Handles all that waits; with `block`, waits for the first message."""
        if block:
            self.inbox.poll()
        while self.running and self.inbox.poll(0):
            self.handle(decode_to_engine(self.inbox.recv()))

    def handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self.add(message)
            case AbortRequests(request_ids=request_ids):
                for request_id in request_ids:
                    self.engine.abort(request_id)
            case AskStats(ticket=ticket):
                self.send(Stats(ticket, self.engine.stats()))
            case Shutdown():
                self.running = False

    def add(self, message: AddRequest) -> None:
        """Adds the n sequences, all or none: a refusal concerns this request alone."""
        added: list[str] = []
        try:
            for request in message.requests():
                self.engine.add_request(request)
                added.append(request.request_id)
        except Exception as error:
            internal = not isinstance(error, ValueError)
            if internal:
                logger.exception("A request could not be added")
            for request_id in added:
                self.engine.abort(request_id)
            self.send(Rejected(message.request_ids, str(error), internal))

    def send_outputs(self, outputs: list[EngineOutput]) -> None:
        now = time.monotonic()
        stats = None
        if now >= self.next_stats or not self.engine.has_unfinished():
            stats = self.engine.stats()
            self.next_stats = now + STATS_INTERVAL_S
        # An empty message too is a sign of life (a long prefill gives no tokens for a while).
        self.send(Outputs(outputs, stats))

    def send(self, message: ToFront) -> None:
        self.outbox.send(encode(message))


def engine_main(
    config: EngineConfig, address: str, make_engine: Callable[[EngineConfig], Engine], level: int
) -> None:
    """Entry point of the engine process; leaves by os._exit, 0 after a Shutdown, else 1."""
    # The front says when to stop; a Ctrl-C in the terminal reaches both processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # tqdm's own lock is a semaphore of the system's, which an abrupt end would leave behind.
    tqdm.set_lock(threading.RLock())
    logging.basicConfig(level=level, format=LOG_FORMAT, datefmt=LOG_DATE_FORMAT)
    folder = os.path.dirname(address.removeprefix("ipc://"))
    threading.Thread(target=_exit_with_parent, args=(folder,), daemon=True).start()
    context = zmq.Context()
    inbox = open_socket(context, zmq.PULL)
    outbox = open_socket(context, zmq.PUSH)
    inbox.connect(address + ".in")
    outbox.connect(address + ".out")
    code, started, group = 1, False, None
    try:
        if config.several_processes:
            from jaxllm.engine.distributed.join import check_devices, join  # loads jax

            group = join(config, partial(_end_for_others, address), partial(os._exit, 0))
            check_devices(config)
        engine = make_engine(config)
        started = True
        if group is None:
            EngineLoop(engine, inbox, outbox).run()
        else:
            from jaxllm.engine.distributed.lockstep import run_in_group

            run_in_group(engine, group, inbox, outbox)
        code = 0
    except BaseException as error:  # whatever it is, the front must hear of it
        failure = _failure(error, started)
        if group is not None:
            group.report(failure.message)
        outbox.send(encode(failure))
    outbox.close(linger=FLUSH_MS)
    inbox.close(linger=0)
    context.term()
    sys.stdout.flush()
    # Not a plain return: a broken device runtime may hang in its exit handlers.
    os._exit(code)


def _end_for_others(address: str, why: str) -> NoReturn:
    """Ends the process when another of the group has ended; from any thread."""
    context = zmq.Context()  # sockets are not to be shared between threads
    outbox = open_socket(context, zmq.PUSH)
    outbox.connect(address + ".out")
    outbox.send(encode(Failed(why, "", expected=True)))
    outbox.close(linger=FLUSH_MS)
    context.term()
    os._exit(1)


def _failure(error: BaseException, started: bool) -> Failed:
    text = str(error)
    # XLA has no error type of its own for this.
    no_memory = isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in text
    expected = not started and (no_memory or isinstance(error, EXPECTED_ERRORS))
    # The type's name helps with a bug, not with a refused flag or file.
    message = text if expected and text else f"{type(error).__name__}: {text}"
    return Failed(message, traceback.format_exc(), expected)


def _exit_with_parent(folder: str) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def open_socket(context: zmq.Context, kind: int) -> zmq.Socket:
    socket = context.socket(kind)
    socket.set_hwm(0)  # never block the sender, never drop
    return socket
