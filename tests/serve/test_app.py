"""The routes over an engine that can be told to misbehave, in this process."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.engine.tokenizer import Tokenizer
from jaxllm.serve.app import make_app
from jaxllm.serve.metrics import Metrics
from jaxllm.serve.options import ServeConfig
from jaxllm.serve.state import ServerState
from tests.engine.scripted_engine import CRASH, FAIL, REFUSE, ScriptedEngine

TEXT = "/v1/completions"


@asynccontextmanager
async def client(tokenizer: Tokenizer | None) -> AsyncIterator[httpx.AsyncClient]:
    engine = AsyncEngine(EngineConfig(model="scripted"), make_engine=ScriptedEngine)
    try:
        state = ServerState(engine, ServeConfig(), Metrics("scripted"), ("scripted",))
        transport = httpx.ASGITransport(make_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            response = await http.post(TEXT, json={"prompt": "a"})
            assert response.json()["error"]["code"] == "model_loading"
            await engine.wait_ready()
            engine.open(tokenizer)
            assert "top_k=7" in state.take_defaults()
            yield http
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def tokenizer(tiny_model) -> Tokenizer:
    return Tokenizer.load(tiny_model)


def body(kind: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": [kind, 1], "max_tokens": 4, **fields}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_400_even_for_a_stream(tokenizer, stream):
    async with client(tokenizer) as http:
        response = await http.post(TEXT, json=body(REFUSE, n=2, stream=stream))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["message"] == "prompt needs 9 blocks, the cache has 8"
        assert error["param"] == "prompt"


async def test_a_failed_request_is_500_with_the_reason(tokenizer):
    async with client(tokenizer) as http:
        response = await http.post(TEXT, json=body(FAIL))
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the logits are not finite"
        assert (await http.post(TEXT, json=body(5))).status_code == 200


async def test_a_failure_on_the_way_is_an_event(tokenizer):
    """One prompt has begun to stream when the engine dies of another."""
    async with client(tokenizer) as http:
        async with http.stream("POST", TEXT, json=body(5, stream=True, max_tokens=60)) as response:
            assert response.status_code == 200
            crash = await http.post(TEXT, json=body(CRASH))
            assert crash.status_code == 500
            assert crash.json()["error"]["code"] == "engine_dead"
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert response.status_code == 200
        assert len(lines) > 2
        health = await http.get("/health")
        assert health.status_code == 503
        assert "the device is gone" in health.json()["error"]
        assert "jaxllm:engine_up" in (await http.get("/metrics")).text


async def test_without_a_tokenizer_ids_go_in_and_out():
    async with client(None) as http:
        answer = (await http.post(TEXT, json=body(5, return_token_ids=True, logprobs=1))).json()
        (choice,) = answer["choices"]
        assert choice["token_ids"] == [1, 2, 3, 4]
        assert choice["prompt_token_ids"] == [5, 1]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"][0] == "token_id:1"
        for path, extra in (
            (TEXT, {"prompt": "text"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/tokenize", {"prompt": "text"}),
        ):
            response = await http.post(path, json=extra)
            assert response.status_code == 400, path
            assert "--skip-tokenizer-init" in response.json()["error"]["message"]
        response = await http.post(TEXT, json=body(5, stop="x"))
        assert "stop_token_ids" in response.json()["error"]["message"]


async def test_a_stream_of_ids_is_whole(tokenizer):
    async with client(tokenizer) as http:
        response = await http.post(TEXT, json=body(5, stream=True, return_token_ids=True))
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert [token for c in choices for token in c["token_ids"]] == [1, 2, 3, 4]
