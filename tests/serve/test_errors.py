"""Every bad request gets its own 4xx in OpenAI's shape, and the server goes on serving."""

import json
from typing import Any

import httpx
import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    kind = "server_error" if status >= 500 else "invalid_request_error"
    assert body["error"]["type"] == kind
    assert body["error"]["message"]
    return body["error"]


# Fields added to a good body of /v1/completions -> param, and a part of the message.
BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "-1"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"temperature": True}, "temperature", "True"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_p": 1.1}, "top_p", "1.1"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"top_k": 1.5}, "top_k", "1.5"),
    ({"min_p": 1.5}, "min_p", "[0, 1]"),
    ({"presence_penalty": 3}, "presence_penalty", "between -2 and 2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "-2.5"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"seed": 2**70}, "seed", "64-bit"),
    ({"seed": "x"}, "seed", "'x'"),
    ({"n": 0}, "n", "between 1 and 128"),
    ({"n": 129}, "n", "129"),
    ({"n": "2"}, "n", "'2'"),
    ({"max_tokens": -186}, "max_tokens", "-186"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": "5"}, "max_tokens", "'5'"),
    ({"max_tokens": 2.5}, "max_tokens", "2.5"),
    ({"min_tokens": 20}, "min_tokens", "max_tokens=5"),
    ({"stop": 5}, "stop", "string"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"stop": ["a", 1]}, "stop", "list"),
    ({"stop_token_ids": [99999]}, "stop_token_ids", "99999"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"logprobs": 21}, "logprobs", "--max-logprobs"),
    ({"logprobs": -1}, "logprobs", "-1"),
    ({"logprobs": True}, "logprobs", "True"),
    ({"prompt_logprobs": 50}, "prompt_logprobs", "at most 20"),
    ({"logit_bias": {"999999": 5}}, "logit_bias", "999999"),
    ({"logit_bias": {"-1": 5}}, "logit_bias", "-1"),
    ({"logit_bias": {"hello": 5}}, "logit_bias", "hello"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "101"),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5", "'x'"),
    ({"logit_bias": {"5": None}}, "logit_bias.5", "None"),
    ({"logit_bias": [5]}, "logit_bias", "[5]"),
    ({"stream": "yes"}, "stream", "'yes'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"prompt": None}, "prompt", "must be"),
    ({"prompt": []}, "prompt", "not empty"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": [""]}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": 5}, "prompt", "must be"),
    ({"prompt": ["a", 1]}, "prompt", "only"),
    ({"prompt": [1, -1]}, "prompt", "-1"),
    ({"prompt": [1, 100000]}, "prompt", "100000"),
    ({"prompt": [1, True]}, "prompt", "only"),
    ({"model": 5}, "model", "5"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"best_of": 3}, "best_of", "not supported"),
    ({"guided_json": {"type": "object"}}, "guided_json", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
]


@pytest.mark.parametrize(
    ("fields", "param", "part"), BAD_FIELDS, ids=[json.dumps(f)[:40] for f, _, _ in BAD_FIELDS]
)
def test_bad_fields_are_named(http, fields, param, part):
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 5, **fields}
    error = error_of(http.post(TEXT, json=body), 400)
    assert error["param"] == param
    assert part in error["message"]
    assert error["code"]


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": None}, "messages", "None"),
        ({"messages": "hi"}, "messages", "'hi'"),
        ({"messages": ["hi"]}, "messages", "messages[0]"),
        ({"messages": [{"role": "foo", "content": "x"}]}, "messages", "'foo'"),
        ({"messages": [{"role": "user"}]}, "messages", "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        ({"logprobs": 5}, "logprobs", "5"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"chat_template": "{{ x }}"}, "chat_template", "not supported"),
        ({"chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs", "tokenize"),
    ],
)
def test_bad_chat_fields_are_named(http, fields, param, part):
    error = error_of(http.post(CHAT, json={"messages": USER, **fields}), 400)
    assert error["param"] == param
    assert part in error["message"]


