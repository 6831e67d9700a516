"""Answers that end when the client leaves: server-sent events and plain ones."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.serve.errors import api_error

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # or nginx collects the events
}


class ClientLeftError(Exception):
    """The client closed the connection; nobody will read an answer."""


def json_bytes(body: Any) -> bytes:
    return msgspec.json.encode(body)


def event(body: Any) -> bytes:
    return b"data: " + json_bytes(body) + b"\n\n"


async def unless_client_leaves[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves.

    Raises:
        ClientLeftError: it did.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        for each in (task, left):
            each.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends JSON events and [DONE]; an error on the way becomes an event of its own.

    Args:
        first: the first events, awaited by the caller, whose errors still had a status code.
        rest: gives the others; closed in any case.
    """

    media_type = "text/event-stream"

    def __init__(self, first: list[Any], rest: AsyncGenerator[list[Any]]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self.first = first
        self.rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._send_all(send))
        except ClientLeftError:
            return
        finally:
            await self.rest.aclose()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)

        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await write(b"".join(map(event, self.first)))
        try:
            async with aclosing(self.rest) as rest:
                async for events in rest:
                    await write(b"".join(map(event, events)))
        except Exception as error:
            await write(event(api_error(error).body()))
        await write(DONE, more=False)
