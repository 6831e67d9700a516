"""A strict reader of server-sent events, and the rules that a stream of chunks keeps."""

import json
from typing import Any

import httpx


def read_stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON events of a streamed answer.

    Each event is one `data:` line and an empty one; the last, and only the last, is [DONE].
    """
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        text = response.read().decode()
        assert response.status_code == 200, text
        assert response.headers["content-type"].split(";")[0] == "text/event-stream"
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    for event in events:
        assert event.startswith("data: ")
        assert "\n" not in event
    payloads = [event.removeprefix("data: ") for event in events]
    assert payloads[-1] == "[DONE]"
    assert payloads.count("[DONE]") == 1
    return [json.loads(payload) for payload in payloads[:-1]]


def check_chunks(chunks: list[dict[str, Any]], n: int, *, chat: bool, usage: bool) -> list[str]:
    """Checks every rule of a stream with n choices; returns their texts."""
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len({chunk["model"] for chunk in chunks}) == 1
    kind = "chat.completion.chunk" if chat else "text_completion"
    assert {chunk["object"] for chunk in chunks} == {kind}
    if usage:
        *chunks, last = chunks
        assert last["choices"] == []
        counts = last["usage"]
        assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
        assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    texts = [""] * n
    finished = [False] * n
    begun = [False] * n
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert not finished[index], "a chunk after the finish_reason"
        if chat:
            assert ("role" in choice["delta"]) == (not begun[index])
            texts[index] += choice["delta"].get("content", "")
        else:
            texts[index] += choice["text"]
        begun[index] = True
        finished[index] = choice["finish_reason"] is not None
    assert finished == [True] * n
    return texts
