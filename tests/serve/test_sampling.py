"""How many tokens a request gets that does not say."""

import pytest

from jaxllm.serve.protocol import CompletionRequest
from jaxllm.serve.sampling import Limits, sampling_params


@pytest.mark.parametrize(
    ("asked", "route", "model", "room", "given"),
    [
        (None, 16, None, 100, 16),
        (None, None, None, 100, 100),
        (None, 16, 7, 100, 7),  # generation_config.json's limit holds on every route
        (None, 16, 40, 100, 16),
        (None, None, 7, 100, 7),
        (None, None, 200, 100, 100),
        (None, 16, 7, 3, 3),
        (50, 16, 7, 100, 50),  # but a request may ask for more
    ],
)
def test_the_least_default_counts(
    asked: int | None, route: int | None, model: int | None, room: int, given: int
) -> None:
    body = CompletionRequest(model="m", prompt="x", max_tokens=asked)
    limits = Limits(room=room, default_max_tokens=route, detokenize=True)
    defaults = {} if model is None else {"max_tokens": model, "top_k": 3}
    params = sampling_params(body, defaults, limits, logprobs=None, prompt_logprobs=None)
    assert params.max_tokens == given
    assert params.top_k == (0 if model is None else 3)
