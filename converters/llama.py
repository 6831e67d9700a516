"""Name map of LlamaForCausalLM (transformers: models/llama/modeling_llama.py)."""

from jaxllm.converters.name_map import (
    HEADS_IN,
    QKV,
    QKV_BIAS,
    STACK,
    STACK_BIAS,
    TRANSPOSE,
    NameMap,
    Rule,
)

_LAYER = "model.layers.{i}."
_ATTENTION = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."


def _keep(name: str) -> Rule:
    return Rule((name,), name)


NAME_MAP = NameMap(
    rules=(
        _keep("model.embed_tokens.weight"),
        _keep(_LAYER + "input_layernorm.weight"),
        Rule(
            tuple(_ATTENTION + f"{part}_proj.weight" for part in "qkv"),
            _ATTENTION + "qkv_proj.weight",
            QKV,
        ),
        Rule(
            tuple(_ATTENTION + f"{part}_proj.bias" for part in "qkv"),
            _ATTENTION + "qkv_proj.bias",
            QKV_BIAS,
        ),
        Rule((_ATTENTION + "o_proj.weight",), _ATTENTION + "o_proj.weight", HEADS_IN),
        _keep(_ATTENTION + "o_proj.bias"),
        _keep(_LAYER + "post_attention_layernorm.weight"),
        Rule(
            (_MLP + "gate_proj.weight", _MLP + "up_proj.weight"),
            _MLP + "gate_up_proj.weight",
            STACK,
        ),
        Rule(
            (_MLP + "gate_proj.bias", _MLP + "up_proj.bias"),
            _MLP + "gate_up_proj.bias",
            STACK_BIAS,
        ),
        Rule((_MLP + "down_proj.weight",), _MLP + "down_proj.weight", TRANSPOSE),
        _keep(_MLP + "down_proj.bias"),
        _keep("model.norm.weight"),
        _keep("lm_head.weight"),
    ),
    ignored=tuple(
        place + buffer
        for place in (_ATTENTION + "rotary_emb.", "model.rotary_emb.")
        for buffer in ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached")
    ),
)
