"""One tiny model and one server for all tests of the folder."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.serve.server_process import COMMON_FLAGS, ServerProcess
from tests.serve.tiny_model import make_tiny_model

NAME = "tiny"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with few blocks, so that requests preempt each other now and then."""
    server = ServerProcess(
        tmp_path_factory.mktemp("server") / "log",
        *("--model", str(tiny_model), "--served-model-name", NAME, "alias"),
        *COMMON_FLAGS,
        *("--max-body-bytes", "3000000"),
    )
    yield server
    server.stop()


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", timeout=60, max_retries=0
    ) as client:
        yield client
