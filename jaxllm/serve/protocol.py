"""Schemas of the request bodies: OpenAI's fields and vLLM's extra sampling fields.

null means left out, as OpenAI's clients send it. Fields with a meaning that this server does not
have are listed in UNSUPPORTED: they are refused unless they hold a neutral value.
"""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from jaxllm.serve.errors import not_supported

Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True)]
Bool = Annotated[bool, Field(strict=True)]

MOST_STOPS = 64
MOST_COMPLETIONS = 128
MOST_PROMPTS = 2048


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    include_usage: Bool | None = None
    continuous_usage_stats: Bool | None = None


class SamplingFields(BaseModel):
    """What both routes take."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: Int | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int | None = None
    min_p: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    repetition_penalty: Float | None = None
    seed: Int | None = None
    stop: Any = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: Bool | None = None
    ignore_eos: Bool | None = None
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    min_tokens: Int | None = None
    logit_bias: dict[str, Float] | None = None
    skip_special_tokens: Bool | None = None
    spaces_between_special_tokens: Bool | None = None
    prompt_logprobs: Int | None = None
    add_special_tokens: Bool | None = None
    cache_salt: str | None = None
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Bool | None = None
    # Known, and without a meaning here.
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    request_id: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @field_validator("stop", mode="after")
    @classmethod
    def _check_stop(cls, value: Any) -> list[str] | None:
        stops = [value] if isinstance(value, str) else value
        if stops is None:
            return None
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise ValueError("stop must be a non-empty string or a list of such strings.")
        if len(stops) > MOST_STOPS:
            raise ValueError(f"stop must hold at most {MOST_STOPS} strings, got {len(stops)}.")
        return stops

    @field_validator("n", mode="after")
    @classmethod
    def _check_n(cls, value: int | None) -> int | None:
        if value is not None and not 1 <= value <= MOST_COMPLETIONS:
            raise ValueError(f"n must be between 1 and {MOST_COMPLETIONS}, got {value}.")
        return value

    @property
    def token_limit(self) -> int | None:
        """max_completion_tokens, or else max_tokens."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


class CompletionRequest(SamplingFields):
    """Body of /v1/completions."""

    prompt: Any
    echo: Bool | None = None
    logprobs: Int | None = None
    suffix: str | None = None
    best_of: Int | None = None

    @field_validator("prompt", mode="after")
    @classmethod
    def _check_prompt(cls, value: Any) -> list[str] | list[list[int]]:
        """One prompt or several, as several."""
        if isinstance(value, str) or (value and _is_ids(value)):
            return [value]
        if not isinstance(value, list) or not value:
            raise ValueError(
                "prompt must be a string, a list of strings, a list of token ids, or a list of "
                "such lists, and not empty."
            )
        if len(value) > MOST_PROMPTS:
            raise ValueError(f"prompt must hold at most {MOST_PROMPTS} prompts, got {len(value)}.")
        if not all(isinstance(p, str) for p in value) and not all(_is_ids(p) for p in value):
            raise ValueError("prompt must hold strings only, token ids only, or lists of them.")
        return value


class ChatRequest(SamplingFields):
    """Body of /v1/chat/completions. `messages` are checked by chat_messages.py."""

    messages: list[Any]
    logprobs: Bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Known, and without a meaning here.
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    prediction: Any = None


class TokenizeRequest(BaseModel):
    """Body of /tokenize: a prompt or messages."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: Bool | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(BaseModel):
    """Body of /detokenize."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    tokens: list[Int]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _absent(value: Any) -> bool:
    return value is None or value is False or value == [] or value == {}


UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "suffix": lambda v: v in (None, ""),
    "best_of": lambda v: v in (None, 1),
    "response_format": lambda v: v is None or v == {"type": "text"},
    "tools": _absent,
    "tool_choice": lambda v: v in (None, "none", "auto"),
    "functions": _absent,
    "function_call": lambda v: v in (None, "none", "auto"),
    "modalities": lambda v: v in (None, ["text"]),
    "audio": _absent,
    "web_search_options": _absent,
    "structured_outputs": _absent,
    "guided_json": _absent,
    "guided_regex": _absent,
    "guided_choice": _absent,
    "guided_grammar": _absent,
    "use_beam_search": _absent,
    "allowed_token_ids": _absent,
    "bad_words": _absent,
    "truncate_prompt_tokens": _absent,
    "prompt_embeds": _absent,
    "documents": _absent,
    "chat_template": _absent,
    "mm_processor_kwargs": _absent,
    "kv_transfer_params": _absent,
    "thinking_token_budget": _absent,
    "priority": lambda v: v in (None, 0),
}


def refuse_unsupported(body: SamplingFields) -> None:
    """Raises ApiError for a field that asks for something this server cannot do."""
    for name, neutral in UNSUPPORTED.items():
        extra = body.model_extra or {}
        value = extra.get(name, getattr(body, name, None))
        if not neutral(value):
            raise not_supported(name)
