"""Converted folders on meshes that repeat kv heads and pad the vocabulary."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.convert import convert
from jaxllm.converters.architectures import name_map_for
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.errors import CheckpointError, LoadError
from jaxllm.converters.loader import load_params
from jaxllm.converters.name_map import NameMap
from jaxllm.converters.orbax_shards import Spread, spread_of
from jaxllm.converters.tied_head import effective_config
from jaxllm.models.registry import resolve
from jaxllm.runner.mesh import make_mesh
from jaxllm.runner.programs import StepPrograms
from jaxllm.runner.weights import build_abstract
from tests.converters.tiny_models import save_model

QKV = "model.layers.1.self_attn.qkv_proj.weight"
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}


def declare(
    folder: Path, tp: int, dtype: str = "float32"
) -> tuple[dict[str, Any], NameMap, dict[str, Any]]:
    """What the engine asks of `load_params` over `tp` devices: shapes, name map, config."""
    config = effective_config(open_checkpoint(str(folder)))
    model_class = resolve(config["architectures"])
    model = model_class.Config.from_hf(config).with_tensor_parallel(tp)
    shapes = build_abstract(model_class, model, dtype, make_mesh(tensor_parallel_size=tp)).shapes
    name_map = name_map_for(config["architectures"]).on_mesh(
        model.kv_replicas, model.padded_vocab_size - model.vocab_size
    )
    return shapes, name_map, config


def load(folder: Path, tp: int, dtype: str = "float32") -> dict[str, jax.Array]:
    shapes, name_map, config = declare(folder, tp, dtype)
    return load_params(shapes, open_checkpoint(str(folder)), name_map, config, progress=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Of each architecture a source and what was converted of it."""
    root = tmp_path_factory.mktemp("converted")
    models: dict[str, dict[str, Any]] = {
        "Llama": {"attention_bias": True, "vocab_size": 9},  # 8 devices: some with padding only
        "Qwen2": {"vocab_size": 97, "tie_word_embeddings": True, "num_hidden_layers": 1},
        "Qwen3": {"vocab_size": 96},
    }
    found: dict[str, tuple[Path, Path]] = {}
    for name, changes in models.items():
        source = save_model(root / name, name, **HEADS, **changes)
        found[name] = source, convert(str(source), root / f"{name}-o", to="orbax", progress=False)
    return found


@pytest.mark.parametrize(
    ("name", "tp", "dtype"),
    [
        ("Llama", 8, "float32"),
        ("Llama", 2, "float32"),
        ("Qwen2", 4, "bfloat16"),
        ("Qwen3", 8, "float32"),
    ],
)
def test_parameters_are_those_that_the_source_gives(
    folders: dict[str, tuple[Path, Path]], name: str, tp: int, dtype: str
) -> None:
    source, converted = folders[name]
    expected = load(source, tp, dtype)
    found = load(converted, tp, dtype)
    assert list(found) == list(expected)
    for param, value in expected.items():
        np.testing.assert_array_equal(np.asarray(found[param]), np.asarray(value), err_msg=param)
        assert found[param].dtype == value.dtype
        assert found[param].sharding.is_equivalent_to(value.sharding, value.ndim)


def test_a_device_reads_its_own_part_only(folders: dict[str, tuple[Path, Path]]) -> None:
    shapes, name_map, _ = declare(folders["Llama"][1], 8)
    changed = 0
    for name, leaf in shapes.items():
        spread = spread_of(name, leaf.shape, name_map)
        changed += spread.stored_shape != leaf.shape
        stored = np.zeros(spread.stored_shape, np.int8)
        for index in leaf.sharding.devices_indices_map(leaf.shape).values():
            sizes: list[int] = []

            def read(part: tuple[slice, ...], stored=stored, sizes=sizes) -> np.ndarray:
                sizes.append(stored[part].size)
                return stored[part]

            shard = spread.read(read, index)
            assert shard.shape == leaf.sharding.shard_shape(leaf.shape)
            rows = index[0].indices(leaf.shape[0])[1] - leaf.shape[0] + spread.padding
            padding = max(0, min(rows, shard.shape[0])) if spread.padding else 0
            assert sum(sizes) == shard.size - padding * math.prod(shard.shape[1:])
    assert changed == 2 + 2 * 3  # embedding and head; a layer's qkv, its bias and output


def test_several_heads_of_a_device_are_put_together() -> None:
    """Two replicas a device: the query heads keep their order, key and value are repeated."""
    stored = np.arange(2 * 6).reshape(1, 2, 6, 1)  # two kv heads of four query heads
    spread = Spread((1, 4, 4, 1), replicas=2, heads=1, group=2, shared=2)
    assert spread.stored_shape == stored.shape
    found = spread.read(stored.__getitem__, (slice(None), slice(1, 3), slice(None), slice(None)))
    assert found[0, :, :, 0].tolist() == [[2, 3, 4, 5], [6, 7, 10, 11]]
    with pytest.raises(ValueError, match="not all of it"):
        spread.read(stored.__getitem__, (slice(None), slice(0, 1), slice(0, 2), slice(None)))


def test_misfits_name_the_stored_shape(folders: dict[str, tuple[Path, Path]]) -> None:
    _, converted = folders["Qwen3"]
    shapes, name_map, config = declare(converted, 8)
    leaf = shapes[QKV]
    shapes[QKV] = jax.ShapeDtypeStruct((64, *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding)
    with pytest.raises(LoadError) as caught:
        load_params(shapes, open_checkpoint(str(converted)), name_map, config, progress=False)
    assert f"{QKV}  is [32, 2, 6, 4], the model needs [64, 2, 6, 4]" in str(caught.value)


def test_damaged_arrays_are_named(
    folders: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, converted = folders["Qwen3"]

    def fail(*_: Any) -> np.ndarray:
        raise ValueError("checksum differs")

    monkeypatch.setattr(Spread, "read", fail)
    with pytest.raises(CheckpointError, match=f"{converted}/params cannot be read: checksum diff"):
        load(converted, 8)


def test_an_engine_gives_the_tokens_of_the_source(
    folders: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = {"xla_backend_optimization_level": 0}
    monkeypatch.setattr(StepPrograms, "_compiler_options", lambda *_: fast)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    texts = []
    for folder, tp in zip(folders["Qwen2"], (1, 4), strict=True):
        llm = LLM(
            str(folder),
            tensor_parallel_size=tp,
            skip_tokenizer_init=True,
            max_num_seqs=1,
            max_num_batched_tokens=16,
            max_model_len=32,
            num_gpu_blocks_override=8,
            enforce_eager=True,
            compilation_cache_dir="",
        )
        output = llm.generate([[5, 9, 2, 80]], params, use_tqdm=False)[0]
        texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]
