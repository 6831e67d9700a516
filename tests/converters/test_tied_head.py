"""The checkpoint is followed where it disagrees with tie_word_embeddings."""

import logging
from pathlib import Path

import numpy as np
import pytest

from jaxllm.converters.architectures import name_map_for
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.errors import LoadError
from jaxllm.converters.loader import load_params
from tests.converters.tiny_models import (
    abstract_of,
    change_tensors,
    check,
    load,
    save_model,
)


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
