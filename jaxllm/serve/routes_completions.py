"""POST /v1/completions."""

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxllm.engine.inputs import GenerationInput
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.serve.body import read_body
from jaxllm.serve.errors import ApiError
from jaxllm.serve.generation import Prompt, answer, check_stream_options, new_id
from jaxllm.serve.logprobs import completion_logprobs, prompt_logprobs_body
from jaxllm.serve.protocol import CompletionRequest, refuse_unsupported
from jaxllm.serve.sampling import Limits, sampling_params
from jaxllm.serve.state import ServerState

router = APIRouter()

DEFAULT_MAX_TOKENS = 16


class CompletionFormat:
    """Writes the answers of one request; keeps where each choice of a stream stands."""

    def __init__(
        self,
        body: CompletionRequest,
        model: str,
        prompts: list[Prompt],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.id = new_id("cmpl")
        self.asked = body
        self.tokenizer = tokenizer
        self.model = model
        self.prompts = prompts
        self.created = int(time.time())
        self.n = body.n or 1
        self.echo = bool(body.echo)
        self.prompt_only = self.echo and body.token_limit == 0
        self.started: set[int] = set()
        self.offsets: dict[int, int] = {}  # of a choice: characters of its tokens so far

    def head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
        choices = [self._choice(prompt_index, output, c) for c in output.outputs]
        shown = [c for c in choices if c["text"] or c["finish_reason"] or c["logprobs"]]
        if self.asked.return_token_ids:
            shown = choices
        return [{**self.head(), "choices": [choice]} for choice in shown]

    def body(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = [self._choice(i, o, c) for i, o in enumerate(outputs) for c in o.outputs]
        return {**self.head(), "choices": choices}

    def _choice(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        index = prompt_index * self.n + completion.index
        first = index not in self.started
        self.started.add(index)
        text = "" if self.prompt_only else completion.text
        if first and self.echo:
            text = (self.prompts[prompt_index].text or "") + text
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, output, completion, first),
            "finish_reason": "length" if self.prompt_only else completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if first and self.asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_body(output.prompt_logprobs)
        if self.asked.return_token_ids:
            choice["token_ids"] = [] if self.prompt_only else completion.token_ids
            if first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _logprobs(
        self, index: int, output: RequestOutput, completion: CompletionOutput, first: bool
    ) -> dict[str, list[Any]] | None:
        if self.asked.logprobs is None:
            return None
        ids = [] if self.prompt_only else list(completion.token_ids)
        entries = [] if self.prompt_only else list(completion.logprobs or [])
        if self.echo and first:
            ids = output.prompt_token_ids + ids
            entries = [*(output.prompt_logprobs or []), *entries]
        if not ids:
            return None
        offset = self.offsets.get(index, 0)
        result = completion_logprobs(ids, entries, offset, self._name)
        self.offsets[index] = result["text_offset"][-1] + len(result["tokens"][-1])
        return result

    def _name(self, token_id: int) -> str:
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)


async def _tokenize(state: ServerState, body: CompletionRequest) -> list[Prompt]:
    vocab_size = state.engine.vocab_size
    special = body.add_special_tokens is not False

    def work() -> list[Prompt]:
        return [tokenize(prompt) for prompt in body.prompt]

    def tokenize(prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(state.tokenizer.encode(prompt, add_special_tokens=special), prompt)
        for token_id in prompt:
            if not 0 <= token_id < vocab_size:
                raise ApiError(
                    f"prompt holds {token_id}, which is not in the vocabulary (size {vocab_size}).",
                    param="prompt",
                    code="invalid_value",
                )
        if body.echo:
            return Prompt(prompt, state.tokenizer.decode(prompt, skip_special_tokens=False))
        return Prompt(prompt)

    return await state.engine.run_in_pool(work)


def _input(
    state: ServerState, body: CompletionRequest, prompt: Prompt, request_id: str
) -> GenerationInput:
    prompt_logprobs = body.prompt_logprobs
    if prompt_logprobs is None and body.echo:
        prompt_logprobs = body.logprobs
    if body.echo and body.token_limit == 0:  # scores of the prompt: one token is made and dropped
        body = body.model_copy(update={"max_tokens": 1, "max_completion_tokens": None})
    limits = Limits(
        room=state.engine.max_model_len - len(prompt.token_ids),
        default_max_tokens=DEFAULT_MAX_TOKENS,
        detokenize=state.engine.tokenizer is not None,
    )
    params = sampling_params(
        body, state.defaults, limits, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs
    )
    return GenerationInput(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        sampling_params=params,
        prompt=prompt.text,
        kind="delta" if body.stream else "final",
        cache_salt=body.cache_salt,
    )


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Completes one prompt or several."""
    state: ServerState = request.app.state.server
    body = await read_body(request, CompletionRequest)
    state.check_model(body.model)
    refuse_unsupported(body)
    check_stream_options(body)
    prompts = await _tokenize(state, body)
    form = CompletionFormat(body, state.reported_name(body.model), prompts, state.engine.tokenizer)
    inputs = [_input(state, body, p, f"{form.id}-{i}") for i, p in enumerate(prompts)]
    return await answer(request, state, body, inputs, form)
