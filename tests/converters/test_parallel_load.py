"""Parameters of a model whose kv heads are repeated and whose vocabulary is padded."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.llama import NAME_MAP
from jaxllm.converters.loader import load_params
from jaxllm.models.llama import LlamaConfig, LlamaForCausalLM
from jaxllm.runner.mesh import make_mesh
from jaxllm.runner.weights import build_abstract
from tests.converters.tiny_models import load, save_model

KV_HEADS, GROUP, VOCAB = 2, 4, 97
ATTENTION = "model.layers.1.self_attn."


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("tp", [4, 8])
def test_each_copy_of_a_kv_head_has_its_share_of_the_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, on_host: bool
) -> None:
    monkeypatch.setattr("jaxllm.converters.loader._is_on_host", lambda fill: on_host)
    heads = {"num_attention_heads": KV_HEADS * GROUP, "num_key_value_heads": KV_HEADS}
    save_model(tmp_path, "Llama", vocab_size=VOCAB, attention_bias=True, **heads)
    one = {name: np.asarray(param) for name, param in load(tmp_path).items()}

    checkpoint = open_checkpoint(str(tmp_path))
    config = LlamaConfig.from_hf(checkpoint.config).with_tensor_parallel(tp)
    mesh = make_mesh(tensor_parallel_size=tp)
    shapes = build_abstract(LlamaForCausalLM, config, jnp.float32, mesh).shapes
    padding = config.padded_vocab_size - VOCAB
    name_map = NAME_MAP.on_mesh(config.kv_replicas, padding)
    params = load_params(shapes, checkpoint, name_map, checkpoint.config, progress=False)

    for device in range(tp):
        kv_head, part = divmod(device, tp // KV_HEADS)
        count = KV_HEADS * GROUP // tp
        rows = [*range(part * count, (part + 1) * count), GROUP, GROUP + 1]
        for name, axis in ((ATTENTION + "qkv_proj.weight", 1), (ATTENTION + "qkv_proj.bias", 0)):
            local = np.asarray(params[name].addressable_shards[device].data)
            wanted = np.take(one[name], kv_head, axis=axis).take(rows, axis=axis)
            np.testing.assert_array_equal(local.squeeze(axis), wanted)
        name = ATTENTION + "o_proj.weight"
        local = np.asarray(params[name].addressable_shards[device].data)
        np.testing.assert_array_equal(local[0], one[name][kv_head, rows[:-2]])
    assert padding
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        np.testing.assert_array_equal(np.asarray(params[name])[:VOCAB], one[name])
        assert not np.asarray(params[name])[VOCAB:].any()
