"""How one request is to be sampled: vLLM's `SamplingParams`, checked when it is made."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_LOGIT_BIAS = 100.0


def _check_range(name: str, value: float, low: float, high: float, hint: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or math.isnan(value) or not low <= value <= high:
        raise ValueError(f"{name} must be {hint}, got {value!r}.")


def _check_int(name: str, value: int, low: int, hint: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} must be {hint}, got {value!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, under vLLM's names and defaults.

    Attributes:
        n: how many completions; they share the prompt's cache blocks.
        temperature: 0 is greedy; values under 1e-5 count as 0.
        top_k: 0 and -1 keep the whole vocabulary.
        seed: same seed and prompt, same text, whatever else is in the batch.
        max_tokens: None means up to the context length.
        logprobs: how many top logprobs to return a token; None for none.
        prompt_logprobs: the same for the prompt's tokens.
        logit_bias: token id -> value added to its logit, within ±100.

    Raises:
        ValueError: a value is out of range; the message names it and the range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    # Filled by __post_init__: `stop` and `stop_token_ids` as tuples.
    stop_strings: tuple[str, ...] = field(init=False, default=())
    stop_ids: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, "a whole number of at least 1")
        _check_range("presence_penalty", self.presence_penalty, -2, 2, "between -2 and 2")
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2, "between -2 and 2")
        _check_range("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, "above 0")
        _check_range("temperature", self.temperature, 0, 1e6, "a finite number of at least 0")
        _check_range("top_p", self.top_p, 1e-12, 1, "in (0, 1]")
        _check_int("top_k", self.top_k, -1, "-1 or 0 (off), or a positive whole number")
        _check_range("min_p", self.min_p, 0, 1, "in [0, 1]")
        if self.seed is not None and (
            not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**64
        ):
            raise ValueError(f"seed must be a 64-bit whole number, got {self.seed!r}.")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, "a whole number of at least 1")
        _check_int("min_tokens", self.min_tokens, 0, "a whole number of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must not exceed max_tokens={self.max_tokens}, got {self.min_tokens}."
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, 0, "a whole number of at least 0")
        self._set_stops()
        self._set_logit_bias()

    def _set_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop must hold non-empty strings, got {self.stop!r}.")
        if stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True; use stop_token_ids instead.")
        ids = tuple(self.stop_token_ids or ())
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ValueError(f"stop_token_ids must hold token ids, got {self.stop_token_ids!r}.")
        object.__setattr__(self, "stop_strings", stop)
        object.__setattr__(self, "stop_ids", ids)

    def _set_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        bias: dict[int, float] = {}
        for key, value in self.logit_bias.items():
            try:
                token = int(key)
            except (TypeError, ValueError):
                raise ValueError(f"logit_bias keys must be token ids, got {key!r}.") from None
            if token < 0:
                raise ValueError(f"logit_bias keys must be token ids, got {key!r}.")
            _check_range(
                f"logit_bias[{key}]", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, "between -100 and 100"
            )
            bias[token] = float(value)
        object.__setattr__(self, "logit_bias", bias)

    @property
    def greedy(self) -> bool:
        """Whether the token is an argmax; tiny temperatures would overflow and count as 0."""
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def check_vocab(self, vocab_size: int, max_logprobs: int) -> None:
        """Checks what depends on the model; raises ValueError naming field, value and limit."""
        for token in self.logit_bias or ():
            if token >= vocab_size:
                raise ValueError(
                    f"logit_bias key {token} is not in the vocabulary (size {vocab_size})."
                )
        for token in self.stop_ids:
            if token >= vocab_size:
                raise ValueError(
                    f"stop_token_ids holds {token}, which is not in the vocabulary "
                    f"(size {vocab_size})."
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > max_logprobs:
                raise ValueError(
                    f"{name} must be at most {max_logprobs} (--max-logprobs), got {value}."
                )


_GENERATION_FIELDS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


def generation_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling defaults in a generation_config.json, under SamplingParams' names.

    As in vLLM they stand in for what a request leaves out. null counts as absent.
    """
    return {
        name: generation_config[key]
        for key, name in _GENERATION_FIELDS.items()
        if generation_config.get(key) is not None
    }
