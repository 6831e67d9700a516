"""Whether the engine process still answers: asks for signs of life and times its silence."""

import asyncio
import logging
import time

from jaxllm.engine.engine_process import EngineProcess
from jaxllm.engine.messages import AskStats
from jaxllm.outputs import EngineStats

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0


class Watchdog:
    """Knows since when the engine owes us a message, and asks for one when it owes none.

    Args:
        stall_after_s: silence, with an answer or a step owed, that counts as a stall.
    """

    def __init__(self, process: EngineProcess, stall_after_s: float) -> None:
        self.process = process
        self.stall_after_s = stall_after_s
        self._silent_since: float | None = None
        self._asked: dict[int, asyncio.Future[EngineStats]] = {}
        self._last_ticket = 0

    @property
    def silence_s(self) -> float:
        """For how long the engine has owed us a message."""
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    @property
    def stalled(self) -> bool:
        return self.silence_s > self.stall_after_s

    def owe(self) -> None:
        """Work was given to the engine: from now on it owes a message."""
        if self._silent_since is None:
            self._silent_since = time.monotonic()

    def heard(self, busy: bool) -> None:
        """A message came; `busy`: requests are still running."""
        self._silent_since = time.monotonic() if busy or self._asked else None

    def ask(self) -> "asyncio.Future[EngineStats]":
        """Asks for statistics; the engine answers between two steps."""
        self._last_ticket += 1
        future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._asked[self._last_ticket] = future
        self.process.send(AskStats(self._last_ticket))
        self.owe()
        return future

    def answer(self, ticket: int, stats: EngineStats) -> None:
        future = self._asked.pop(ticket, None)
        if future is not None and not future.done():
            future.set_result(stats)

    def give_up(self, error: Exception) -> None:
        """No answer will come any more."""
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody need wait for it
        self._asked.clear()

    async def run(self) -> None:
        """Reports each stall once, with the engine's stacks; ends by cancellation."""
        reported = False
        while True:
            await asyncio.sleep(INTERVAL_S)
            if self._silent_since is None:
                self.ask()
            if not self.stalled:
                reported = False
            elif not reported:
                reported = True
                logger.error("The engine has been silent for %.0f s; its stacks:", self.silence_s)
                self.process.dump_stacks()
