"""What tensor and pipeline parallelism are both compared with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm.engine.local_engine import LocalEngine
from jaxllm.outputs import RequestOutput
from tests.runner.parallel_models import MODELS, generate, make_config, quickly_compiled, save


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    with quickly_compiled():
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save(root / name, name) for name in MODELS}


@pytest.fixture(scope="session")
def expected(folders: dict[str, Path]) -> dict[str, list[RequestOutput]]:
    """What one device gives, with requests preempted on the way."""
    found: dict[str, list[RequestOutput]] = {}
    with quickly_compiled():
        for name, folder in folders.items():
            engine = LocalEngine(make_config(folder, 1))
            found[name] = generate(engine)
            assert engine.engine.stats().num_preemptions > 0
    return found
