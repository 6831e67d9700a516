"""Which name map belongs to which architecture of config.json."""

from jaxllm.converters import llama, qwen2, qwen3
from jaxllm.converters.name_map import NameMap

NAME_MAPS: dict[str, NameMap] = {
    "LlamaForCausalLM": llama.NAME_MAP,
    "Qwen2ForCausalLM": qwen2.NAME_MAP,
    "Qwen3ForCausalLM": qwen3.NAME_MAP,
}


def name_map_for(architectures: list[str]) -> NameMap:
    """The name map of the first known architecture.

    Raises:
        ValueError: none is known. models/registry.py says so first, with nearest names.
    """
    for name in architectures:
        if name in NAME_MAPS:
            return NAME_MAPS[name]
    raise ValueError(f"no name map for {architectures}; there are {', '.join(NAME_MAPS)}.")
