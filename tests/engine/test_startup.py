"""What the start says about its choices."""

import logging
from typing import Any

import pytest

from jaxllm.engine.startup import dtype_reason
from tests.engine.tiny_engine import make_engine


@pytest.mark.parametrize(
    ("asked", "config", "line"),
    [
        ("auto", {}, "dtype bfloat16: auto on a GPU; config.json names none"),
        ("auto", {"dtype": None, "torch_dtype": None}, "config.json names none"),
        ("bfloat16", {"dtype": "float32"}, "as asked; config.json's dtype is float32"),
        ("auto", {"torch_dtype": "float16"}, "config.json's torch_dtype is float16"),
        (
            "auto",
            {"torch_dtype": "float16", "dtype": "bfloat16"},
            "config.json's dtype is bfloat16 (and its older torch_dtype, float16, does not count)",
        ),
        ("auto", {"torch_dtype": "float16", "dtype": "float16"}, "config.json's dtype is float16"),
    ],
)
def test_the_dtype_is_told_with_its_reason(asked: str, config: dict[str, Any], line: str) -> None:
    assert dtype_reason(asked, "bfloat16", config, "gpu").endswith(line)


def test_an_engine_logs_it(tiny_llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_engine(tiny_llama[0], enforce_eager=True)
    assert "dtype float32: as asked; config.json's dtype is float32" in caplog.text
