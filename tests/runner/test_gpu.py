"""The same code on the GPU: a tiny model's logits against the CPU's. Run with `pytest -m gpu`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.converters.dummy import dummy_params
from jaxllm.models.batch import AttentionMetadata, ForwardBatch
from jaxllm.models.registry import resolve
from jaxllm.runner.mesh import make_mesh
from jaxllm.runner.weights import build_abstract, unflatten

pytestmark = pytest.mark.gpu

BLOCK, BLOCKS = 16, 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def logits_on(device: Any, dtype: str, backend: str) -> tuple[np.ndarray, np.ndarray]:
    """Logits of two ragged prompts, then of one more token each, through the paged cache."""
    mesh = make_mesh([device])
    model_class = resolve(CONFIG["architectures"])
    config = model_class.Config.from_hf(CONFIG)
    model = build_abstract(model_class, config, dtype, mesh)
    # Larger weights than usual, so that logits differ and rounding shows.
    params = unflatten({k: v * 5 for k, v in dummy_params(model.shapes).items()})
    shape = (BLOCK * BLOCKS, 2, config.num_key_value_heads, config.head_dim)
    caches = [jnp.zeros(shape, dtype, device=device) for _ in range(config.num_hidden_layers)]
    tables = np.random.default_rng(0).permutation(BLOCKS).reshape(2, -1).astype(np.int32)
    lengths = [70, 33]
    rng = np.random.default_rng(1)
    step = jax.jit(lambda p, b, c: _forward(model, p, b, c))

    def run(starts, counts, caches, decode_only):
        positions = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        )
        owner = np.repeat([0, 1], counts)
        slots = tables[owner, positions // BLOCK] * BLOCK + positions % BLOCK
        fields: Any = AttentionMetadata, ForwardBatch
        metadata_class, batch_class = fields
        batch = batch_class(
            token_ids=rng.integers(0, 1024, len(positions)).astype(np.int32),
            positions=positions.astype(np.int32),
            attention=metadata_class(
                query_start=np.cumsum([0, *counts]).astype(np.int32),
                seq_lens=np.add(starts, counts).astype(np.int32),
                block_tables=tables,
                slot_mapping=slots.astype(np.int32),
                block_size=BLOCK,
                decode_only=decode_only,
                backend=backend,
            ),
        )
        return step(params, jax.device_put(batch, device), caches)

    with jax.default_device(device):
        prefill, caches = run([0, 0], lengths, caches, False)
        decode, _ = run(lengths, [1, 1], caches, True)
    return np.asarray(prefill), np.asarray(decode)


def _forward(model, params, batch, caches):
    module = model.merge(params)
    hidden, caches = module(batch, caches)
    return module.compute_logits(hidden), caches


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 2e-2)])
def test_logits_equal_the_cpus(dtype, tolerance):
    # bfloat16 is compared with the CPU's float32: what it may lose is the tolerance.
    expected = logits_on(
        jax.devices("cpu")[0], "float32" if dtype == "float32" else dtype, "reference"
    )
    for found, wanted in zip(
        logits_on(jax.devices("gpu")[0], dtype, "auto"), expected, strict=True
    ):
        scale = np.abs(wanted).max()
        assert np.abs(found - wanted).max() <= tolerance * scale
