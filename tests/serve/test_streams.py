"""The shape of answers, streamed and whole, for strict clients and for OpenAI's own."""

from typing import Any

import httpx
import openai
import pytest

from tests.serve.sse_parser import check_chunks, read_stream

USER = [{"role": "user", "content": "hello"}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def body_of(path: str, **extra: Any) -> dict[str, Any]:
    prompt = {"messages": USER} if path == CHAT else {"prompt": "hello"}
    return {**GREEDY, **prompt, **extra}


def whole(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def texts_of(path: str, answer: dict[str, Any]) -> list[str]:
    choices = sorted(answer["choices"], key=lambda c: c["index"])
    return [c["message"]["content"] if path == CHAT else c["text"] for c in choices]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"n": 2, "temperature": 1, "seed": 5},
        {"max_tokens": 1},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": False}},
        {"n": 3, "seed": 1, "temperature": 1, "stream_options": {"include_usage": True}},
    ],
    ids=["plain", "n2", "one-token", "usage", "no-usage", "n3-usage"],
)
def test_streams_keep_every_rule_and_say_what_whole_answers_say(http, path, extra):
    body = body_of(path, **extra)
    chunks = read_stream(http, path, body)
    usage = extra.get("stream_options", {}).get("include_usage", False)
    texts = check_chunks(chunks, body.get("n", 1), chat=path == CHAT, usage=usage)
    body.pop("stream_options", None)
    answer = whole(http, path, body)
    assert texts == texts_of(path, answer)
    if usage:
        got, expected = chunks[-1]["usage"], answer["usage"]
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert got[key] == expected[key]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_empty_reply_is_a_whole_stream(http, path):
    """The first token is the end of the text: no content, and still role and finish_reason."""
    body = body_of(path, logit_bias={"257": 100})
    chunks = read_stream(http, path, body)
    assert check_chunks(chunks, 1, chat=path == CHAT, usage=False) == [""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    answer = whole(http, path, body)
    assert answer["usage"]["completion_tokens"] == 1
    assert texts_of(path, answer) == [""]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_cut_alike_in_both_modes(http, path, include):
    full = texts_of(path, whole(http, path, body_of(path, max_tokens=24)))[0]
    stop = full[9:12]
    at = full.index(stop)
    expected = full[: at + len(stop)] if include else full[:at]
    body = body_of(path, max_tokens=24, stop=["nowhere", stop], include_stop_str_in_output=include)
    answer = whole(http, path, body)
    chunks = read_stream(http, path, body)
    assert texts_of(path, answer) == [expected]
    assert check_chunks(chunks, 1, chat=path == CHAT, usage=False) == [expected]
    for choice in (answer["choices"][0], chunks[-1]["choices"][0]):
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == stop
    # Nothing was generated long after the stop.
    assert answer["usage"]["completion_tokens"] <= 24


def test_a_stop_token_ends_without_its_text(http):
    full = whole(http, TEXT, body_of(TEXT, return_token_ids=True))["choices"][0]
    token = full["token_ids"][5]
    first = full["token_ids"].index(token)
    body = body_of(TEXT, return_token_ids=True, stop_token_ids=[token])
    choice = whole(http, TEXT, body)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == token
    assert choice["token_ids"] == full["token_ids"][: first + 1]
    detokenized = http.post("/detokenize", json={"tokens": choice["token_ids"][:-1]}).json()
    assert choice["text"] == detokenized["prompt"]


def test_several_prompts_of_each_kind(http):
    ids = http.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    for prompt in (["hello", "other"], [ids, ids[:3]]):
        body = {**GREEDY, "prompt": prompt, "n": 2}
        answer = whole(http, TEXT, body)
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
        chunks = read_stream(http, TEXT, body)
        assert check_chunks(chunks, 4, chat=False, usage=False) == texts_of(TEXT, answer)
    single = whole(http, TEXT, {**GREEDY, "prompt": ids})
    assert texts_of(TEXT, single) == texts_of(TEXT, whole(http, TEXT, body_of(TEXT)))


def test_echo_and_logprobs_of_a_prompt(http):
    answer = whole(http, TEXT, body_of(TEXT, max_tokens=0, echo=True, logprobs=2))
    (choice,) = answer["choices"]
    assert choice["text"] == "hello"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list("hello")
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0
    streamed = read_stream(http, TEXT, body_of(TEXT, echo=True, max_tokens=4))
    (text,) = check_chunks(streamed, 1, chat=False, usage=False)
    assert text == texts_of(TEXT, whole(http, TEXT, body_of(TEXT, echo=True, max_tokens=4)))[0]
    assert text.startswith("hello")


def test_chat_logprobs_are_ranked_and_greedy_takes_the_best(http):
    body = body_of(CHAT, logprobs=True, top_logprobs=3)
    content = whole(http, CHAT, body)["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    for entry in content:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert entry["logprob"] == tops[0]
        assert entry["bytes"] == entry["top_logprobs"][0]["bytes"]
    chunks = read_stream(http, CHAT, body)
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [e["bytes"] for each in streamed for e in each["content"]] == [
        e["bytes"] for e in content
    ]


def test_prompt_logprobs_have_none_first(http):
    answer = whole(http, CHAT, body_of(CHAT, prompt_logprobs=1, return_token_ids=True))
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    assert answer["prompt_logprobs"][0] is None
    assert all(answer["prompt_logprobs"][1:])


def test_openai_client_streams_and_not(client: openai.OpenAI):
    # The helper takes an answer cut at max_tokens for an error: end it by a stop string.
    full = client.chat.completions.create(messages=USER, **GREEDY)  # pyright: ignore
    stop = str(full.choices[0].message.content)[8:10]
    arguments: Any = {**GREEDY, "messages": USER, "stop": stop}
    whole_chat = client.chat.completions.create(**arguments)
    with client.chat.completions.stream(
        **arguments,
        stream_options={"include_usage": True},
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole_chat.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert whole_chat.usage is not None
    assert final.usage.total_tokens == whole_chat.usage.total_tokens
    whole_text = client.completions.create(prompt="hello", **GREEDY)
    parts = client.completions.create(prompt="hello", stream=True, **GREEDY)
    assert "".join(p.choices[0].text for p in parts) == whole_text.choices[0].text
    assert [m.id for m in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"


def test_same_seed_same_text_and_cached_tokens_are_counted(http):
    body = body_of(CHAT, temperature=1.2, seed=7, max_tokens=20)
    first, second = whole(http, CHAT, body), whole(http, CHAT, body)
    assert texts_of(CHAT, first) == texts_of(CHAT, second)
    usage = second["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 16 <= cached < usage["prompt_tokens"]


def test_generation_config_defaults_stand_in_and_give_way(server, http):
    assert "top_k=40" in server.output
    greedy = whole(http, TEXT, body_of(TEXT))
    narrow = whole(http, TEXT, body_of(TEXT, temperature=5, top_k=1))
    assert texts_of(TEXT, narrow) == texts_of(TEXT, greedy)
    # By default the 40 best only: no sampled token has a rank beyond.
    wide = body_of(TEXT, temperature=50, seed=3, max_tokens=100, prompt_logprobs=0, logprobs=0)
    wide |= {"ignore_eos": True, "return_token_ids": True}
    assert len(set(whole(http, TEXT, wide)["choices"][0]["token_ids"])) > 40


def test_what_benchmark_clients_send(http):
    body = {
        "prompt": "probe",
        "max_tokens": 99,
        "max_completion_tokens": 9,
        "stop": None,
        "ignore_eos": True,
        "temperature": None,
        "user": None,
        "best_of": 1,
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "some_new_key": 1,
    }
    answer = whole(http, TEXT, body)
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["model"] == "tiny"


def test_defaults_of_max_tokens(http):
    text = whole(http, TEXT, {"prompt": "a", "ignore_eos": True})
    assert text["usage"]["completion_tokens"] == 16
    chat = whole(http, CHAT, {"messages": USER, "ignore_eos": True})
    assert chat["usage"]["total_tokens"] == 256
