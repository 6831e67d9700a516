"""The front: takes HTTP requests, has a replica answer each, and says so when one was lost."""

import logging
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from jaxllm.serve.body import read_limited
from jaxllm.serve.errors import ApiError, api_error
from jaxllm.serve.ray.affinity import affinity_key
from jaxllm.serve.ray.metrics import merge_metrics
from jaxllm.serve.ray.replica import REFUSED, RETRY_AFTER_S, Message
from jaxllm.serve.routes_meta import METRICS_TYPE
from jaxllm.serve.sse import DONE, ClientLeftError, event, unless_client_leaves

logger = logging.getLogger(__name__)

MOST_REFUSALS = 4
METRICS_TIMEOUT_S = 5.0
SCOPE_KEYS = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path"),
    *("root_path", "query_string", "headers", "client", "server"),
)


class Front:
    """An ASGI application over the replicas behind `handle`."""

    def __init__(self, handle: DeploymentHandle, max_body_bytes: int, affinity_chars: int) -> None:
        self.handle = handle
        self.replicas = handle.options(method_name="answer", stream=True)
        self.max_body_bytes = max_body_bytes
        self.affinity_chars = affinity_chars

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send)
        try:
            if scope["path"] == "/metrics":
                await (await self._metrics())(scope, receive, send)
                return
            body = await read_limited(Request(scope, receive), self.max_body_bytes)
            await unless_client_leaves(receive, self._forward(scope, body, answer))
        except (ClientDisconnect, ClientLeftError):
            return
        except Exception as error:
            await answer.fail(_as_api_error(error))

    async def _metrics(self) -> Response:
        found = await self.handle.broadcast("metrics").results_async(
            timeout_s=METRICS_TIMEOUT_S, return_exceptions=True
        )
        pages = dict(each for each in found if not isinstance(each, BaseException))
        return Response(merge_metrics(pages), headers={"content-type": METRICS_TYPE})

    async def _forward(self, scope: Scope, body: bytes, answer: "_Answer") -> None:
        """Sends a replica's answer; one that refuses is avoided, for it has not begun."""
        key = affinity_key(scope["path"], body, self.affinity_chars)
        plain = {name: scope[name] for name in SCOPE_KEYS if name in scope}
        refusals: dict[str, str] = {}
        while len(refusals) < MOST_REFUSALS:
            refused = await self._ask(plain, body, answer, affinity=key, avoid=tuple(refusals))
            if refused is None:
                return
            if refused["replica"] in refusals:
                break  # there is no other one
            refusals[refused["replica"]] = refused["reason"]
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise _retryable("no_replica", f"No replica can serve this request now ({reasons}).")

    async def _ask(self, *args: Any, **routing: Any) -> Message | None:
        """One replica's answer, sent on; or its refusal."""
        scope, body, answer = args
        call: Any = self.replicas.remote(scope, body, **routing)
        try:
            async for messages in call:
                if messages[0]["type"] == REFUSED:
                    return messages[0]
                for message in messages:
                    await answer.send(message)
            return None
        finally:
            call.cancel()


class _Answer:
    """What the client gets: nothing before there is something to show."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message  # held back: as long as no body comes, it can become a 503
            return
        if not self._begun:
            assert self._start is not None
            self._begun = True
            await self._send(self._start)
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Ends the answer with `error`, in a stream that has begun as an event."""
        if not self._begun:
            response = error.response()
            start = {"type": "http.response.start", "status": error.status}
            await self._send({**start, "headers": response.raw_headers})
            await self._send({"type": "http.response.body", "body": response.body})
            return
        # Whole answers come in one piece, so this is a stream of events.
        body = event(error.body()) + DONE
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _retryable(code: str, message: str) -> ApiError:
    return ApiError(message, status=503, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def _as_api_error(error: Exception) -> ApiError:
    """Whatever befalls a replica on Ray's side is no fault of the request."""
    if isinstance(error, RayError | RayServeException) and not isinstance(error, RayTaskError):
        logger.warning("A replica was lost with a request: %s", error)
        message = "The replica that served this request was lost; send the request again."
        return _retryable("replica_lost", message)
    return api_error(error)


def make_front(handle: DeploymentHandle, **options: int) -> Starlette:
    return Starlette(routes=[Mount("/", Front(handle, **options))])
