"""Many clients at once, clients that leave, and what is left of them."""

import asyncio
import random
import time
from typing import Any

import httpx
import openai

CONTEXT = 256


def greedy_body(i: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": f"{i}: " + "abcdefgh"[i % 8] * (i % 40 + 1),
        "temperature": 0,
        "max_tokens": 8 + i,
    }


def sampled_body(i: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.8, "n": 2},
        {"temperature": 1, "min_p": 0.1, "frequency_penalty": 1.0},
        {"temperature": 1, "repetition_penalty": 1.3, "logprobs": 3},
    ]
    return {**greedy_body(i), **kinds[i % 4], "seed": i}


async def test_32_at_once_do_not_touch_each_other(server):
    bodies = [greedy_body(i) if i % 2 else sampled_body(i) for i in range(32)]
    async with openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="none", timeout=120, max_retries=0
    ) as client:

        async def ask(body: dict[str, Any], stream: bool) -> list[str]:
            more = extra(body)
            if not stream:
                answer = await client.completions.create(**body, extra_body=more)
                return [choice.text for choice in answer.choices]
            texts = [""] * body.get("n", 1)
            parts: Any = await client.completions.create(**body, extra_body=more, stream=True)
            async for part in parts:
                for choice in part.choices:
                    texts[choice.index] += choice.text
            return texts

        def extra(body: dict[str, Any]) -> dict[str, Any]:
            """What the client does not know by name travels in the body as well."""
            own = ("top_k", "min_p", "repetition_penalty")
            return {k: body.pop(k) for k in own if k in body}

        together = await asyncio.gather(
            *(ask(dict(body), stream=i % 3 == 0) for i, body in enumerate(bodies))
        )
        alone = [await ask(dict(body), stream=i % 3 != 0) for i, body in enumerate(bodies)]
    assert together == alone
    assert server.metric("kv_blocks_live") == 0


async def leave_after(client: httpx.AsyncClient, path: str, body: dict, seconds: float) -> None:
    """Sends a request and closes the connection after a while, whatever has come."""
    try:
        async with asyncio.timeout(seconds), client.stream("POST", path, json=body) as response:
            async for _ in response.aiter_bytes():
                pass
    except TimeoutError:
        pass


async def idle(server, within_s: float) -> None:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        running = server.metric("num_requests_running") + server.metric("num_requests_waiting")
        if running == 0 and server.metric("kv_blocks_live") == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("requests or blocks are left")


async def test_a_client_that_leaves_frees_its_blocks_within_steps(server):
    # Many more sequences than slots: seconds of work, of which the metrics cannot miss the start.
    long = {"prompt": "abc" * 10, "max_tokens": 220, "ignore_eos": True, "n": 100}
    for stream in (True, False):
        async with httpx.AsyncClient(base_url=server.url) as client:
            aborted = server.metric("request_aborted_total")
            request = asyncio.create_task(
                leave_after(client, "/v1/completions", {**long, "stream": stream}, 60)
            )
            while server.metric("kv_blocks_live") == 0:
                assert not request.done(), "too fast to be left"
                await asyncio.sleep(0.001)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            left = server.metric("engine_steps_total")
            await idle(server, within_s=5)
            assert server.metric("request_aborted_total") > aborted
            # Thousands of steps were asked for; decoding stopped long before.
            assert server.metric("engine_steps_total") - left < 60


async def test_many_that_leave_at_random_moments_leave_nothing(server):
    rng = random.Random(0)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=40)
    ) as client:

        async def one(i: int) -> None:
            await asyncio.sleep(rng.random())
            body: dict[str, Any] = {
                "max_tokens": 40,
                "ignore_eos": True,
                "n": rng.choice((1, 1, 1, 4)),
                "stream": rng.random() < 0.5,
            }
            text = f"{i} " * rng.randrange(1, 40)
            if rng.random() < 0.5:
                path, body["prompt"] = "/v1/completions", text
            else:
                path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
            await leave_after(client, path, body, rng.random() * 0.4)

        await asyncio.gather(*(one(i) for i in range(100)))
    await idle(server, within_s=5)
    total = server.metric("kv_blocks_total")
    assert server.metric("kv_blocks_free") + server.metric("kv_blocks_cached") == total == 128
    health = httpx.get(server.url + "/health").json()
    assert health["unfinished_requests"] == 0
    assert "Traceback" not in server.output


async def test_a_long_prompt_being_tokenized_holds_up_no_stream(server):
    """A text of megabytes is refused in the end, and a stream goes on meanwhile."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        huge = asyncio.create_task(
            client.post("/v1/completions", json={"prompt": "word " * 400_000})
        )
        await asyncio.sleep(0.05)
        answers = 0
        while not huge.done():
            body = {"prompt": "a", "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            answers += 1
        assert (await huge).json()["error"]["code"] == "context_length_exceeded"
        assert answers > 0
