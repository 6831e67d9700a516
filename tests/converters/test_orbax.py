"""Converted folders: restored on any mesh, with the same weights and tokens."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh

from jaxllm import LLM, SamplingParams
from jaxllm.convert import convert
from jaxllm.converters import architectures
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.errors import CheckpointError, LoadError
from jaxllm.converters.loader import load_params
from jaxllm.converters.orbax_checkpoint import OrbaxCheckpoint, write_orbax
from jaxllm.converters.orbax_manifest import MANIFEST_FILE
from jaxllm.converters.renamed import with_registered_names
from jaxllm.models import registry
from jaxllm.registration import register_model
from tests.converters.tiny_models import (
    ARCHITECTURES,
    abstract_of,
    change_tensors,
    error_of,
    load,
    save_model,
)
from tests.engine.tiny_engine import save_tiny_llama


def tp_mesh(count: int) -> Mesh:
    return jax.make_mesh((count,), ("tp",), devices=jax.devices()[:count])


def assert_same(params: dict[str, jax.Array], expected: dict[str, jax.Array]) -> None:
    assert list(params) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(params[name]), np.asarray(value), err_msg=name)


# Round trips


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_round_trip_keeps_every_parameter(tmp_path: Path, architecture: str, tied: bool) -> None:
    options = {"attention_bias": True, "mlp_bias": True} if architecture == "Llama" else {}
    source = save_model(tmp_path / "source", architecture, tie_word_embeddings=tied, **options)
    target = convert(str(source), tmp_path / "target", to="orbax", progress=False)
    assert ("lm_head.weight" in open_checkpoint(str(target)).tensors) is not tied
    assert_same(load(target), load(source))


@pytest.mark.parametrize("before", [1, 8])
@pytest.mark.parametrize("after", [1, 2, 8])
def test_any_mesh_restores_what_any_mesh_wrote(
    tmp_path: Path, eight_heads: Path, saved_orbax: Path, before: int, after: int
) -> None:
    for name in ("config.json", "generation_config.json"):
        shutil.copy(saved_orbax / name, tmp_path)
    params = load(eight_heads, mesh=tp_mesh(before))
    write_orbax(params, tmp_path, architecture="LlamaForCausalLM", dtype="float32")
    assert_same(load(tmp_path, mesh=tp_mesh(after)), params)


def test_no_device_gets_more_than_its_shards(saved_orbax: Path, monkeypatch: Any) -> None:
    sent: list[int] = []
    put = jax.device_put

    def device_put(value: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(getattr(value, "nbytes", 0))
        return put(value, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", device_put)
    params = load(saved_orbax, mesh=tp_mesh(8))
    largest = max(shard.data.nbytes for x in params.values() for shard in x.addressable_shards)
    assert max(sent) == largest == params["lm_head.weight"].nbytes // 8
    for array in params.values():
        parts = {shard.data.shape for shard in array.addressable_shards}
        assert parts == {array.sharding.shard_shape(array.shape)}


def test_the_files_follow_the_sharding(saved_orbax: Path) -> None:
    """As many chunks as devices: none is read by a device that needs another part of it."""
    manifest = json.loads((saved_orbax / MANIFEST_FILE).read_text())
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert manifest["parameters"][name]["partition"] == [None, "tp", None, None]
    metadata = json.loads((saved_orbax / "params" / "_METADATA").read_text())["tree_metadata"]
    entry = next(value for key, value in metadata.items() if name in key)
    assert entry["value_metadata"]["write_shape"] == [32, 1, 3, 4]
    assert "partition_spec" in (saved_orbax / "params" / "_sharding").read_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_are_cast_when_written_and_when_read(
    tmp_path: Path, eight_heads: Path, saved_orbax: Path, dtype: str
) -> None:
    expected = load(eight_heads, dtype=jnp.dtype(dtype))
    assert_same(load(saved_orbax, dtype=jnp.dtype(dtype)), expected)
    target = convert(str(eight_heads), tmp_path / "t", to="orbax", dtype=dtype, progress=False)
    checkpoint = open_checkpoint(str(target))
    assert checkpoint.config["dtype"] == dtype
    assert {info.dtype.name for info in checkpoint.tensors.values()} == {dtype}
    assert_same(load(target, dtype=jnp.dtype(dtype)), expected)


def test_single_parameters_are_read_as_arrays(saved_orbax: Path, eight_heads: Path) -> None:
    checkpoint = open_checkpoint(str(saved_orbax))
    expected = np.asarray(load(eight_heads)["lm_head.weight"])
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight"), expected)
    part = (slice(3, 9), slice(0, 5))
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight", part), expected[part])
    with pytest.raises(KeyError, match="no parameter 'other'"):
        checkpoint.read("other")


def test_registered_names_are_resolved_when_converting(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architectures, "_REGISTERED", {})
    monkeypatch.setattr(registry, "_TARGETS", dict(registry._TARGETS))
    expected = load(folder)
    change_tensors(folder, lambda tensors: tensors.update(head=tensors.pop("lm_head.weight")))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["FinForCausalLM"]}))
    register_model("FinForCausalLM", model="LlamaForCausalLM", rename={"head": "lm_head.weight"})
    target = convert(str(folder), tmp_path / "target", to="orbax", progress=False)
    checkpoint = open_checkpoint(str(target))
    assert with_registered_names(checkpoint) is checkpoint
    assert_same(load(target), expected)


def test_llm_generates_the_tokens_of_the_source(tmp_path: Path) -> None:
    reference: Any = save_tiny_llama(tmp_path / "source", num_hidden_layers=1)
    convert(str(tmp_path / "source"), tmp_path / "target", to="orbax", progress=False)
    llm = LLM(
        str(tmp_path / "target"),
        skip_tokenizer_init=True,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        max_model_len=64,
        num_gpu_blocks_override=16,
        enforce_eager=True,
        allow_compile_after_warmup=True,
        compilation_cache_dir="",
    )
    prompt = [5, 9, 2, 80]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
    expected = reference.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=-1
    )
    assert list(output.token_ids) == expected[0, len(prompt) :].tolist()


# Formats


def test_the_format_is_recognised_or_insisted_on(
    tmp_path: Path, saved_orbax: Path, folder: Path
) -> None:
    for load_format in ("auto", "orbax"):
        checkpoint = open_checkpoint(str(saved_orbax), load_format=load_format)
        assert isinstance(checkpoint, OrbaxCheckpoint)
        assert checkpoint.source == "orbax"
    assert open_checkpoint(str(saved_orbax), load_format="dummy").source == "dummy"
    assert "was converted with --to orbax" in error_of(saved_orbax, load_format="safetensors")
    assert f"{folder} has no {MANIFEST_FILE}: it is no converted one" in error_of(
        folder, load_format="orbax"
    )
    assert "is a file and no folder" in error_of(folder / "config.json", load_format="orbax")
    assert open_checkpoint(str(folder)).source == "safetensors"


def test_a_folder_is_converted_once_and_a_target_not_replaced(
    tmp_path: Path, saved_orbax: Path
) -> None:
    with pytest.raises(CheckpointError, match="is converted already"):
        convert(str(saved_orbax), tmp_path / "target", to="orbax")
    with pytest.raises(CheckpointError, match="is not empty"):
        convert(str(saved_orbax), saved_orbax, to="orbax")
    with pytest.raises(CheckpointError, match="to 'flax' is none of safetensors, orbax"):
        convert(str(saved_orbax), tmp_path / "target", to="flax")
    assert not (tmp_path / "target").exists()


# Misfits


def test_all_misfits_are_listed_at_once(saved_orbax: Path) -> None:
    checkpoint = open_checkpoint(str(saved_orbax))
    abstract = abstract_of(dict(checkpoint.config), mesh=tp_mesh(8))
    head = abstract.pop("lm_head.weight")
    for layer in (0, 1):
        abstract[f"model.layers.{layer}.extra.weight"] = abstract["model.norm.weight"]
    norm = abstract["model.norm.weight"]
    abstract["model.norm.weight"] = jax.ShapeDtypeStruct((64,), norm.dtype, sharding=norm.sharding)
    abstract["model.odd.weight"] = jax.ShapeDtypeStruct(
        (12, 32), head.dtype, sharding=head.sharding
    )
    with pytest.raises(LoadError) as caught:
        load_params(abstract, checkpoint, None, {}, progress=False)  # pyright: ignore
    text = str(caught.value)
    assert text.startswith(f"the weights in {saved_orbax} do not fit the model:")
    for part in (
        "missing in the checkpoint (3):",
        "model.layers.{0..1}.extra.weight  [32]",
        "unexpected in the checkpoint (1):",
        "lm_head.weight  [96, 32] float32",
        "model.norm.weight  is [32], the model needs [64]",
        "parameters that do not divide over the mesh (1):",
        "model.odd.weight  [12, 32]",
        "was converted from a LlamaForCausalLM",
    ):
        assert part in text


def test_the_command_touches_the_cpu_only(tmp_path: Path, eight_heads: Path) -> None:
    code = (
        "import sys; from jaxllm.convert import main; code = main(sys.argv[1:]); import jax; "
        "assert jax.config.jax_platforms == 'cpu'; assert len(jax.devices()) == 8; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, str(eight_heads), str(tmp_path / "t"), "--to", "orbax"]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stdout
