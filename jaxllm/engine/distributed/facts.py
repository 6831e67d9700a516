"""What must be equal in all processes of an engine, and which of it is not."""

import dataclasses
from importlib.metadata import version
from typing import Any

import msgspec

from jaxllm import __version__
from jaxllm.config import EngineConfig

MAY_DIFFER = {"process_id", "join_timeout", "compilation_cache_dir"}


def facts_of(config: EngineConfig, **more: Any) -> dict[str, Any]:
    """The flags and versions, and `more`, as they look after a journey."""
    fields = [f.name for f in dataclasses.fields(config) if f.name not in MAY_DIFFER]
    facts = {"--" + name.replace("_", "-"): getattr(config, name) for name in fields}
    facts |= {"the version of jaxllm": __version__, "the version of jax": version("jax")}
    encoder = msgspec.msgpack.Encoder(enc_hook=str)
    return msgspec.msgpack.decode(encoder.encode(facts | more))


def difference(mine: dict[str, Any], theirs: dict[str, Any], process_id: int) -> str | None:
    """The first fact on which process 0 and another differ, in a sentence; None if they agree."""
    for name in dict.fromkeys([*mine, *theirs]):
        if mine.get(name) != theirs.get(name):
            return (
                f"{name} is {theirs.get(name)!r} in process {process_id} and {mine.get(name)!r} "
                "in process 0: all processes of an engine need the same flags and versions."
            )
    return None
