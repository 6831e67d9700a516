"""Name map of Qwen3ForCausalLM (transformers: models/qwen3/modeling_qwen3.py)."""

from dataclasses import replace

from jaxllm.converters import llama
from jaxllm.converters.name_map import Rule

_HEAD_NORMS = tuple(
    Rule((name,), name)
    for name in (
        "model.layers.{i}.self_attn.q_norm.weight",
        "model.layers.{i}.self_attn.k_norm.weight",
    )
)

NAME_MAP = replace(llama.NAME_MAP, rules=llama.NAME_MAP.rules + _HEAD_NORMS)
