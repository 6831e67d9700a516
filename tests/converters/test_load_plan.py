"""Every misfit of a checkpoint and a model is found before anything is read."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.converters.architectures import name_map_for
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.errors import LoadError
from jaxllm.converters.loader import load_params
from jaxllm.converters.name_map import KEEP, NameMap, Rule
from tests.converters.tiny_models import (
    abstract_of,
    change_tensors,
    check,
    load,
)


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


@pytest.mark.parametrize("buffer", ["inv_freq", "cos_cached", "sin_cached"])
@pytest.mark.parametrize("place", ["model.layers.{i}.self_attn", "model"])
def test_recomputable_buffers_of_old_checkpoints_are_ignored(
    folder: Path, place: str, buffer: str
) -> None:
    expected = load(folder)
    names = {f"{place.format(i=i)}.rotary_emb.{buffer}" for i in range(2)}
    change_tensors(folder, lambda tensors: tensors.update(dict.fromkeys(names, np.ones(4))))
    check(load(folder), {name: np.asarray(value) for name, value in expected.items()})


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.{i}.self_attn.rotary_emb.weight",
        "model.layers.{i}.mlp.rotary_emb.inv_freq",
        "layers.{i}.self_attn.rotary_emb.inv_freq",
        "model.layers.{i}.self_attn.rotary_emb.inv_freq.extra",
    ],
)
def test_what_only_looks_like_a_buffer_is_left_over(folder: Path, name: str) -> None:
    names = {name.format(i=i) for i in range(2)}
    change_tensors(folder, lambda tensors: tensors.update(dict.fromkeys(names, np.ones(4))))
    with pytest.raises(LoadError, match=r"unexpected in the checkpoint \(2\)") as caught:
        load(folder)
    assert name.format(i="{0..1}") in str(caught.value)


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


def test_changes_of_dtype_are_logged_merged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = open_checkpoint(str(folder))
    name_map = name_map_for(["LlamaForCausalLM"])
    abstract = abstract_of(checkpoint.config)
    with caplog.at_level("INFO"):
        load_params(abstract, checkpoint, name_map, checkpoint.config, progress=False)
        assert "change dtype" not in caplog.text
        for name, target in abstract.items():
            if name.endswith("layernorm.weight"):
                abstract[name] = jax.ShapeDtypeStruct(target.shape, jax.numpy.bfloat16)
        load_params(abstract, checkpoint, name_map, checkpoint.config, progress=False)
    assert "4 of 21 tensors change dtype, float32 -> bfloat16: model.layers.{0..1}." in caplog.text
    caplog.clear()
    bfloat16 = {n: jax.ShapeDtypeStruct(t.shape, jax.numpy.bfloat16) for n, t in abstract.items()}
    with caplog.at_level("INFO"):
        load_params(bfloat16, checkpoint, name_map, checkpoint.config, progress=False)
    assert "21 of 21 tensors change dtype, float32 -> bfloat16: all" in caplog.text
