"""Message dialects: every text reaches the template, what is not understood is refused."""

from typing import Any

import pytest

from jaxllm.engine.tokenizer import Tokenizer, normalize_messages

TEXT_A, TEXT_B = {"type": "text", "text": "A"}, {"type": "text", "text": "B"}


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "user", "content": [TEXT_A, TEXT_B]}, "A\nB"),
        ({"role": "user", "content": [{"type": "input_text", "text": "A"}, "B"]}, "A\nB"),
        ({"role": "tool", "content": [TEXT_A], "tool_call_id": "1"}, "A"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant"}, ""),
        ({"role": "user", "content": ""}, ""),
        ({"role": "user", "content": []}, ""),
        ({"role": "user", "content": "A", "name": "Ann"}, "A"),
    ],
)
def test_content_becomes_text(message: dict[str, Any], content: str) -> None:
    [normalized] = normalize_messages([message])
    assert normalized == {**message, "content": content}


def test_developer_acts_as_system_and_joins_it() -> None:
    user = {"role": "user", "content": "Hi"}
    assert normalize_messages([{"role": "developer", "content": "D"}, user]) == [
        {"role": "system", "content": "D"},
        user,
    ]
    merged = normalize_messages(
        [{"role": "system", "content": "S"}, {"role": "developer", "content": [TEXT_A]}, user]
    )
    assert merged == [{"role": "system", "content": "S\n\nA"}, user]
    later = normalize_messages([user, {"role": "developer", "content": "D"}])
    assert later == [user, {"role": "system", "content": "D"}]


def test_tool_calls_arguments_become_objects() -> None:
    def normalized(arguments: Any) -> Any:
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        [result] = normalize_messages([message])
        assert result["content"] == ""
        assert calls[0]["function"]["arguments"] is arguments  # the caller's stay as they are
        return result["tool_calls"][0]["function"]["arguments"]

    assert normalized('{"x": [1, "é"]}') == {"x": [1, "é"]}
    assert normalized({"x": 1}) == {"x": 1}
    assert normalized("") == {}
    assert normalized("{broken") == "{broken"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "must not be empty"),
        ("Hi", "must be a list"),
        ({"role": "user", "content": "Hi"}, "must be a list"),
        (["Hi"], r"messages\[0\] must be an object"),
        ([{"content": "Hi"}], r"messages\[0\]\.role must be one of .*; got None"),
        ([{"role": "foo", "content": "Hi"}], "'foo'"),
        ([{"role": ["user"], "content": "Hi"}], r"\['user'\]"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be text .* got 5"),
        (
            [{"role": "user", "content": [TEXT_A, {"type": "image_url", "image_url": {}}]}],
            r"messages\[0\]\.content\[1\] has the type 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], r"\[0\]\.text must be"),
        ([{"role": "user", "content": [7]}], r"content\[0\] must be an object"),
        ([{"role": "assistant", "tool_calls": "f"}], r"tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": ["f"]}], r"tool_calls\[0\] must be an object"),
    ],
)
def test_what_is_not_understood_is_named(messages: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        normalize_messages(messages)


def test_every_text_reaches_the_prompt() -> None:
    tokenizer = Tokenizer.load("demo")
    messages = [
        {"role": "developer", "content": [TEXT_A, TEXT_B]},
        {"role": "user", "content": [{"type": "text", "text": "C"}]},
        {"role": "tool", "content": [{"type": "text", "text": "D"}]},
    ]
    text = tokenizer.apply_chat_template(normalize_messages(messages), tokenize=False)
    assert text == (
        "<|im_start|>system\nA\nB<|im_end|>\n<|im_start|>user\nC<|im_end|>\n"
        "<|im_start|>tool\nD<|im_end|>\n"
    )
