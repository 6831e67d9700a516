"""Chat messages in the dialects of OpenAI's clients, made into what chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

# What clients write -> what templates know.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with plain text as content and roles that templates know.

    Content parts are joined in order, a line each; null content is empty text; "developer" acts
    as "system", and system messages that stand together at the start become one, since most
    templates know only the first; a tool call's arguments become an object. All other fields are
    kept.

    Raises:
        ValueError: no messages, an unknown role, a part that is no text, or a wrong type; the
            message names the place.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list of objects, got {type(messages).__name__}.")
    if not messages:
        raise ValueError("messages must not be empty.")
    normalized = [_normalize(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return _merge_leading_system(normalized)


def _normalize(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place} must be an object, got {message!r}.")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ValueError(f"{place}.role must be one of {', '.join(_ROLES)}; got {role!r}.")
    normalized = {**message, "role": _ROLES[role]}
    content = message.get("content")
    if content is None and role in ("user", "system", "developer"):
        raise ValueError(f"{place}.content is missing: a {role} message needs text.")
    normalized["content"] = _text(content, f"{place}.content")
    calls = normalized.pop("tool_calls", None)
    if calls:
        normalized["tool_calls"] = _tool_calls(calls, f"{place}.tool_calls")
    return normalized


def _text(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"{place} must be text or a list of parts, got {content!r}.")
    return "\n".join(_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ValueError(f"{place} must be an object, got {part!r}.")
    kind = part.get("type", "text" if "text" in part else None)
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise ValueError(f"{place} has the type {kind!r}, but this model takes text parts only.")
    text = part.get(field)
    if not isinstance(text, str):
        raise ValueError(f"{place}.{field} must be text, got {text!r}.")
    return text


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise ValueError(f"{place} must be a list, got {calls!r}.")
    normalized = []
    for i, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise ValueError(f"{place}[{i}] must be an object, got {call!r}.")
        function = call.get("function")
        if isinstance(function, Mapping):
            call = {**call, "function": {**function, "arguments": _arguments(function)}}
        normalized.append(dict(call))
    return normalized


def _arguments(function: Mapping[str, Any]) -> Any:
    """The arguments as an object, since templates write them with tojson; broken JSON stays."""
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _merge_leading_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    leading = 0
    while leading < len(messages) and messages[leading]["role"] == "system":
        leading += 1
    if leading < 2:
        return messages
    texts = [message["content"] for message in messages[:leading] if message["content"]]
    return [{**messages[0], "content": "\n\n".join(texts)}, *messages[leading:]]
