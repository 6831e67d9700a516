"""A folder saved by transformers becomes one of our models, with transformers' logits."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxllm.converters.architectures import NAME_MAPS, name_map_for
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.loader import load_params
from jaxllm.converters.tied_head import effective_config
from jaxllm.models.batch import AttentionMetadata, ForwardBatch
from jaxllm.models.registry import resolve
from jaxllm.runner.mesh import make_mesh
from jaxllm.runner.weights import build_abstract, unflatten
from tests.converters.tiny_models import ARCHITECTURES, SIZES, save_model

PROMPT = [3, 1, 4, 15, 9, 26, 5, 35]
BLOCK_SIZE = 8


def logits_of(folder: Path, *, tensor_parallel_size: int) -> np.ndarray:
    checkpoint = open_checkpoint(str(folder))
    config_json = effective_config(checkpoint)
    model_class = resolve(config_json["architectures"])
    config = model_class.Config.from_hf(config_json)
    mesh = make_mesh(tensor_parallel_size=tensor_parallel_size)
    model = build_abstract(model_class, config, jnp.float32, mesh)
    name_map = name_map_for(config_json["architectures"])
    params = load_params(model.shapes, checkpoint, name_map, config_json, progress=False)
    assert set(params) == set(model.shapes)
    count = len(PROMPT)
    attention = AttentionMetadata(
        query_start=jnp.array([0, count]),
        seq_lens=jnp.array([count]),
        block_tables=jnp.array([[1]]),
        slot_mapping=BLOCK_SIZE + jnp.arange(count),
        block_size=BLOCK_SIZE,
        decode_only=False,
    )
    batch = ForwardBatch(jnp.array(PROMPT), jnp.arange(count), attention)
    shape = (2 * BLOCK_SIZE, 2, config.num_key_value_heads, config.head_dim)
    cache = [jnp.zeros(shape) for _ in range(config.num_hidden_layers)]

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def forward(params: Any) -> jax.Array:
        module = model.merge(params)
        hidden, _ = module(batch, cache)
        return module.compute_logits(hidden)

    return np.asarray(forward(unflatten(params)))


CASES = [
    *[(architecture, {"tie_word_embeddings": False}, 2) for architecture in ARCHITECTURES],
    *[(architecture, {"tie_word_embeddings": True}, 1) for architecture in ARCHITECTURES],
    ("Llama", {"attention_bias": True, "mlp_bias": True, "max_shard_size": "20KB"}, 2),
]


@pytest.mark.parametrize(("architecture", "options", "tensor_parallel_size"), CASES, ids=str)
def test_logits_equal_transformers(
    tmp_path: Path, architecture: str, options: dict[str, Any], tensor_parallel_size: int
) -> None:
    save_model(tmp_path, architecture, initializer_range=0.2, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    logits = logits_of(tmp_path, tensor_parallel_size=tensor_parallel_size)
    np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max(), rtol=1e-4)


def test_every_architecture_has_a_model_and_a_map() -> None:
    for name in NAME_MAPS:
        assert resolve([name]).__name__ == name
    with pytest.raises(ValueError, match=r"\['FooForCausalLM'\]; there are LlamaForCausalLM"):
        name_map_for(["FooForCausalLM"])


def test_an_unlike_head_gives_an_untied_model(tmp_path: Path) -> None:
    import safetensors.numpy

    save_model(tmp_path, tie_word_embeddings=True)
    before = logits_of(tmp_path, tensor_parallel_size=1)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    safetensors.numpy.save_file(tensors, file)
    after = logits_of(tmp_path, tensor_parallel_size=1)
    assert after.shape == (len(PROMPT), SIZES["vocab_size"])
    np.testing.assert_allclose(after, before * 2, rtol=1e-6)
