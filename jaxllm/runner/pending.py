"""Steps and prompt logprobs that the device is still working on."""

from dataclasses import dataclass

import jax
import numpy as np

from jaxllm.outputs import (
    NO_TOKEN,
    NON_FINITE,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)


def prompt_logprobs_left(item: ScheduledRequest) -> int:
    """How many prompt logprobs the step's chunk gives: position p predicts token p + 1."""
    if item.request.sampling_params.prompt_logprobs is None:
        return 0
    return max(0, min(item.num_new_tokens, item.request.num_prompt_tokens - 1 - item.start))


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Prompt logprobs on their way from the device: rows first, first+1 … of `array`."""

    request_id: str
    token_ids: list[int]
    first: int
    array: jax.Array  # i32[C, 2 + 2 * max_logprobs], see sampler.token_logprobs
    num_logprobs: int


@dataclass(slots=True)
class PendingStep:
    """Steps given to the device at once. `results()` waits for them."""

    steps: list[SchedulerOutput]
    _result: jax.Array  # i32[B, C], or i32[steps, B, C] if there are several
    _prompt_logprobs: list[PendingLogprobs]
    _max_logprobs: int

    def results(self) -> list[ModelRunnerOutput]:
        """One for each step."""
        rows = np.asarray(self._result)
        each = rows if rows.ndim == 3 else rows[None]
        return [self._one(step, part) for step, part in zip(self.steps, each, strict=True)]

    def _one(self, step: SchedulerOutput, rows: np.ndarray) -> ModelRunnerOutput:
        token_ids: list[int] = rows[: len(step.requests), 0].tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        for i, item in enumerate(step.requests):
            wanted = item.request.sampling_params.logprobs
            if not item.samples:
                # A chunk whose last logits are not finite has already spoilt its blocks.
                token_ids[i] = NON_FINITE if token_ids[i] == NON_FINITE else NO_TOKEN
            elif wanted is not None and token_ids[i] >= 0:
                logprobs[i] = self._unpack(token_ids[i], rows[i, 1:], wanted)
        prompt: dict[str, list[TokenLogprobs]] = {}
        for part in self._prompt_logprobs:
            rows = np.asarray(part.array)[part.first :]
            prompt.setdefault(part.request_id, []).extend(
                self._unpack(token, row, part.num_logprobs)
                for token, row in zip(part.token_ids, rows, strict=False)
            )
        return ModelRunnerOutput(token_ids, logprobs, prompt)

    def _unpack(self, token: int, row: np.ndarray, wanted: int) -> TokenLogprobs:
        """A row as sampler.token_logprobs makes it: rank, logprob, top ids, their logprobs."""
        floats = row.view(np.float32)
        ids = row[2 : 2 + wanted].tolist()
        start = 2 + self._max_logprobs
        values = floats[start : start + wanted].tolist()
        return TokenLogprobs([token, *ids], [float(floats[1]), *values], int(row[0]))
