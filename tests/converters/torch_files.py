"""What opening a bad PyTorch file says."""

from pathlib import Path

import pytest

from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.torch_file import TorchFile


def error_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        TorchFile(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert len(message) < len(str(path)) + 300
    return message.removeprefix(f"{path} ")
