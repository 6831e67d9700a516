"""A replica: one engine and the server's application around it, in a Ray actor."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from ray import serve

from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.serve.app import make_app
from jaxllm.serve.args import Command
from jaxllm.serve.metrics import Metrics
from jaxllm.serve.opening import open_engine
from jaxllm.serve.state import ServerState

REPLICA_HEADER = b"x-jaxllm-replica"
RETRY_AFTER_S = 2

Message = dict[str, Any]
"""An ASGI event, or that of `refusal`."""

REFUSED = "refused"


def refusal(replica: str, reason: str) -> Message:
    """The only message of a replica that has not begun with the request and never will."""
    return {"type": REFUSED, "replica": replica, "reason": reason}


class Replica:
    """Answers the HTTP requests that a front hands on, in ASGI messages."""

    async def __init__(self, command: Command) -> None:
        config, options = command.engine, command.serve
        names = config.served_model_name or (config.model,)
        metrics = Metrics(names[0])
        self.name = serve.get_replica_context().replica_id.unique_id
        self.engine = AsyncEngine(config, stall_after_s=options.stall_timeout, observer=metrics)
        self.state = ServerState(self.engine, options, metrics, names, origins=command.origins)
        self.app = make_app(self.state)
        try:
            await open_engine(self.state)
        except BaseException:
            await self.engine.close()
            raise

    async def answer(
        self, scope: Message, body: bytes, *, affinity: str = "", avoid: tuple[str, ...] = ()
    ) -> AsyncGenerator[list[Message]]:
        """Yields the answer's messages, those that are there at once together.

        Args:
            affinity, avoid: read by the router alone.
        """
        if self.state.health != "ready":
            yield [refusal(self.name, f"the engine is {self.state.health}")]
            return
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        run = asyncio.create_task(self._run(scope, body, messages))
        try:
            ended = False
            while not ended:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                ended = batch[-1] is None
                found = [message for message in batch if message is not None]
                if found:
                    yield found
            await run
        finally:
            # When the client has left: the application aborts what still runs.
            run.cancel()
            with suppress(asyncio.CancelledError):
                await run

    async def _run(
        self, scope: Message, body: bytes, messages: "asyncio.Queue[Message | None]"
    ) -> None:
        request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not request:
                await asyncio.Event().wait()  # this task is cancelled when the client leaves
            return request.pop()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = self._signed(message)
            messages.put_nowait(message)

        try:
            await self.app(scope, receive, send)  # pyright: ignore[reportArgumentType]
        finally:
            messages.put_nowait(None)

    def _signed(self, start: Message) -> Message:
        """With our name, and with 503 for 500 if the engine is dead: another replica can serve."""
        headers = [*start.get("headers", ()), (REPLICA_HEADER, self.name.encode())]
        status = start["status"]
        if status == 500 and self.engine.state == "dead":
            status = 503
            headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
        return {**start, "status": status, "headers": headers}

    async def metrics(self) -> tuple[str, str]:
        """Our name, and the text of GET /metrics."""
        stats = await self.engine.stats()
        page = self.state.metrics.render(stats, up=self.state.health == "ready")
        return self.name, page.decode()

    async def check_health(self) -> None:
        """As GET /health; Ray replaces the replica when it has failed a few times."""
        if self.state.health != "ready":
            raise RuntimeError(f"the engine is {self.state.health}. {self.engine.error}".strip())

    async def __del__(self) -> None:
        # Awaited by Ray, once the running requests have ended.
        await self.engine.close()
