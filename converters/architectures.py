"""What belongs to which architecture of config.json: name map, renamed tensors, last fixes."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxllm.converters import llama, qwen2, qwen3
from jaxllm.converters.name_map import NameMap

if TYPE_CHECKING:  # files are converted without jax
    import jax

NAME_MAPS: dict[str, NameMap] = {
    "LlamaForCausalLM": llama.NAME_MAP,
    "Qwen2ForCausalLM": qwen2.NAME_MAP,
    "Qwen3ForCausalLM": qwen3.NAME_MAP,
}

Params = dict[str, "jax.Array"]
PostLoad = Callable[[Params, Any], Params]
"""(dotted name -> parameter, the model's config) -> the same names, shapes and dtypes."""


@dataclass(frozen=True)
class Architecture:
    """How the checkpoints of one architecture are read.

    Attributes:
        name_map: the map, or "module:NAME", imported when it is needed.
        renames: each a table of parts of tensor names, applied one after the other before the map.
        post_load: changes the loaded parameters; also as "module:function".
    """

    name_map: NameMap | str
    renames: tuple[Mapping[str, str], ...] = field(default=())
    post_load: PostLoad | str | None = None


_REGISTERED: dict[str, Architecture] = {}


def register(name: str, architecture: Architecture) -> None:
    """Adds an architecture, or replaces it."""
    _REGISTERED[name] = architecture


def find_architecture(architectures: list[str]) -> Architecture | None:
    """How to read the first architecture that is known."""
    for name in architectures:
        if name in _REGISTERED:
            return _REGISTERED[name]
        if name in NAME_MAPS:
            return Architecture(NAME_MAPS[name])
    return None


def find_name_map(architectures: list[str]) -> NameMap | None:
    """The name map of the first known architecture, None if none is known.

    Raises:
        ImportError: it is to come from a module that cannot be imported, or lacks it.
    """
    found = find_architecture(architectures)
    return None if found is None else imported(found.name_map)


def name_map_for(architectures: list[str]) -> NameMap:
    """The name map of the first known architecture.

    Raises:
        ValueError: none is known. models/registry.py says so first, with nearest names.
        ImportError: as `find_name_map`.
    """
    name_map = find_name_map(architectures)
    if name_map is None:
        known = ", ".join([*NAME_MAPS, *_REGISTERED])
        raise ValueError(f"no name map for {architectures}; there are {known}.")
    return name_map


def imported(value: Any) -> Any:
    """`value`, or what "module:name" stands for.

    Raises:
        ImportError: there is no such module, or it lacks the name.
    """
    if not isinstance(value, str):
        return value
    module, _, attribute = value.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"{value} cannot be imported: {error}") from error
