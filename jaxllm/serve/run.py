"""Starts the HTTP server and the engine, and ends both, whatever happens."""

import asyncio
import logging
import signal
import socket
import sys
from dataclasses import replace
from types import FrameType

import uvicorn

from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.engine.distributed.cluster import find_processes
from jaxllm.engine.engine_loop import LOG_DATE_FORMAT, LOG_FORMAT
from jaxllm.engine.errors import EngineStartError
from jaxllm.serve.app import make_app
from jaxllm.serve.args import Command, parse_args
from jaxllm.serve.follow import follow
from jaxllm.serve.listen import ListenError, open_socket, shown_url
from jaxllm.serve.metrics import Metrics
from jaxllm.serve.middleware import OPEN_PATHS
from jaxllm.serve.opening import open_engine
from jaxllm.serve.snapshot import write_snapshot
from jaxllm.serve.state import ServerState

logger = logging.getLogger(__name__)

DEATH_LINGER_S = 2.0
"""How long a server without an engine still answers (503 at /health) before it exits."""
CLOSE_CONNECTIONS_S = 2


class Server(uvicorn.Server):
    """uvicorn, that ends running requests by itself when it is told to stop."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, drain_s: float) -> None:
        super().__init__(config)
        self.engine = engine
        self.drain_s = drain_s
        self._loop = asyncio.get_running_loop()
        self._stopping: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._captured_signals.clear()  # we end by returning, not by the signal
        if self._stopping is not None:  # asked twice: at once
            self.force_exit = self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_stop)

    def _begin_stop(self) -> None:
        if self._stopping is None:
            logger.info("Shutting down")
            self._stopping = self._loop.create_task(self._stop())

    async def _stop(self) -> None:
        self.engine.drain()
        end = self._loop.time() + self.drain_s
        while self.engine.num_unfinished and self._loop.time() < end:
            await asyncio.sleep(0.05)
        self.engine.stop()
        self.should_exit = True


async def serve(command: Command, sock: socket.socket) -> int:
    """Serves until a signal or the engine's end; returns the exit code."""
    config, serve_config = command.engine, command.serve
    names = config.served_model_name or (config.model,)
    metrics = Metrics(names[0])
    engine = AsyncEngine(config, stall_after_s=serve_config.stall_timeout, observer=metrics)
    state = ServerState(engine, serve_config, metrics, names, origins=command.origins)
    logger.info("Listening at %s; loading %s", shown_url(sock), config.model)
    server = Server(_uvicorn_config(state), engine, serve_config.shutdown_timeout)
    start = asyncio.create_task(_start(state, shown_url(sock), server, command.dump_config))
    watch = asyncio.create_task(_watch_death(engine, server))
    try:
        await server.serve(sockets=[sock])
        if start.done():
            start.result()
        return 1 if engine.died.is_set() else 0
    except (EngineStartError, ValueError, OSError) as error:
        logger.error("%s", error)
        return 1
    finally:
        for task in (start, watch):
            task.cancel()
        await asyncio.gather(start, watch, return_exceptions=True)
        await engine.close()


def _uvicorn_config(state: ServerState) -> uvicorn.Config:
    options = state.serve_config
    return uvicorn.Config(
        make_app(state),
        log_config=None,
        log_level=options.uvicorn_log_level,
        access_log=not options.disable_uvicorn_access_log,
        timeout_graceful_shutdown=CLOSE_CONNECTIONS_S,
        http="httptools",
        ws="none",
        lifespan="off",
        server_header=False,
    )


async def _start(state: ServerState, url: str, server: Server, dump_config: str | None) -> None:
    """Brings the engine up behind the HTTP server, which answers 503 meanwhile."""
    try:
        await open_engine(state)
        if dump_config is not None:
            write_snapshot(dump_config, state.configs, state.origins, state.defaults)
        logger.info("Ready: %s at %s", ", ".join(state.names), url)
    except BaseException:
        server.should_exit = True
        raise


async def _watch_death(engine: AsyncEngine, server: Server) -> None:
    await engine.died.wait()
    if engine.opened:
        logger.error("%s", engine.error)
        await asyncio.sleep(DEATH_LINGER_S)
        server.should_exit = True


def main(argv: list[str] | None = None) -> int:
    """`python -m jaxllm.serve`; returns the exit code."""
    command = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt=LOG_DATE_FORMAT)
    logging.getLogger("uvicorn.access").addFilter(_worth_a_line)
    for warning in command.warnings:
        logger.warning("%s", warning)
    try:
        engine = command.engine
        command = replace(command, engine=find_processes(engine) if engine.distributed else engine)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if command.engine.process_id:
        with asyncio.Runner() as runner:
            return runner.run(follow(command.engine, command.serve.shutdown_timeout))
    try:
        sock = open_socket(command.serve)
    except ListenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    # Taken over by the server once it runs; until then, and after, a signal just ends us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    with sock, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(serve(command, sock))


def _worth_a_line(record: logging.LogRecord) -> bool:
    """Leaves out of the access log what probes ask every second."""
    return not (isinstance(record.args, tuple) and OPEN_PATHS.intersection(map(str, record.args)))


def _loop_factory():
    try:
        import uvloop
    except ImportError:  # not made for this platform
        return None
    return uvloop.new_event_loop
