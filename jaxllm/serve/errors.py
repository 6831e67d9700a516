"""Errors in OpenAI's shape, and what becomes of every exception that a route raises."""

import dataclasses
import logging
import re
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from jaxllm.engine.errors import EngineDeadError, EngineError, EngineStoppedError
from jaxllm.engine.inputs import ContextLengthError
from jaxllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_PARAMS = frozenset({"prompt", *(field.name for field in dataclasses.fields(SamplingParams))})

CLIENT_LEFT = 499
"""The status, nginx's, of an answer that nobody reads but the log."""

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """An answer other than 2xx.

    Attributes:
        param: the parameter at fault, if there is one.
        code: a word for programs, such as context_length_exceeded.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        kind = SERVER if self.status >= 500 else INVALID
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def not_supported(param: str, what: str | None = None) -> ApiError:
    """For a parameter that we know and do not have; ignoring it would half obey."""
    return ApiError(
        f"{what or param} is not supported by this server.",
        param=param,
        code="unsupported_parameter",
    )


def api_error(error: Exception) -> ApiError:
    """The answer to an exception: the user's fault, the engine's, or a bug of ours."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return ApiError(str(error), code="context_length_exceeded")
        case EngineStoppedError():
            return ApiError(
                str(error), status=503, code="service_unavailable", headers={"Retry-After": "2"}
            )
        case EngineDeadError():
            return ApiError(str(error), status=500, code="engine_dead")
        case EngineError():
            return ApiError(str(error), status=500, code="engine_error")
        case ValueError():
            param = named_param(str(error))
            return ApiError(str(error), param=param, code="invalid_value")
    logger.error("A request failed", exc_info=error)
    return ApiError("Internal server error.", status=500, code="internal_error")


def named_param(message: str) -> str | None:
    """The parameter that a ValueError of the engine or of SamplingParams begins with."""
    match = re.match(r"(?:The )?(\w+)", message)
    return match[1] if match is not None and match[1] in _PARAMS else None


def install_handlers(app: FastAPI) -> None:
    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response()

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_LEFT)

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message, code = str(error.detail), None
        if error.status_code == 404:
            message, code = f"There is no {request.method} {request.url.path}.", "not_found"
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}."
            code = "method_not_allowed"
        headers = dict(error.headers or {})
        return ApiError(message, status=error.status_code, code=code, headers=headers).response()

    app.add_exception_handler(ClientDisconnect, on_disconnect)
    # Exception itself is left to the server's outermost handler, which would also raise anew.
    for kind in (ApiError, EngineError, ValueError):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_error)
