"""What the compiled steps must not do: copy the cache, carry needless leaves, grow with it."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxllm.config import EngineConfig
from jaxllm.models.registry import resolve
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.build import make_programs, make_state_shapes
from jaxllm.runner.kv_cache import CacheShape
from jaxllm.runner.mesh import make_mesh
from jaxllm.runner.weights import build_abstract, model_stages, unflatten

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LAYERS, BLOCKS, BLOCK = 3, 4096, 16


@pytest.fixture(scope="module")
def programs() -> Any:
    mesh = make_mesh(jax.devices("cpu")[:1])
    model_class = resolve(CONFIG["architectures"])
    model_config = model_class.Config.from_hf(CONFIG)
    model = build_abstract(model_class, model_config, "float32", mesh)
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, num_scheduler_steps=3)
    config = config.resolve(platform="cpu", context_length=256, offline=True)
    shape = CacheShape(LAYERS, 2, 16, BLOCK, jnp.dtype("float32"))
    stages = model_stages(model, mesh)
    state = make_state_shapes(config, shape, BLOCKS, 96, stages)
    return make_programs(config, stages, unflatten(model.shapes), state)


def lower(programs: Any, bucket: Bucket, several: bool) -> Any:
    return programs._lower_steps(bucket, None) if several else programs._lower(bucket)


@pytest.mark.parametrize(
    ("bucket", "several"),
    [
        (Bucket(1, 1, True), False),
        (Bucket(4, 4, True), False),
        (Bucket(32, 4, False), False),
        (Bucket(1, 1, True), True),
        (Bucket(4, 4, True), True),
    ],
    ids=str,
)
def test_the_state_is_updated_in_place(programs: Any, bucket: Bucket, several: bool) -> None:
    compiled = lower(programs, bucket, several).compile()
    memory = compiled.memory_analysis()
    layer = BLOCKS * BLOCK * 2 * 2 * 16 * 4
    # Sampler rows may be rewritten; the cache must be the very buffers that came in.
    assert memory.alias_size_in_bytes >= LAYERS * layer
    assert memory.temp_size_in_bytes < layer // 4
    cache = rf"f32\[{BLOCKS * BLOCK},2,2,16\]"
    assert not re.findall(rf"= {cache}\S* (?:copy|transpose)\(", compiled.as_text())


def test_a_layer_costs_seven_leaves(programs: Any) -> None:
    """Each leaf is a microsecond of every dispatch: two norms, four matrices, one cache array."""
    leaves = len(jax.tree.leaves((programs._params, programs._state)))
    # Embedding, final norm and head; last tokens and four arrays of sampler rows.
    assert leaves == LAYERS * 7 + 3 + 5


def test_a_layer_is_lowered_once(programs: Any) -> None:
    text = programs._lower(Bucket(4, 4, True)).as_text()
    assert len(re.findall(r"func\.func private @run_layer", text)) == 1
    assert len(re.findall(r"call @run_layer", text)) == LAYERS
