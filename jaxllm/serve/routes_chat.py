"""POST /v1/chat/completions."""

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxllm.engine.inputs import GenerationInput
from jaxllm.engine.tokenizer import Tokenizer, normalize_messages
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.serve.body import read_body
from jaxllm.serve.errors import ApiError, not_supported
from jaxllm.serve.generation import Prompt, answer, check_stream_options, new_id
from jaxllm.serve.logprobs import chat_logprobs, prompt_logprobs_body
from jaxllm.serve.protocol import ChatRequest, TokenizeRequest, refuse_unsupported
from jaxllm.serve.sampling import Limits, sampling_params
from jaxllm.serve.state import ServerState

router = APIRouter()

RESERVED_KWARGS = frozenset(
    {"chat_template", "tokenize", "add_generation_prompt", "continue_final_message", "tools"}
)


class ChatFormat:
    """Writes the answers of one request; keeps which choices of a stream have begun."""

    prompt_only = False

    def __init__(self, body: ChatRequest, model: str, tokenizer: Tokenizer) -> None:
        self.id = new_id("chatcmpl")
        self.tokenizer = tokenizer
        self.asked = body
        self.model = model
        self.created = int(time.time())
        self.streamed = bool(body.stream)
        self.started: set[int] = set()

    def head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.streamed else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        for completion in output.outputs:
            if completion.index not in self.started:
                chunks.append(self._opening(completion.index, output, first=not self.started))
                self.started.add(completion.index)
            logprobs = self._logprobs(completion)
            ids = self.asked.return_token_ids
            if not (completion.text or completion.finish_reason or logprobs or ids):
                continue  # half a character, or what may become a stop string
            choice: dict[str, Any] = {
                "index": completion.index,
                "delta": {"content": completion.text} if completion.text else {},
                "logprobs": logprobs,
                "finish_reason": completion.finish_reason,
            }
            if completion.finish_reason is not None:
                choice["stop_reason"] = completion.stop_reason
            if ids:
                choice["token_ids"] = completion.token_ids
            chunks.append({**self.head(), "choices": [choice]})
        return chunks

    def _opening(self, index: int, output: RequestOutput, *, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self.head(), "choices": [choice], **(self._prompt_facts(output) if first else {})}

    def _prompt_facts(self, output: RequestOutput) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        if self.asked.prompt_logprobs is not None:
            facts["prompt_logprobs"] = prompt_logprobs_body(output.prompt_logprobs)
        if self.asked.return_token_ids:
            facts["prompt_token_ids"] = output.prompt_token_ids
        return facts

    def body(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        output = outputs[0]
        choices = []
        for completion in output.outputs:
            message = {"role": "assistant", "content": completion.text, "refusal": None}
            choice = {
                "index": completion.index,
                "message": message,
                "logprobs": self._logprobs(completion),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            if self.asked.return_token_ids:
                choice["token_ids"] = completion.token_ids
            choices.append(choice)
        return {**self.head(), "choices": choices, **self._prompt_facts(output)}

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if not self.asked.logprobs or not completion.token_ids:
            return None
        top = self.asked.top_logprobs or 0
        entries = completion.logprobs or []
        return chat_logprobs(completion.token_ids, entries, top, self.tokenizer.bytes.__getitem__)


async def render_chat(state: ServerState, body: ChatRequest | TokenizeRequest) -> Prompt:
    """The conversation through the chat template, as text and ids."""
    tokenizer = state.tokenizer
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise ApiError(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
            code="invalid_value",
        )
    generation_prompt = body.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not continued
    kwargs = body.chat_template_kwargs or {}
    for name in RESERVED_KWARGS.intersection(kwargs):
        raise not_supported("chat_template_kwargs", f"{name!r} in chat_template_kwargs")

    def work() -> Prompt:
        try:
            text = tokenizer.apply_chat_template(
                normalize_messages(body.messages or []),
                tokenize=False,
                add_generation_prompt=generation_prompt,
                continue_final_message=continued,
                **kwargs,
            )
        except ValueError as error:
            raise ApiError(str(error), param="messages", code="invalid_value") from None
        # The template writes its own beginning-of-sequence token.
        return Prompt(tokenizer.encode(text, add_special_tokens=False), text)

    return await state.engine.run_in_pool(work)


def _input(
    state: ServerState, body: ChatRequest, prompt: Prompt, request_id: str
) -> GenerationInput:
    limits = Limits(
        room=state.engine.max_model_len - len(prompt.token_ids),
        default_max_tokens=None,
        detokenize=True,
    )
    params = sampling_params(
        body,
        state.defaults,
        limits,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    return GenerationInput(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        sampling_params=params,
        prompt=prompt.text,
        kind="delta" if body.stream else "final",
        cache_salt=body.cache_salt,
    )


def _check(body: ChatRequest, max_logprobs: int) -> None:
    top = body.top_logprobs
    if top is None:
        return
    if top and not body.logprobs:
        raise ApiError(
            "top_logprobs needs logprobs=true.", param="top_logprobs", code="invalid_value"
        )
    if not 0 <= top <= max_logprobs:
        raise ApiError(
            f"top_logprobs must be between 0 and {max_logprobs} (--max-logprobs), got {top}.",
            param="top_logprobs",
            code="invalid_value",
        )


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answers a conversation."""
    state: ServerState = request.app.state.server
    body = await read_body(request, ChatRequest)
    state.check_model(body.model)
    refuse_unsupported(body)
    check_stream_options(body)
    _check(body, state.engine.config.max_logprobs)
    prompt = await render_chat(state, body)
    form = ChatFormat(body, state.reported_name(body.model), state.tokenizer)
    return await answer(request, state, body, [_input(state, body, prompt, form.id)], form)
