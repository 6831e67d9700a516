"""From the architecture names in config.json to model classes, imported on first use."""

import difflib
import importlib

from jaxllm.models.causal_lm import CausalLM

_MODULES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def supported_architectures() -> list[str]:
    return sorted(_MODULES)


def resolve(architectures: list[str]) -> type[CausalLM]:
    """The class of the first architecture that is supported.

    Raises:
        ValueError: none is; the message names them, the nearest supported names and all of them.
    """
    for name in architectures:
        if name in _MODULES:
            module = importlib.import_module(f"jaxllm.models.{_MODULES[name]}")
            return getattr(module, name)
    if not architectures:
        raise ValueError(f"config.json names no architecture; supported are {', '.join(_MODULES)}.")
    near = {
        match: None
        for name in architectures
        for match in difflib.get_close_matches(name, _MODULES, n=2, cutoff=0.5)
    }
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ValueError(
        f"architecture {', '.join(architectures)} is not supported.{hint} "
        f"Supported are {', '.join(_MODULES)}."
    )
