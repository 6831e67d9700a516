"""The plan's comparison of a checkpoint's headers, or its index, with the model."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import jaxllm
from jaxllm import EngineConfig
from jaxllm.converters import architectures
from jaxllm.converters.errors import CheckpointError, LoadError
from jaxllm.converters.loader import load_params
from jaxllm.engine.fit import GIB, Request, make_request
from jaxllm.models import registry
from jaxllm.runner.estimate import Parallel
from tests.converters.tiny_models import save_model

INDEX = "model.safetensors.index.json"
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("qwen"), "Qwen2")


def copied(
    source: Path, target: Path, change: Callable[[Tensors], object], *, tied: bool = False
) -> Path:
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    return target


def index_only(source: Path, target: Path, change: Callable[[Tensors], object]) -> Path:
    """The index of three shards, without them."""
    copied(source, target, change)
    names = safetensors.numpy.load_file(target / "model.safetensors").keys()
    (target / "model.safetensors").unlink()
    shards = {name: f"model-{1 + i % 3}.safetensors" for i, name in enumerate(names)}
    (target / INDEX).write_text(json.dumps({"weight_map": shards}))
    return target


def planned(folder: Path, **options: object) -> Request:
    config = EngineConfig(model=str(folder)).replace(**options)
    return make_request(config, GIB, Parallel(config.tensor_parallel_size))


def spoil(tensors: Tensors) -> None:
    for i in range(2):
        del tensors[f"model.layers.{i}.mlp.down_proj.weight"]
        tensors[f"model.layers.{i}.mlp.extra.weight"] = np.ones(3, np.float32)


def nothing(tensors: Tensors) -> None:
    pass


@pytest.mark.parametrize("tp", [1, 4])
def test_a_fitting_checkpoint_says_so(qwen: Path, tp: int) -> None:
    notes = planned(qwen, tensor_parallel_size=tp).notes
    assert "its tensors' names and shapes are those of the model" in notes


def test_headers_are_compared_without_reading_weights(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_read(*args: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("jaxllm.converters.safetensors_file.SafetensorsFile.read", no_read)
    folder = copied(qwen, tmp_path, spoil)
    with pytest.raises(LoadError) as raised:
        planned(folder)
    text = str(raised.value)
    assert "missing in the checkpoint (2):\n    model.layers.{0..1}.mlp.down_proj.weight" in text
    assert "unexpected in the checkpoint (2):\n    model.layers.{0..1}.mlp.extra.weight" in text
    assert planned(folder, load_format="dummy").notes == ()
    planned(copied(qwen, tmp_path, nothing, tied=True))  # nor for the head that may be tied


def test_the_report_is_the_loaders(qwen: Path, tmp_path: Path) -> None:
    from jaxllm.converters.checkpoint import open_checkpoint
    from jaxllm.converters.qwen2 import NAME_MAP

    def reshape(tensors: Tensors) -> None:
        spoil(tensors)
        tensors["model.norm.weight"] = np.ones(5, np.float32)

    shapes = planned(qwen).shapes
    folder = copied(qwen, tmp_path, reshape)
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(LoadError) as loading:
        load_params(shapes, checkpoint, NAME_MAP, checkpoint.config, progress=False)
    with pytest.raises(LoadError) as planning:
        planned(folder)
    assert str(planning.value) == str(loading.value)


def test_unlike_sizes_of_a_tied_pair(qwen: Path, tmp_path: Path) -> None:
    def grow(tensors: Tensors) -> None:
        head = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = np.concatenate([head, head[:1]])

    with pytest.raises(LoadError, match=r"lm_head\.weight has shape"):
        planned(copied(qwen, tmp_path, grow, tied=True))


def test_an_index_without_its_files_gives_names(qwen: Path, tmp_path: Path) -> None:
    assert any(
        "its index has" in note for note in planned(index_only(qwen, tmp_path, nothing)).notes
    )
    with pytest.raises(LoadError) as raised:
        planned(index_only(qwen, tmp_path, spoil))
    text = str(raised.value)
    assert "missing in the checkpoint (2):\n    model.layers.{0..1}.mlp.down_proj.weight  [" in text
    assert "unexpected in the checkpoint (2):\n    model.layers.{0..1}.mlp.extra.weight" in text


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", ""])
def test_one_of_a_tied_pair_is_enough_in_an_index(qwen: Path, tmp_path: Path, kept: str) -> None:
    pair = {"model.embed_tokens.weight", "lm_head.weight"}

    def keep(tensors: Tensors) -> None:
        tensors |= dict.fromkeys(pair, tensors["model.embed_tokens.weight"])
        for name in pair - {kept}:
            del tensors[name]

    folder = index_only(qwen, tmp_path, keep)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    if kept:
        planned(folder)
    else:
        with pytest.raises(LoadError, match=r"missing in the checkpoint \(1\)"):
            planned(folder)


def test_broken_files_are_named(qwen: Path, tmp_path: Path) -> None:
    folder = copied(qwen, tmp_path, nothing)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        planned(folder)
    (folder / INDEX).write_text('{"weight_map": {"a": "../../b"}}')
    with pytest.raises(CheckpointError, match=INDEX):
        planned(folder)


def test_more_layers_than_any_model_has(qwen: Path, tmp_path: Path) -> None:
    config = json.loads((qwen / "config.json").read_text()) | {"num_hidden_layers": 10**9}
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json: num_hidden_layers = 1000000000"):
        planned(tmp_path)


@pytest.mark.parametrize("only_index", [False, True])
def test_a_registered_architecture_is_compared_under_its_names(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_index: bool
) -> None:
    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.replace(".q_proj.", ".query_proj.")] = tensors.pop(name)

    folder = (index_only if only_index else copied)(qwen, tmp_path, rename)
    config = json.loads((folder / "config.json").read_text())
    changed = config | {"architectures": ["FinQwenForCausalLM"], "model_type": "fin_qwen"}
    (folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match="FinQwenForCausalLM is not supported"):
        planned(folder)
    monkeypatch.setattr(registry, "_TARGETS", dict(registry._TARGETS))
    monkeypatch.setattr(architectures, "_REGISTERED", {})
    jaxllm.register_model("FinQwenForCausalLM", model="Qwen2ForCausalLM")
    with pytest.raises(LoadError, match=r"layers\.\{0\.\.1\}\.self_attn\.query_proj\.weight"):
        planned(folder)
    jaxllm.register_model(
        "FinQwenForCausalLM", model="Qwen2ForCausalLM", rename={"query_proj": "q_proj"}
    )
    assert any("names" in note for note in planned(folder).notes)
