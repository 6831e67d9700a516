"""What crosses the process border comes out as it went in."""

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.messages import (
    AbortRequests,
    AddRequest,
    AskStats,
    Failed,
    Outputs,
    Ready,
    Rejected,
    Shutdown,
    Stats,
    decode_to_engine,
    decode_to_front,
    encode,
)
from jaxllm.outputs import EngineOutput, EngineStats, TokenLogprobs
from jaxllm.request import Request
from jaxllm.sampling_params import SamplingParams

STATS = EngineStats(num_running=3, last_step_time=1.5)


@pytest.mark.parametrize("message", [AbortRequests(["a", "b"]), AskStats(5), Shutdown()])
def test_to_the_engine(message):
    assert decode_to_engine(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Ready(
            EngineConfig(served_model_name=("a", "b")),
            7,
            [1, 2],
            {"temperature": 0.5, "nested": [None, {"a": 1}]},
            STATS,
        ),
        Outputs(
            [
                EngineOutput("a", [1], [TokenLogprobs([1, 2], [-0.5, -1.0], 1)]),
                EngineOutput("b", finish_reason="stop", stop_reason=4, num_cached_tokens=16),
                EngineOutput("c", finish_reason="error", error="why"),
            ],
            STATS,
        ),
        Outputs([]),
        Rejected(["a-0"], "too long"),
        Stats(9, STATS),
        Failed("no memory", "Traceback", True),
    ],
)
def test_to_the_front(message):
    assert decode_to_front(encode(message)) == message


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            n=2,
            stop=["x", "y"],
            stop_token_ids=[5],
            logit_bias={7: -100},
            seed=2**64 - 1,
            max_tokens=None,
            logprobs=3,
            ignore_eos=True,
        ),
        SamplingParams(stop="one", seed=-(2**63)),
    ],
)
def test_requests_are_rebuilt(params):
    requests = [
        Request(f"r-{i}", [1, 2, 3], params, frozenset({4}), seed=i, group_id="r", cache_salt="s")
        for i in range(2)
    ]
    message = decode_to_engine(encode(AddRequest.of(requests)))
    assert isinstance(message, AddRequest)
    for sent, got in zip(requests, message.requests(), strict=True):
        for name in ("request_id", "prompt_token_ids", "token_ids", "seed", "group_id"):
            assert getattr(got, name) == getattr(sent, name)
        assert got.sampling_params == sent.sampling_params
        assert got.stop_ids == sent.stop_ids
        assert got.cache_salt == "s"
