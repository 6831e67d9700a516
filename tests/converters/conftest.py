"""Checkpoints shared by the tests of the converters."""

import shutil
from pathlib import Path

import pytest

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
