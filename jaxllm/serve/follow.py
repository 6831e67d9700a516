"""A process that serves no HTTP: its engine does what process 0 says."""

import asyncio
import logging
import signal

from jaxllm.config import EngineConfig
from jaxllm.engine.engine_process import EngineProcess
from jaxllm.engine.messages import Failed, Ready

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""Beyond process 0's --shutdown-timeout: for it to end the group, where all were told to stop."""


class _Front:
    """Waits for the engine's end, or for a signal and then a while for the engine's end."""

    def __init__(self, config: EngineConfig, grace_s: float) -> None:
        self.config = config
        self.grace_s = grace_s
        self.loop = asyncio.get_running_loop()
        self.process = EngineProcess(config)
        self.code: asyncio.Future[int] = self.loop.create_future()
        self.stopping = False
        self.loop.add_reader(self.process.fd, self.on_messages)
        self.loop.add_reader(self.process.sentinel, self.on_end)
        for number in (signal.SIGINT, signal.SIGTERM):
            self.loop.add_signal_handler(number, self.on_signal)

    def on_messages(self) -> None:
        for message in self.process.receive():
            if isinstance(message, Ready):
                logger.info(
                    "Ready: process %d of %d follows process 0 at %s",
                    *(self.config.process_id, self.config.num_processes),
                    self.config.coordinator_address,
                )
            elif isinstance(message, Failed):
                if not message.expected and message.traceback:
                    logger.error("The engine failed:\n%s", message.traceback.rstrip())
                self.finish(1, message.message)

    def on_end(self) -> None:
        self.loop.remove_reader(self.process.sentinel)
        self.on_messages()  # its last words may still be unread
        ended = self.process.process
        ended.join()
        text = self.process.exit_message()
        self.finish(0, "") if ended.exitcode == 0 else self.finish(1, text)

    def on_signal(self) -> None:
        if self.stopping:
            self.finish(0, "")
        self.stopping = True
        logger.info("Told to stop: waits up to %.0f s for process 0 to end the group", self.grace_s)
        self.loop.call_later(self.grace_s, self.finish, 0, "")

    def finish(self, code: int, error: str) -> None:
        if self.code.done():
            return
        if self.stopping:  # then it ends as it was told to, however the others take it
            code, error = 0, ""
        if error:
            logger.error("Process %d ends: %s", self.config.process_id, error)
        self.code.set_result(code)


async def follow(config: EngineConfig, shutdown_timeout: float) -> int:
    """Follows process 0 until the group ends or a signal comes; returns the exit code."""
    front = _Front(config, shutdown_timeout + GRACE_S)
    try:
        return await front.code
    finally:
        front.loop.remove_reader(front.process.fd)
        front.loop.remove_reader(front.process.sentinel)
        await asyncio.to_thread(front.process.close)
