"""The front's handle on the engine process."""

import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import zmq

from jaxllm.config import EngineConfig
from jaxllm.engine.engine_loop import Engine, engine_main, make_llm_engine, open_socket
from jaxllm.engine.messages import Shutdown, ToEngine, ToFront, decode_to_front, encode

LONGEST_FOLDER = 80  # a socket's path must stay under 108 bytes


class EngineProcess:
    """The front's handle: starts the process, sends to it and reads from it, never blocking.

    Attributes:
        sentinel: a file descriptor, readable once the process has ended.
        fd: of the outbox; edge-triggered, so read until `receive` gives nothing more.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_engine: Callable[[EngineConfig], Engine] = make_llm_engine,
    ) -> None:
        self.config = config
        self.folder = Path(tempfile.mkdtemp(prefix="jaxllm-"))
        if len(str(self.folder)) > LONGEST_FOLDER:
            shutil.rmtree(self.folder)
            self.folder = Path(tempfile.mkdtemp(prefix="jaxllm-", dir="/tmp"))
        address = f"ipc://{self.folder}/engine"
        self.context = zmq.Context()
        self.to_engine = open_socket(self.context, zmq.PUSH)
        self.from_engine = open_socket(self.context, zmq.PULL)
        self.to_engine.bind(address + ".in")
        self.from_engine.bind(address + ".out")
        # spawn, not fork: jax and threads do not survive a fork.
        self.process = multiprocessing.get_context("spawn").Process(
            target=engine_main,
            args=(config, address, make_engine, logging.getLogger().getEffectiveLevel()),
            name="jaxllm-engine",
        )
        self.closed = False
        try:
            self.process.start()
        except BaseException:
            self._free()
            raise
        self.sentinel: int = self.process.sentinel
        self.fd: int = self.from_engine.getsockopt(zmq.FD)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def pid(self) -> int | None:
        return self.process.pid

    def send(self, message: ToEngine) -> None:
        """Queues `message`; it is lost if the process is not there (yet, or any more)."""
        self.send_encoded(encode(message))

    def send_encoded(self, message: bytes) -> None:
        if not self.closed:
            with contextlib.suppress(zmq.Again):
                self.to_engine.send(message, zmq.NOBLOCK)

    def receive(self) -> list[ToFront]:
        """All messages that have arrived."""
        messages: list[ToFront] = []
        while not self.closed:
            try:
                messages.append(decode_to_front(self.from_engine.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return messages

    def exit_message(self) -> str:
        """How the process ended, for people."""
        self.process.join(timeout=1)
        code = self.process.exitcode
        if code is None:
            return "the engine process runs"
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            if name == "SIGABRT" and self.config.several_processes:
                return self._abort_message()
            return f"the engine process was killed by {name}{hint}"
        return f"the engine process ended with exit code {code}"

    def _abort_message(self) -> str:
        """JAX aborts a process that loses touch with process 0, or that process 0 gave up."""
        config = self.config
        where = f"process 0 of {config.num_processes} ({config.coordinator_address})"
        if config.process_id:
            return f"{where} was lost: JAX ended this process (SIGABRT)"
        return f"JAX ended {where} (SIGABRT): another process was lost, see above"

    def dump_stacks(self) -> None:
        """Has the process print the stacks of its threads to stderr."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)

    def close(self, timeout_s: float = 3.0) -> None:
        """Ends the process, by force once `timeout_s` has passed, and frees what it held."""
        if self.closed:
            return
        self.send(Shutdown())
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._free()

    def _free(self) -> None:
        self.closed = True
        self.to_engine.close(linger=0)
        self.from_engine.close(linger=0)
        self.context.term()
        shutil.rmtree(self.folder, ignore_errors=True)
