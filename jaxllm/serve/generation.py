"""From inputs to an HTTP answer, streamed or whole; what both generating routes share."""

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from jaxllm.engine.errors import EngineError
from jaxllm.engine.inputs import GenerationInput
from jaxllm.outputs import RequestOutput
from jaxllm.serve.errors import CLIENT_LEFT, ApiError
from jaxllm.serve.protocol import SamplingFields
from jaxllm.serve.sse import ClientLeftError, EventStream, json_bytes, unless_client_leaves
from jaxllm.serve.state import ServerState


class Format(Protocol):
    """How a route writes its answers.

    Attributes:
        prompt_only: the one token that was generated is not shown.
    """

    prompt_only: bool

    def head(self) -> dict[str, Any]:
        """Fields of a chunk beside `choices`."""
        ...

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The chunks for a delta; none if there is nothing to show yet."""
        ...

    def body(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The whole answer, without its usage."""
        ...


@dataclass(slots=True)
class Prompt:
    """A tokenized prompt and its text, if there was one."""

    token_ids: list[int]
    text: str | None = None


class UsageCount:
    """Counts tokens over the outputs of one HTTP request."""

    def __init__(self, *, prompt_only: bool) -> None:
        self.prompt_only = prompt_only
        self.prompts: dict[str, tuple[int, int]] = {}
        self.completion_tokens = 0

    def take(self, output: RequestOutput) -> None:
        """`output`: a delta, or the final one."""
        tokens, cached = len(output.prompt_token_ids), output.num_cached_tokens
        self.prompts[output.request_id] = (tokens, cached)
        if not self.prompt_only:
            self.completion_tokens += sum(len(c.token_ids) for c in output.outputs)

    def body(self) -> dict[str, Any]:
        prompt_tokens = sum(tokens for tokens, _ in self.prompts.values())
        cached_tokens = sum(cached for _, cached in self.prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def check_stream_options(body: SamplingFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            "stream_options is only allowed with stream=true.",
            param="stream_options",
            code="invalid_value",
        )


async def answer(
    request: Request,
    state: ServerState,
    body: SamplingFields,
    inputs: list[GenerationInput],
    form: Format,
) -> Response:
    """Generates and answers; whatever still runs when the client leaves is aborted.

    Raises:
        ValueError, EngineError: before the first token.
    """
    try:
        if not body.stream:
            work = _whole(state, inputs, form)
            result = await unless_client_leaves(request.receive, work)
            return Response(json_bytes(result), media_type="application/json")
        events = _events(state, body, inputs, form)

        async def first() -> list[dict[str, Any]]:
            return await anext(events, [])

        # Awaited here, so that a refusal by the engine still gets its status code.
        return EventStream(await unless_client_leaves(request.receive, first()), events)
    except ClientLeftError:
        return Response(status_code=CLIENT_LEFT)


async def _whole(state: ServerState, inputs: list[GenerationInput], form: Format) -> dict[str, Any]:
    usage = UsageCount(prompt_only=form.prompt_only)
    results: dict[str, RequestOutput] = {}
    async with aclosing(state.engine.generate(*inputs)) as outputs:
        async for output in outputs:
            if output.error is not None:
                raise EngineError(output.error)
            usage.take(output)
            results[output.request_id] = output
    return {**form.body([results[i.request_id] for i in inputs]), "usage": usage.body()}


async def _events(
    state: ServerState, body: SamplingFields, inputs: list[GenerationInput], form: Format
) -> AsyncGenerator[list[dict[str, Any]]]:
    options = body.stream_options
    include_usage = options is not None and bool(options.include_usage)
    continuous = include_usage and options is not None and bool(options.continuous_usage_stats)
    position = {each.request_id: i for i, each in enumerate(inputs)}
    usage = UsageCount(prompt_only=form.prompt_only)
    async with aclosing(state.engine.generate(*inputs)) as outputs:
        async for output in outputs:
            if output.error is not None:
                raise EngineError(output.error)
            usage.take(output)
            chunks = form.chunks(position[output.request_id], output)
            if include_usage:
                for chunk in chunks:
                    chunk["usage"] = usage.body() if continuous else None
            if chunks:
                yield chunks
    if include_usage:
        yield [{**form.head(), "choices": [], "usage": usage.body()}]
