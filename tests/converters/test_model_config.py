"""What is wrong in config.json is said with the file's name."""

from pathlib import Path
from typing import Any

import pytest

from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.errors import CheckpointError
from jaxllm.converters.model_config import read_model_config
from jaxllm.models.llama import LlamaForCausalLM
from jaxllm.models.registry import resolve


def test_a_good_config(llama_folder: Path) -> None:
    config = open_checkpoint(str(llama_folder)).config
    model_class, model_config = read_model_config(resolve, config, llama_folder)
    assert model_class is LlamaForCausalLM
    assert model_config.hidden_size == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Lama"]}, "architecture Lama is not supported"),
        ({"architectures": None}, "names no architecture"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers = 1099511627776"),
        ({"rope_parameters": [1]}, "rope_parameters"),
    ],
)
def test_bad_values(llama_folder: Path, change: dict[str, Any], message: str) -> None:
    config = open_checkpoint(str(llama_folder)).config | change
    with pytest.raises(CheckpointError) as caught:
        read_model_config(resolve, config, llama_folder)
    assert str(caught.value).startswith(f"{llama_folder / 'config.json'}")
    assert message in str(caught.value)


def test_a_broken_module_is_no_unsupported_architecture(llama_folder: Path) -> None:
    def broken(_: list[str]) -> Any:
        raise ImportError("no module named x")

    with pytest.raises(ImportError, match="no module named x"):
        read_model_config(broken, {}, llama_folder)
