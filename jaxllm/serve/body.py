"""Reads and checks JSON bodies; every refusal names the parameter."""

import difflib
import logging
from typing import Any, NoReturn

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError

from jaxllm.serve.errors import ApiError
from jaxllm.serve.protocol import UNSUPPORTED

logger = logging.getLogger(__name__)

MOST_NOTED_KEYS = 200
_noted: set[str] = set()


async def read_body[M: BaseModel](request: Request, model: type[M]) -> M:
    """The request's body as `model`.

    Raises:
        ApiError: 400, or 413 if it is too large.
    """
    content_type = request.headers.get("content-type", "application/json")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            f"The Content-Type must be application/json, got {media_type!r}.",
            code="invalid_content_type",
        )
    limit = request.app.state.server.serve_config.max_body_bytes
    body = _parse(await read_limited(request, limit))
    try:
        checked = model.model_validate(body)
    except ValidationError as error:
        _refuse(error)
    _note_unknown(checked)
    return checked


async def read_limited(request: Request, limit: int) -> bytes:
    """The request's body.

    Raises:
        ApiError: 413 if it has more than `limit` bytes.
    """
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise ApiError(
                f"The body exceeds {limit} bytes (--max-body-bytes).",
                status=413,
                code="body_too_large",
            )
    return bytes(data)


def _parse(data: bytes) -> Any:
    try:
        # Stricter than json: no NaN, and no half surrogate pairs that nobody could encode.
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ApiError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError("The body must be a JSON object.", code="invalid_json")
    return body


def _refuse(error: ValidationError) -> NoReturn:
    first = error.errors(include_url=False)[0]
    where = [str(part) for part in first["loc"]] or ["body"]
    param = ".".join(where) if where[0] == "logit_bias" else where[0]
    if first["type"] == "missing":
        raise ApiError(f"{param} is required.", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":  # says it all
        raise ApiError(message, param=param, code="invalid_value")
    shown = repr(first["input"])
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    raise ApiError(f"{param}: {message}, got {shown}.", param=param, code="invalid_type")


def _note_unknown(body: BaseModel) -> None:
    """Logs keys that nobody reads, each once; a client may send the same ones for ever."""
    known = list(type(body).model_fields)
    for key in body.model_extra or ():
        if key in UNSUPPORTED or key in _noted or len(_noted) >= MOST_NOTED_KEYS:
            continue
        _noted.add(key)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        hint = f" (did you mean {near[0]}?)" if near else ""
        logger.warning("ignored the unknown key %.60r in a request%s", key, hint)
