"""Checkpoints shared by the tests of the converters."""

import shutil
from pathlib import Path

import pytest

from jaxllm.convert import convert
from tests.converters.tiny_models import save_model


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untied Llama in one file. Read only: copy it to change it."""
    return save_model(tmp_path_factory.mktemp("llama"), tie_word_embeddings=False)


@pytest.fixture
def folder(tmp_path: Path, llama_folder: Path) -> Path:
    """A copy of `llama_folder` to be changed."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


@pytest.fixture(scope="session")
def saved_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("shards"), max_shard_size="20KB")


@pytest.fixture
def shards(tmp_path: Path, saved_shards: Path) -> Path:
    """A tiny Llama in several shards."""
    return Path(shutil.copytree(saved_shards, tmp_path / "shards"))


@pytest.fixture(scope="session")
def eight_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied Llama that eight devices can split. Read only."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4}
    folder = tmp_path_factory.mktemp("eight_heads")
    return save_model(folder, "Llama", tie_word_embeddings=False, **heads)


@pytest.fixture(scope="session")
def saved_orbax(tmp_path_factory: pytest.TempPathFactory, eight_heads: Path) -> Path:
    """`eight_heads` converted. Read only."""
    target = tmp_path_factory.mktemp("converted") / "model"
    return convert(str(eight_heads), target, to="orbax", progress=False)


@pytest.fixture
def converted(tmp_path: Path, saved_orbax: Path) -> Path:
    """A copy of `saved_orbax` to be damaged."""
    return Path(shutil.copytree(saved_orbax, tmp_path / "model"))
