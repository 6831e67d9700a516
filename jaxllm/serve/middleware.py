"""What stands before the routes: keys, and a server that is not ready."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.serve.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/metrics", "/version", "/ping"})


class Gate:
    """Refuses requests without a valid key (401) and requests while the model loads (503).

    Args:
        keys: none: everybody may come in.
    """

    def __init__(self, app: ASGIApp, *, keys: Iterable[str], engine: AsyncEngine) -> None:
        self.app = app
        # Digests have one length, so the comparison takes the same time for every key.
        self.keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            refusal = self._refusal(Headers(scope=scope).get("authorization"))
            if refusal is not None:
                await refusal.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refusal(self, authorization: str | None) -> ApiError | None:
        if self.keys and not self._allowed(authorization or ""):
            return ApiError(
                "Incorrect API key: send the server's as 'Authorization: Bearer KEY'.",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self.engine.state == "starting":
            return ApiError(
                "The model is still loading; /health says when it is ready.",
                status=503,
                code="model_loading",
                headers={"Retry-After": "5"},
            )
        return None

    def _allowed(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return False
        digest = hashlib.sha256(key.strip().encode()).digest()
        return any(hmac.compare_digest(digest, known) for known in self.keys)
