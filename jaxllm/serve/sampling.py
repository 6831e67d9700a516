"""From a request body to SamplingParams."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.sampling_params import SamplingParams
from jaxllm.serve.errors import ApiError, named_param
from jaxllm.serve.protocol import SamplingFields

# Fields of the body that SamplingParams has under the same name.
_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the model and the route say about one prompt.

    Attributes:
        room: tokens left in the context after the prompt.
        default_max_tokens: of the route, if the body names none; None: all the room.
    """

    room: int
    default_max_tokens: int | None
    detokenize: bool


def sampling_params(
    body: SamplingFields,
    defaults: Mapping[str, Any],
    limits: Limits,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """What `body` asks for; `defaults` (of the model) stand in for fields that it leaves out.

    Raises:
        ApiError: 400, naming the parameter.
    """
    given = {name: getattr(body, name) for name in _SAME_NAME}
    fields = {**defaults, **{k: v for k, v in given.items() if v is not None}}
    if fields.get("top_k") is not None:  # a number beyond every vocabulary means all of it
        fields["top_k"] = min(fields["top_k"], 2**31 - 1)
    model_default = fields.pop("max_tokens", None)
    max_tokens = body.token_limit
    if max_tokens is None:
        defaults_given = [n for n in (limits.default_max_tokens, model_default) if n is not None]
        # No room at all is refused later on.
        max_tokens = max(1, min([*defaults_given, limits.room]))
    try:
        return SamplingParams(
            **fields,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            detokenize=limits.detokenize,
        )
    except ValueError as error:
        raise ApiError(str(error), param=named_param(str(error)), code="invalid_value") from None