def test_a_missing_field_is_named(http):
    assert error_of(http.post(TEXT, json={"max_tokens": 1}), 400)["param"] == "prompt"
    error = error_of(http.post(CHAT, json={"model": "tiny"}), 400)
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"text"',
        b'{"prompt": "a",}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 100_000,
    ],
)
def test_bad_json(http, content):
    headers = {"content-type": "application/json"}
    error = error_of(http.post(TEXT, content=content, headers=headers), 400)
    assert error["code"] == "invalid_json"


def test_a_body_that_is_too_large(http):
    error = error_of(http.post(TEXT, json={"prompt": "x" * 3_000_000}), 413)
    assert error["code"] == "body_too_large"


def test_other_content_types(http):
    response = http.post(TEXT, data={"prompt": "hi"})
    assert error_of(response, 400)["code"] == "invalid_content_type"


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_is_refused_with_the_numbers_and_never_cut(http, stream):
    body = {"prompt": "x" * 256, "max_tokens": 1, "stream": stream}
    error = error_of(http.post(TEXT, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert "256" in error["message"]
    body = {"prompt": "x" * 200, "max_tokens": 57, "stream": stream}
    error = error_of(http.post(TEXT, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    for number in ("256", "257", "200", "57"):
        assert number in error["message"]
    body = {"messages": [{"role": "user", "content": "x" * 300}], "stream": stream}
    assert error_of(http.post(CHAT, json=body), 400)["code"] == "context_length_exceeded"
    body = {"prompt": "x" * 200, "max_tokens": 56, "ignore_eos": True}
    assert http.post(TEXT, json=body).json()["usage"]["total_tokens"] == 256


def test_huge_numbers_are_values_not_crashes(http):
    body = {"prompt": "hi", "top_k": 10**30, "max_tokens": 2, "ignore_eos": True}
    assert http.post(TEXT, json=body).status_code == 200
    error = error_of(http.post(TEXT, json={"prompt": "hi", "max_tokens": 10**30}), 400)
    assert error["code"] == "context_length_exceeded"


def test_bias_and_eos(http):
    """-100 never, 100 always, beside many others."""
    (letter,) = http.post("/tokenize", json={"prompt": "A"}).json()["tokens"]
    bias = {str(i): 0.0 for i in range(256)} | {str(letter): 100}
    body = {"prompt": "hi", "logit_bias": bias, "max_tokens": 4}
    assert http.post(TEXT, json=body).json()["choices"][0]["text"] == "AAAA"
    body = {"prompt": "hi", "logit_bias": {"257": -100}, "max_tokens": 50}
    assert http.post(TEXT, json=body).json()["choices"][0]["finish_reason"] == "length"


def test_unknown_models_routes_and_methods(http):
    for path, body in ((TEXT, {"prompt": "hi"}), (CHAT, {"messages": USER})):
        error = error_of(http.post(path, json={**body, "model": "other"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "other" in error["message"]
    assert error_of(http.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert error_of(http.get("/v1/nothing"), 404)["code"] == "not_found"
    response = http.get(TEXT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_a_refused_request_among_several_prompts_starts_none(http, server):
    before = server.metric("engine_steps_total")
    body = {"prompt": ["fine", "x" * 300], "max_tokens": 100}
    error_of(http.post(TEXT, json=body), 400)
    assert server.metric("num_requests_running") == 0
    assert server.metric("engine_steps_total") == before


def test_unknown_keys_are_logged_once_with_the_near_one(http, server):
    for _ in range(2):
        body = {"prompt": "hi", "max_token": 3, "max_tokens": 1}
        assert http.post(TEXT, json=body).status_code == 200
    assert server.output.count("'max_token'") == 1
    assert "did you mean max_tokens?" in server.output


def test_errors_leave_nothing_behind(http, server):
    assert http.get("/health").json()["status"] == "ready"
    assert server.metric("kv_blocks_live") == 0
    assert "Traceback" not in server.output
