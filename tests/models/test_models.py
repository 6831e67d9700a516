"""Logits against transformers: prefill in chunks, then decode, through the paged cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from jaxllm.models.registry import resolve
from tests.models.harness import (
    TINY,
    Tiny,
    abstract_model,
    assert_equal_to_torch,
    make_batch,
    make_mesh,
    make_prompts,
    make_torch_model,
    nested,
    torch_logits,
)

LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
VARIANTS = [
    (LLAMA, {}),
    (LLAMA, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    (LLAMA, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    (LLAMA, {"head_dim": 16, "num_attention_heads": 6, "hidden_size": 36}),
    (LLAMA, {"hidden_act": "gelu", "rope_theta": 500000.0}),
    (QWEN2, {}),
    (QWEN2, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    (QWEN3, {"head_dim": 16}),
    (QWEN3, {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
]


@pytest.mark.parametrize(
    ("architecture", "changes"), VARIANTS, ids=lambda value: str(value).replace(" ", "")
)
def test_logits_equal_transformers(architecture: str, changes: dict[str, Any]) -> None:
    model = make_torch_model(architecture, **changes)
    assert_equal_to_torch(model, make_prompts(45, 3, 38))


WINDOWS = {
    "off_by_flag": {"use_sliding_window": False, "max_window_layers": 0},
    "all_layers": {"use_sliding_window": True, "max_window_layers": 0},
    "upper_layers": {"use_sliding_window": True, "max_window_layers": 2},
    "no_layer": {"use_sliding_window": True, "max_window_layers": 4},
    "by_layer_types": {
        "use_sliding_window": True,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


@pytest.mark.parametrize(
    ("architecture", "name"), [*((QWEN2, name) for name in WINDOWS), (QWEN3, "upper_layers")]
)
def test_sliding_window_schedules_equal_transformers(architecture: str, name: str) -> None:
    model = make_torch_model(
        architecture, num_hidden_layers=4, head_dim=8, sliding_window=8, **WINDOWS[name]
    )
    saved: dict[str, Any] = {"sliding_window": 8}  # transformers drops it when the flag is false
    if name != "by_layer_types":
        saved["layer_types"] = None  # as in checkpoints that predate the key
    assert_equal_to_torch(model, make_prompts(64), chunks=(40, 20, 1), **saved)


def test_a_window_changes_the_logits() -> None:
    changes = {"num_hidden_layers": 4, "sliding_window": 8, "max_window_layers": 2}
    prompt = make_prompts(64)[0]
    on = make_torch_model(QWEN2, use_sliding_window=True, **changes)
    off = make_torch_model(QWEN2, use_sliding_window=False, **changes)
    assert np.abs(torch_logits(on, prompt) - torch_logits(off, prompt)).max() > 0.01


def test_how_a_prompt_is_cut_changes_nothing() -> None:
    tiny = Tiny(make_torch_model(LLAMA))
    prompts = make_prompts(33, 20)
    whole = tiny.logits(prompts, (40,))
    for chunks in ((1,), (7,), (16, 1)):
        for expected, logits in zip(whole, tiny.logits(prompts, chunks), strict=True):
            np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.parametrize("architecture", [LLAMA, QWEN3])
def test_bfloat16_is_near_float32(architecture: str) -> None:
    model = make_torch_model(architecture, head_dim=8, initializer_range=0.1)
    (logits,) = Tiny(model, jnp.bfloat16).logits(make_prompts(40), (20, 10, 1))
    expected = torch_logits(model, make_prompts(40)[0])
    assert logits.dtype == np.float32
    assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()


def test_layers_can_be_walked_one_by_one() -> None:
    """embed, rotary, layers, norm and compute_logits are the whole forward pass."""
    tiny = Tiny(make_torch_model(LLAMA))
    graphdef, _ = abstract_model(resolve([LLAMA]), tiny.config, jnp.float32)
    batch = make_batch(make_prompts(5), [0], [5], np.asarray([[1, 0]], np.int32), 2)
    cache = tiny.new_cache(2)

    @jax.jit
    def walk(params: dict[str, jax.Array]) -> jax.Array:
        model = nnx.merge(graphdef, nested(params))
        x, rope = model.embed(batch), model.rotary(batch)
        for layer, kv in zip(model.layers, cache, strict=True):
            x, _ = layer(x, rope, kv, batch.attention)
        return model.compute_logits(model.norm(x))

    logits = walk(tiny.params)
    expected, _ = tiny.forward(tiny.params, batch, cache)
    np.testing.assert_allclose(logits[:5], expected[:5], atol=1e-5)


def test_tensor_parallel_logits_equal() -> None:
    """The shardings that parameters declare give the same numbers on two devices."""
    model = make_torch_model(QWEN3, head_dim=8, vocab_size=96, attention_bias=True)
    tiny = Tiny(model)
    prompts = [[token % 96 for token in prompt] for prompt in make_prompts(20, 9)]
    alone = tiny.logits(prompts, (12, 1))
    _, abstract = abstract_model(resolve([QWEN3]), tiny.config, jnp.float32, tp=2)
    tiny.params = {
        name: jax.device_put(value, NamedSharding(make_mesh(2), abstract[name].sharding.spec))
        for name, value in tiny.params.items()
    }
    assert not tiny.params["model.layers.0.self_attn.qkv_proj.weight"].is_fully_replicated
    for expected, logits in zip(alone, tiny.logits(prompts, (12, 1)), strict=True):
        np.testing.assert_allclose(logits, expected, atol=2e-5)


def test_parameters_declare_dtype_and_names() -> None:
    model_class = resolve([QWEN3])
    config = model_class.Config.from_hf(TINY | {"head_dim": 8, "tie_word_embeddings": True})
    _, abstract = abstract_model(model_class, config, jnp.bfloat16)
    assert {leaf.dtype for leaf in abstract.values()} == {jnp.dtype(jnp.bfloat16)}
    assert "lm_head.weight" not in abstract
    assert abstract["model.layers.1.mlp.gate_up_proj.weight"].shape == (32, 2, 48)
    assert abstract["model.layers.1.self_attn.q_norm.weight"].shape == (8,)
