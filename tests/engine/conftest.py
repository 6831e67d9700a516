"""A tiny random Llama on disk and an engine for it, shared by the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.engine.local_engine import LocalEngine
from tests.engine.tiny_engine import make_engine, save_tiny_llama
from tests.runner.parallel_models import quickly_compiled


@pytest.fixture(scope="module", autouse=True)
def quick_compiles() -> Iterator[None]:
    with quickly_compiled():
        yield


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder, the transformers model)."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    return folder, save_tiny_llama(folder)


@pytest.fixture(scope="session")
def engine(tiny_llama: tuple[Path, Any]) -> Iterator[LocalEngine]:
    """Odd limits on purpose: buckets that are no powers of two, few blocks."""
    made = make_engine(tiny_llama[0])
    yield made
    assert not made.has_unfinished_requests()
