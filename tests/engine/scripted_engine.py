"""An engine without a model, for the tests of what stands around one.

Each running request gets the ids 1, 2, 3 … one a step; prompts whose first id is one of these
make the engine misbehave.
"""

import os
import time
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.outputs import EngineOutput, EngineStats, TokenLogprobs
from jaxllm.request import Request

VOCAB_SIZE, CONTEXT = 300, 64
REFUSE, CRASH, EXIT, HANG, FAIL, BUG = 101, 102, 103, 104, 105, 106
STEP_S = 0.002


class ScriptedEngine:
    """The Engine protocol of jaxllm/engine/engine_loop.py."""

    def __init__(self, config: EngineConfig) -> None:
        if config.model == "no-such-model":
            raise ValueError("no model at 'no-such-model'")
        if config.model == "bug":
            raise KeyError("a bug")
        if config.model == "slow":
            time.sleep(60)
        self.config = config.replace(max_model_len=CONTEXT)
        self.vocab_size = VOCAB_SIZE
        self.eos_token_ids = frozenset({2})
        self.generation_config: dict[str, Any] = {"top_k": 7}
        self.requests: dict[str, Request] = {}
        self.seen: list[str] = []
        self.num_steps = 0

    def add_request(self, request: Request) -> None:
        if request.prompt_token_ids[0] == REFUSE and request.request_id.endswith("-1"):
            raise ValueError("prompt needs 9 blocks, the cache has 8")
        if request.prompt_token_ids[0] == BUG:
            raise TypeError("a bug")
        self.requests[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[EngineOutput]:
        time.sleep(STEP_S)
        self.num_steps += 1
        return [self._advance(request) for request in list(self.requests.values())]

    def _advance(self, request: Request) -> EngineOutput:
        kind = request.prompt_token_ids[0]
        if kind == CRASH:
            raise RuntimeError("the device is gone")
        if kind == EXIT:
            os._exit(7)
        if kind == HANG:
            time.sleep(60)
        if kind == FAIL:
            del self.requests[request.request_id]
            error = "the logits are not finite"
            return EngineOutput(request.request_id, finish_reason="error", error=error)
        token = request.num_output_tokens + 1
        request.token_ids.append(token)
        limit = request.sampling_params.max_tokens or 0
        done = request.num_output_tokens >= limit
        if done:
            del self.requests[request.request_id]
        logprobs = []
        if request.sampling_params.logprobs is not None:
            logprobs = [TokenLogprobs([token, token, 9], [-0.5, -0.5, -1.5], 1)]
        return EngineOutput(
            request.request_id, [token], logprobs, finish_reason="length" if done else None
        )

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.requests), num_steps=self.num_steps)


def without_model(config: EngineConfig) -> ScriptedEngine:
    """Stands for a host that lacks what the others have."""
    raise FileNotFoundError("no model on this host")
