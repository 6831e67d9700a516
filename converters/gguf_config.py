"""config.json and generation_config.json out of a GGUF file's metadata.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; which of transformers' fields
they become follows transformers' own reader (integrations/ggml.py), but every field that the file
states is set, since a default is some other checkpoint's value.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.gguf_rope import rope_scaling_from_gguf

logger = logging.getLogger(__name__)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Keys that change what a model computes in ways that none of the above has.
_REFUSED = {
    "expert_count": "a mixture of experts",
    "attention.sliding_window": "a sliding attention window",
    "attention.max_alibi_bias": "ALiBi positions",
    "attention.clamp_kqv": "clamped attention inputs",
    "attention.scale": "an attention scale of its own",
    "attn_logit_softcapping": "soft-capped attention logits",
    "final_logit_softcapping": "soft-capped logits",
    "logit_scale": "scaled logits",
    "embedding_scale": "scaled embeddings",
    "residual_scale": "scaled residuals",
    "use_parallel_residual": "parallel residuals",
}
_READ = {
    "context_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "expert_used_count",
    "tensor_data_layout",
}


@dataclass(frozen=True)
class GgufKeys:
    """The metadata of one architecture, read with checks. where: the file, for messages."""

    metadata: Mapping[str, Any]
    architecture: str
    where: str

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number; one for each layer will do if all are equal."""
        value = self.get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise self.error(key, value, "a positive whole number")

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < np.inf:
            return float(value)
        raise self.error(key, value, "a positive number")

    def error(self, key: str, value: Any, wanted: str) -> CheckpointError:
        said = "is missing" if value is None else f"is {value!r}"
        return CheckpointError(
            f"{self.where}: metadata key {self.architecture}.{key} {said}, not {wanted}."
        )


def architecture_of(metadata: Mapping[str, Any], where: str) -> str:
    """general.architecture, if it is supported."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{where} has the architecture {name!r} (general.architecture), which is not "
            f"supported; there are {', '.join(ARCHITECTURES)}."
        )
    return name


def interleaves_rope_rows(metadata: Mapping[str, Any]) -> bool:
    """Whether the rows of q and k stand in the order that llama.cpp's llama rotation wants."""
    return metadata.get("general.architecture") == "llama"


def config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    where: str,
) -> dict[str, Any]:
    """config.json's content.

    Args:
        shapes: of the tensors, under their GGUF names.
        read: a tensor's values (of the small one with rotary factors only).
        where: the file, for messages.

    Raises:
        CheckpointError: an unsupported architecture or feature, or a missing or impossible value.
    """
    architecture = architecture_of(metadata, where)
    keys = GgufKeys(metadata, architecture, where)
    _check_features(keys)
    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocab_size(keys, shapes),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    head_dim = _head_dim(keys, hidden, heads)
    if architecture != "qwen2" or head_dim * heads != hidden:
        config["head_dim"] = head_dim
    config["rope_theta"] = keys.number("rope.freq_base", 10000.0)
    config["rope_scaling"] = rope_scaling_from_gguf(
        keys.get,
        read("rope_freqs.weight") if "rope_freqs.weight" in shapes else None,
        head_dim=head_dim,
        theta=config["rope_theta"],
        where=where,
    )
    if architecture != "qwen2":
        config["attention_bias"] = any(name.endswith(".attn_q.bias") for name in shapes)
    if architecture == "llama":
        config["mlp_bias"] = any(name.endswith(".ffn_up.bias") for name in shapes)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config


def generation_config_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json's content: the ids that begin, end and pad a text.

    Chat models end a turn with eot or eom, a text with eos; any of them ends the output.
    """
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [metadata.get(f"tokenizer.ggml.{name}") for name in names]
    eos = list(dict.fromkeys(end for end in ends if end is not None))
    config = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in config.items() if value is not None}


def _check_features(keys: GgufKeys) -> None:
    """Raises for what the model classes do not have, warns of keys that nobody reads."""
    for key, feature in _REFUSED.items():
        if keys.get(key):
            raise CheckpointError(
                f"{keys.where} has {feature} ({keys.architecture}.{key} = {keys.get(key)!r}), "
                f"which {ARCHITECTURES[keys.architecture]} does not support."
            )
    prefix = f"{keys.architecture}."
    unread = [
        key
        for key in keys.metadata
        if key.startswith(prefix)
        and key.removeprefix(prefix) not in _READ | set(_REFUSED)
        and not key.startswith(f"{prefix}rope.scal")
    ]
    if unread:
        logger.warning("%s: metadata keys not understood: %s", keys.where, ", ".join(unread))


def _head_dim(keys: GgufKeys, hidden: int, heads: int) -> int:
    if keys.get("attention.key_length") is None and hidden % heads:
        raise keys.error("attention.head_count", heads, f"a divisor of embedding_length {hidden}")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    for key, what in (
        ("attention.value_length", "values of another length than keys"),
        ("rope.dimension_count", "a rotation of a part of each head"),
    ):
        if keys.integer(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{keys.where} has {what} ({keys.architecture}.{key} = {keys.get(key)}, head size "
                f"{head_dim}), which is not supported."
            )
    return head_dim


def _vocab_size(keys: GgufKeys, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The embedding's rows: the key may be missing, and tokens may be fewer than rows."""
    shape = shapes.get("token_embd.weight")
    if shape is not None:
        return shape[0]
    return keys.integer("vocab_size", len(keys.metadata.get("tokenizer.ggml.tokens") or ()))
