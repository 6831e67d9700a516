"""From the architecture names in config.json to model classes, imported on first use."""

import difflib
import importlib

from jaxllm.models.causal_lm import CausalLM

ModelTarget = type[CausalLM] | str
"""A model class, or "module:Class", which is imported when it is needed."""

_TARGETS: dict[str, ModelTarget] = {
    "LlamaForCausalLM": "jaxllm.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "jaxllm.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "jaxllm.models.qwen3:Qwen3ForCausalLM",
}
_HOW = (
    "An architecture that only names things otherwise, or a class of one's own, is added by "
    'jaxllm.register_model("{name}", model="{near}", rename={{…}}) before the engine starts, or '
    "by a package with an entry point of the group jaxllm.models."
)


def supported_architectures() -> list[str]:
    return sorted(_TARGETS)


def target_of(architecture: str) -> ModelTarget | None:
    """What is registered under a name, not yet imported."""
    return _TARGETS.get(architecture)


def register(architecture: str, target: ModelTarget) -> None:
    """Adds an architecture, or puts another class under its name."""
    _TARGETS[architecture] = target


def resolve(architectures: list[str]) -> type[CausalLM]:
    """The class of the first architecture that is supported.

    Raises:
        ValueError: none is; the message names them, the nearest supported names and all of them,
            and how to register one.
        ImportError: the module that is to hold the class cannot be imported, or lacks it.
    """
    for name in architectures:
        if name in _TARGETS:
            return _load(name, _TARGETS[name])
    supported = ", ".join(supported_architectures())
    if not architectures:
        raise ValueError(f"config.json names no architecture; supported are {supported}.")
    near = {
        match: None
        for name in architectures
        for match in difflib.get_close_matches(name, _TARGETS, n=2, cutoff=0.5)
    }
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    how = _HOW.format(name=architectures[0], near=next(iter(near), "LlamaForCausalLM"))
    raise ValueError(
        f"architecture {', '.join(architectures)} is not supported.{hint} "
        f"Supported are {supported}. {how}"
    )


def _load(architecture: str, target: ModelTarget) -> type[CausalLM]:
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        # Not "unsupported": the model is known, and its file is broken.
        raise ImportError(f"{architecture} is to come from {target}, but: {error}") from error
