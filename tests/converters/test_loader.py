"""Parameters come out of a checkpoint whole, in the right layout and on the right devices."""

import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
from jax.sharding import AxisType

from jaxllm.converters.architectures import name_map_for
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.errors import LoadError
from jaxllm.converters.loader import load_params
from jaxllm.converters.name_map import KEEP, NameMap, Rule
from jaxllm.converters.tied_head import effective_config
from tests.converters.tiny_models import ARCHITECTURES, abstract_of, build_model, save_model


def load(folder: Path, **abstract_args: Any) -> dict[str, jax.Array]:
    checkpoint = open_checkpoint(str(folder))
    config = effective_config(checkpoint)
    abstract = abstract_of(config, **abstract_args)
    name_map = name_map_for(config["architectures"])
    params = load_params(abstract, checkpoint, name_map, config, progress=False)
    assert list(params) == list(abstract)
    for name, target in abstract.items():
        assert (params[name].shape, params[name].dtype) == (target.shape, target.dtype)
        assert params[name].sharding.is_equivalent_to(target.sharding, len(target.shape))
    return params


def expected_params(state: dict[str, Any], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The layout spelled out head by head, from a torch state dict."""
    tensors = {name: tensor.float().numpy() for name, tensor in state.items()}
    kv, dim = config["num_key_value_heads"], config["head_dim"]
    group = config["num_attention_heads"] // kv

    def heads(layer: str, kind: str) -> np.ndarray:
        q, k, v = (tensors[f"{layer}.{part}_proj.{kind}"] for part in "qkv")
        rows = []
        for head in range(kv):
            mine = [q[(head * group + i) * dim :][:dim] for i in range(group)]
            rows.append(np.stack([*mine, k[head * dim :][:dim], v[head * dim :][:dim]]))
        return np.stack(rows)  # [K, G+2, H(, D)]

    params = {
        name: tensor
        for name, tensor in tensors.items()
        if not any(f"{part}_proj" in name for part in ("q", "k", "v", "gate", "up"))
    }
    for i in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        params[f"{attention}.qkv_proj.weight"] = np.moveaxis(heads(attention, "weight"), 3, 0)
        if f"{attention}.q_proj.bias" in tensors:
            params[f"{attention}.qkv_proj.bias"] = heads(attention, "bias")
        o_proj = tensors[f"{attention}.o_proj.weight"]
        params[f"{attention}.o_proj.weight"] = o_proj.T.reshape(kv, group, dim, -1)
        gate, up = (tensors[f"{mlp}.{part}_proj.weight"].T for part in ("gate", "up"))
        params[f"{mlp}.gate_up_proj.weight"] = np.stack([gate, up], axis=1)
        if f"{mlp}.gate_proj.bias" in tensors:
            params[f"{mlp}.gate_up_proj.bias"] = np.stack(
                [tensors[f"{mlp}.{part}_proj.bias"] for part in ("gate", "up")]
            )
        params[f"{mlp}.down_proj.weight"] = tensors[f"{mlp}.down_proj.weight"].T
    if config.get("tie_word_embeddings"):
        params.pop("lm_head.weight", None)
    return params


def check(params: dict[str, jax.Array], expected: dict[str, np.ndarray]) -> None:
    assert set(params) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(params[name]), value, err_msg=name)


CASES = [
    *[(architecture, {"tie_word_embeddings": tied}) for architecture in ARCHITECTURES
      for tied in (False, True)],
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
    ("Llama", {"head_dim": 16, "num_key_value_heads": 1}),
    ("Llama", {"max_shard_size": "20KB"}),
    ("Qwen2", {"max_shard_size": "20KB", "tie_word_embeddings": True}),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "options"), CASES, ids=str)
def test_parameters_equal_what_transformers_saved(
    tmp_path: Path, architecture: str, options: dict[str, Any]
) -> None:
    save_model(tmp_path, architecture, **options)
    sharded = (tmp_path / "model.safetensors.index.json").exists()
    assert sharded == ("max_shard_size" in options)
    options = {key: value for key, value in options.items() if key != "max_shard_size"}
    model = build_model(architecture, **options)
    check(load(tmp_path), expected_params(model.state_dict(), model.config.to_dict()))


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_each_device_gets_its_slice(tmp_path: Path, axis_type: AxisType) -> None:
    options = {"num_attention_heads": 16, "num_key_value_heads": 8, "attention_bias": True,
               "mlp_bias": True}  # fmt: skip
    save_model(tmp_path, **options)
    model = build_model("Llama", **options)
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(axis_type,))
    params = load(tmp_path, mesh=mesh)
    expected = expected_params(model.state_dict(), model.config.to_dict())
    check(params, expected)
    split = 0
    for name, param in params.items():
        for shard in param.addressable_shards:
            np.testing.assert_array_equal(
                np.asarray(shard.data), expected[name][shard.index], err_msg=name
            )
        split += param.addressable_shards[0].data.size * 8 == param.size
    assert split == 14  # embedding, head, and six matrices or biases a layer


def test_a_device_reads_its_slice_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, num_attention_heads=16, num_key_value_heads=8)
    largest = 0
    put = jax.make_array_from_callback

    def watched(shape: Any, sharding: Any, callback: Any) -> jax.Array:
        def measured(index: Any) -> np.ndarray:
            nonlocal largest
            part = callback(index)
            if len(shape) > 1:
                largest = max(largest, part.nbytes)
            return part

        return put(shape, sharding, measured)

    monkeypatch.setattr(jax, "make_array_from_callback", watched)
    load(tmp_path, mesh=jax.make_mesh((8,), ("tp",)))
    assert largest == 16 * 8 * 32 * 4 // 8  # an eighth of q_proj


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("stored", ["float64", "float32", "bfloat16", "float16"])
def test_dtypes_are_cast(tmp_path: Path, llama_folder: Path, stored: str, dtype: Any) -> None:
    shutil.copytree(llama_folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = {
        name: tensor.astype(np.dtype(stored))
        for name, tensor in safetensors.numpy.load_file(file).items()
    }
    safetensors.numpy.save_file(tensors, file)
    params = load(tmp_path, dtype=dtype)
    expected = tensors["model.layers.1.mlp.down_proj.weight"].astype(dtype).T
    np.testing.assert_array_equal(params["model.layers.1.mlp.down_proj.weight"], expected)
    expected = tensors["model.embed_tokens.weight"].astype(dtype)
    np.testing.assert_array_equal(params["model.embed_tokens.weight"], expected)


def test_narrowing_bfloat16_to_float16_is_warned_about(
    tmp_path: Path, llama_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(llama_folder, tmp_path, dirs_exist_ok=True)
    change_tensors(tmp_path, lambda tensors: tensors.update(
        {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    ))  # fmt: skip
    load(tmp_path, dtype=jnp.float16)
    assert "21 bfloat16 tensors are cast to float16" in caplog.text
    assert "--dtype bfloat16" in caplog.text


def test_parameters_outlive_the_file(tmp_path: Path, llama_folder: Path) -> None:
    """On the CPU JAX would share mapped memory: cutting the file would kill the process."""
    shutil.copytree(llama_folder, tmp_path, dirs_exist_ok=True)
    params = load(tmp_path)
    expected = {name: np.array(param) for name, param in params.items()}
    with (tmp_path / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(b"\xff" * size)
    for name, param in params.items():
        np.testing.assert_array_equal(np.asarray(param), expected[name])


# Misfits


def change_tensors(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)


@pytest.fixture
def folder(tmp_path: Path, llama_folder: Path) -> Path:
    shutil.copytree(llama_folder, tmp_path / "model")
    return tmp_path / "model"


def test_everything_that_does_not_fit_is_listed_at_once(folder: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for i in range(2):
            del tensors[f"model.layers.{i}.input_layernorm.weight"]
            tensors[f"model.layers.{i}.mlp.extra.weight"] = np.zeros((3, 4), np.float32)
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((32, 47), np.float32)
        tensors["model.norm.weight"] = np.zeros(32, np.int32)

    change_tensors(folder, change)
    with pytest.raises(LoadError) as caught:
        load(folder)
    assert str(caught.value).splitlines() == [
        f"the weights in {folder} do not fit the model:",
        "  missing in the checkpoint (3):",
        "    model.layers.{0..1}.input_layernorm.weight  [32]",
        "    model.layers.1.self_attn.k_proj.weight  [16, 32]",
        "  unexpected in the checkpoint (2):",
        "    model.layers.{0..1}.mlp.extra.weight  [3, 4] float32",
        "  mismatched (2):",
        "    model.layers.0.mlp.down_proj.weight  is [32, 47], the model needs [32, 48]",
        "    model.norm.weight  is int32, the model needs float32",
        "The needed shapes follow from config.json: check that it belongs to these weights.",
    ]


def test_nothing_is_read_before_all_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_tensors(folder, lambda tensors: tensors.pop("model.norm.weight"))
    checkpoint = open_checkpoint(str(folder))
    reads = []
    monkeypatch.setattr(checkpoint, "read", lambda *args: reads.append(args))
    config = checkpoint.config
    with pytest.raises(LoadError, match=r"missing.*\n +model.norm.weight"):
        load_params(abstract_of(config), checkpoint, name_map_for(["LlamaForCausalLM"]), config)
    assert not reads


def test_recomputable_buffers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    expected = load(folder)
    change_tensors(folder, lambda tensors: tensors.update(
        {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)
         for i in range(2)}
    ))  # fmt: skip
    check(load(folder), {name: np.asarray(value) for name, value in expected.items()})


def test_overlapping_rules_are_refused(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    abstract = abstract_of(checkpoint.config)
    abstract["model.extra.weight"] = abstract["model.norm.weight"]
    abstract["model.unknown.weight"] = abstract["model.norm.weight"]
    good = name_map_for(["LlamaForCausalLM"])
    name_map = NameMap(
        (
            *good.rules,
            Rule(("model.norm.weight",), "model.norm.weight", KEEP),
            Rule(("model.norm.weight",), "model.extra.weight", KEEP),
        )
    )
    with pytest.raises(LoadError) as caught:
        load_params(abstract, checkpoint, name_map, checkpoint.config)
    message = str(caught.value)
    assert "model.norm.weight  filled by several rules" in message
    assert "model.norm.weight  taken by model.norm.weight and model.extra.weight" in message
    assert "name map does not know (1):\n    model.unknown.weight  [32]" in message


def test_an_uneven_mesh_is_named(folder: Path) -> None:
    with pytest.raises(LoadError) as caught:
        load(folder, mesh=jax.make_mesh((8,), ("tp",)))
    assert (
        "    model.layers.{0..1}.self_attn.qkv_proj.weight  [32, 2, 4, 8]: 2 over 8 devices (tp)"
        in str(caught.value).splitlines()
    )


def test_a_quantized_checkpoint_is_named(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update(
        {"model.layers.0.mlp.up_proj.weight_scale": np.ones(1, np.float32)}
    ))  # fmt: skip
    checkpoint = open_checkpoint(str(folder))
    config = checkpoint.config | {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(LoadError, match=r"The checkpoint is quantized \(fp8\)"):
        load_params(abstract_of(config), checkpoint, name_map_for(["LlamaForCausalLM"]), config)


# Tied heads


@pytest.fixture
def tied_folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "tied", tie_word_embeddings=True)


def test_an_equal_head_of_a_tied_model_is_ignored(tied_folder: Path) -> None:
    def add_head(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    change_tensors(tied_folder, add_head)
    params = load(tied_folder)
    assert "lm_head.weight" not in params


def test_an_unlike_head_of_a_tied_model_is_followed(
    tied_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def add_head(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["lm_head.weight"][-1, -1] += 1

    change_tensors(tied_folder, add_head)
    with caplog.at_level(logging.WARNING):
        params = load(tied_folder)
    assert "following the checkpoint, untied" in caplog.text
    difference = np.asarray(params["lm_head.weight"] - params["model.embed_tokens.weight"])
    assert np.argwhere(difference).tolist() == [[95, 31]]


def test_an_unlike_head_is_never_dropped(tied_folder: Path) -> None:
    """Also when the caller builds the model by the config as it stands."""
    change_tensors(tied_folder, lambda tensors: tensors.update(
        {"lm_head.weight": np.zeros((96, 32), np.float32)}
    ))  # fmt: skip
    checkpoint = open_checkpoint(str(tied_folder))
    abstract = abstract_of(checkpoint.config)
    with pytest.raises(LoadError, match=r"lm_head.weight .* differs from the embedding"):
        load_params(abstract, checkpoint, name_map_for(["LlamaForCausalLM"]), checkpoint.config)


def test_a_tied_head_of_another_size_gives_both_shapes(tied_folder: Path) -> None:
    change_tensors(tied_folder, lambda tensors: tensors.update(
        {"lm_head.weight": np.zeros((90, 32), np.float32)}
    ))  # fmt: skip
    with pytest.raises(LoadError, match=r"\[90, 32\] and model.embed_tokens.weight \[96, 32\]"):
        load(tied_folder)


def test_the_tied_matrix_may_be_kept_as_the_head(tied_folder: Path) -> None:
    expected = load(tied_folder)

    def rename(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    change_tensors(tied_folder, rename)
    check(load(tied_folder), {name: np.asarray(value) for name, value in expected.items()})


def test_an_untied_model_without_a_head_is_refused(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(LoadError, match=r'lm_head.weight(.|\n)*"tie_word_embeddings": true'):
        load(folder)


# Dummy weights


def test_dummy_weights_depend_on_the_name_alone(llama_folder: Path) -> None:
    checkpoint = open_checkpoint(str(llama_folder), load_format="dummy")
    assert (checkpoint.source, dict(checkpoint.tensors)) == ("dummy", {})
    config: dict[str, Any] = checkpoint.config | {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    one = jax.make_mesh((1,), ("tp",), devices=jax.devices()[:1])
    name_map = name_map_for(config["architectures"])
    loaded = [
        load_params(abstract_of(config, mesh=mesh), checkpoint, name_map, config)
        for mesh in (one, one, jax.make_mesh((8,), ("tp",)))
    ]
    for name, param in loaded[0].items():
        for other in loaded[1:]:
            np.testing.assert_array_equal(np.asarray(param), np.asarray(other[name]))
    first, second = (
        np.asarray(loaded[0][f"model.layers.{i}.mlp.down_proj.weight"]) for i in range(2)
    )
    assert np.abs(first - second).max() > 0.01
    assert np.abs(first).max() < 0.035
    assert np.std(first) == pytest.approx(0.02, rel=0.05)
    assert abs(np.corrcoef(first[:-1].ravel(), first[1:].ravel())[0, 1]) < 0.1
