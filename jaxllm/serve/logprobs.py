"""Logprobs in the three shapes that the API has for them."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.outputs import Logprob

# JSON has no -inf; vLLM's stand-in.
LOWEST = -9999.0

LogprobsDict = dict[int, Logprob]


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)


def _token(token_id: int, logprob: Logprob) -> str:
    return f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[LogprobsDict | None],
    offset: int,
    name_of: Callable[[int], str],
) -> dict[str, list[Any]]:
    """The four parallel lists of /v1/completions.

    Args:
        logprobs: None where there is none: at the first token of a prompt.
        offset: characters of the text before these tokens.
        name_of: the text of a token without logprobs.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    top: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        token = name_of(token_id) if entries is None else _token(token_id, entries[token_id])
        tokens.append(token)
        values.append(None if entries is None else _value(entries[token_id]))
        if entries is None:
            top.append(None)
        else:
            named: dict[str, float] = {}
            for each, logprob in entries.items():  # parts of characters share a name
                named.setdefault(_token(each, logprob), _value(logprob))
            top.append(named)
        offsets.append(offset)
        offset += len(token)
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": top}


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[LogprobsDict],
    top_logprobs: int,
    bytes_of: Callable[[int], bytes],
) -> dict[str, Any]:
    """The `logprobs` object of a chat choice.

    Args:
        bytes_of: a token's bytes, of which its text may show only U+FFFD.
    """

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        token = _token(token_id, logprob)
        return {"token": token, "logprob": _value(logprob), "bytes": list(bytes_of(token_id))}

    content = []
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        ranked = sorted(entries.items(), key=lambda item: item[1].rank or 0)
        top = [entry(i, p) for i, p in ranked if (p.rank or 0) <= top_logprobs]
        content.append({**entry(token_id, entries[token_id]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs_body(
    logprobs: Sequence[LogprobsDict | None] | None,
) -> list[dict[str, dict[str, Any]] | None] | None:
    """vLLM's `prompt_logprobs`: one object a prompt token, by token id; None for the first."""
    if logprobs is None:
        return None
    return [
        None
        if entries is None
        else {
            str(token_id): {
                "logprob": _value(p),
                "rank": p.rank,
                "decoded_token": p.decoded_token,
            }
            for token_id, p in entries.items()
        }
        for entries in logprobs
    ]
