"""Checkpoints shared by the tests of the converters."""

from pathlib import Path

import pytest

from tests.converters.tiny_models import save_model


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untied Llama in one file. Read only: copy it to change it."""
    return save_model(tmp_path_factory.mktemp("llama"), tie_word_embeddings=False)
