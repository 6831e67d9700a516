"""Models, health, metrics, version, tokenizing."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from jaxllm import __version__
from jaxllm.serve.body import read_body
from jaxllm.serve.errors import ApiError
from jaxllm.serve.generation import Prompt
from jaxllm.serve.protocol import DetokenizeRequest, TokenizeRequest
from jaxllm.serve.routes_chat import render_chat
from jaxllm.serve.snapshot import as_json, effective_settings
from jaxllm.serve.state import ServerState

router = APIRouter()

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _model(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "jaxllm",
        "root": state.engine.config.model,
        "parent": None,
        "max_model_len": state.engine.max_model_len,
    }


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    state: ServerState = request.app.state.server
    return {"object": "list", "data": [_model(state, name) for name in state.names]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    state: ServerState = request.app.state.server
    state.check_model(name)
    return _model(state, name)


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 while the engine takes requests and its steps go on, else 503."""
    state: ServerState = request.app.state.server
    engine, status = state.engine, state.health
    body = {
        "status": status,
        "unfinished_requests": engine.num_unfinished,
        "silent_for_s": round(engine.silence_s, 3),
    }
    if engine.error:
        body["error"] = engine.error
    return JSONResponse(body, status_code=200 if status == "ready" else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    state: ServerState = request.app.state.server
    stats = await state.engine.stats()
    return Response(
        state.metrics.render(stats, up=state.health == "ready"),
        headers={"content-type": METRICS_TYPE},
    )


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """Every effective setting with its origin."""
    state: ServerState = request.app.state.server
    return {
        "version": __version__,
        "settings": as_json(effective_settings(state.configs, state.origins)),
        "sampling_defaults": state.defaults,
    }


@router.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    """The ids that a prompt or a conversation becomes."""
    state: ServerState = request.app.state.server
    body = await read_body(request, TokenizeRequest)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("Give either prompt or messages.", param="prompt", code="invalid_value")
    prompt = await (_encode(state, body) if body.prompt is not None else render_chat(state, body))
    return {
        "tokens": prompt.token_ids,
        "count": len(prompt.token_ids),
        "max_model_len": state.engine.max_model_len,
    }


async def _encode(state: ServerState, body: TokenizeRequest) -> Prompt:
    text, special = body.prompt or "", body.add_special_tokens is not False
    tokenizer = state.tokenizer
    encode = lambda: tokenizer.encode(text, add_special_tokens=special)  # noqa: E731
    return Prompt(await state.engine.run_in_pool(encode), text)


@router.post("/detokenize")
async def detokenize(request: Request) -> dict[str, str]:
    state: ServerState = request.app.state.server
    body = await read_body(request, DetokenizeRequest)
    state.check_model(body.model)
    size = state.engine.vocab_size
    for token in body.tokens:
        if not 0 <= token < size:
            raise ApiError(
                f"tokens holds {token}, which is not in the vocabulary (size {size}).",
                param="tokens",
                code="invalid_value",
            )
    tokenizer = state.tokenizer
    decode = lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)  # noqa: E731
    return {"prompt": await state.engine.run_in_pool(decode)}
