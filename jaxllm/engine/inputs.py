"""What a user asks for, tokenized, and whether the model can do it at all."""

from dataclasses import dataclass
from typing import Literal

from jaxllm.sampling_params import SamplingParams

OutputKind = Literal["cumulative", "delta", "final"]
"""cumulative: everything so far, after each step; delta: only what is new; final: once, at the
end. Deltas hold the completions that have news, the other two always all n."""


class ContextLengthError(ValueError):
    """The prompt, or the prompt and max_tokens, exceed the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationInput:
    """One user request: a tokenized prompt and how to sample from it.

    Attributes:
        prompt: the text, if there was one; only handed back in RequestOutput.
        kind: which RequestOutputs come of it.
        cache_salt: keeps its cached prefix blocks apart from other salts'.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    prompt: str | None = None
    kind: OutputKind = "cumulative"
    cache_salt: str | None = None


def check_input(
    request: GenerationInput, *, max_model_len: int, vocab_size: int, max_logprobs: int
) -> None:
    """Raises ValueError (ContextLengthError for lengths), naming what is wrong and the limit."""
    ids, params = request.prompt_token_ids, request.sampling_params
    if not ids:
        raise ValueError("The prompt is empty: it must have at least one token.")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(
            f"The prompt holds token id {wrong}, which is not in the vocabulary "
            f"(size {vocab_size})."
        )
    params.check_vocab(vocab_size, max_logprobs)
    limit = f"This model's maximum context length is {max_model_len} tokens"
    if len(ids) >= max_model_len:
        raise ContextLengthError(
            f"{limit}, but the prompt has {len(ids)} and the answer needs at least 1. "
            f"Shorten the prompt."
        )
    if params.max_tokens is not None and len(ids) + params.max_tokens > max_model_len:
        raise ContextLengthError(
            f"{limit}, but {len(ids) + params.max_tokens} were asked for: {len(ids)} in the "
            f"prompt and max_tokens={params.max_tokens}. Shorten the prompt or lower max_tokens."
        )
