"""Architectures from outside the package, served: the engine's own process finds the plug-in."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.numpy

from jaxllm import LLM, SamplingParams
from tests.converters.tiny_models import save_model
from tests.installed_package import pip_install
from tests.serve.server_process import ServerProcess
from tests.serve.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PROMPT, LENGTH = "hello", 8
SIZES: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "enforce_eager": True}
FLAGS = ("--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--enforce-eager", "--dtype",
         "float32", "--num-gpu-blocks-override", "16", "--served-model-name", "m")  # fmt: skip
SETUP = """
from setuptools import setup
setup(name="fin-models", version="1", py_modules=["fin_models"],
      entry_points={"jaxllm.models": ["fin = fin_models:register"]})
"""
PLUGIN = """
from dataclasses import replace

import jaxllm
from jaxllm.converters.qwen2 import NAME_MAP as QWEN
from jaxllm.models.qwen2 import Qwen2ForCausalLM

NAME_MAP = replace(QWEN, rules=tuple(
    replace(rule, tensors=tuple(n.replace(".q_proj.", ".query_proj.") for n in rule.tensors))
    for rule in QWEN.rules
))


class OwnForCausalLM(Qwen2ForCausalLM):
    def compute_logits(self, hidden):
        return -super().compute_logits(hidden)


def register():
    jaxllm.register_model("OwnForCausalLM", model=OwnForCausalLM, name_map=NAME_MAP)
    jaxllm.register_model(
        "FinQwenForCausalLM", model="Qwen2ForCausalLM", rename={"query_proj": "q_proj"}
    )
"""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 folder with a byte-level tokenizer."""
    folder = save_model(
        tmp_path_factory.mktemp("qwen"), "Qwen2", vocab_size=259, initializer_range=0.3
    )
    for file in make_tiny_model(tmp_path_factory.mktemp("llama")).glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip installed the package with the entry point."""
    source, target = tmp_path_factory.mktemp("plugin"), tmp_path_factory.mktemp("site")
    return pip_install(source, target, {"setup.py": SETUP, "fin_models.py": PLUGIN})


def renamed(source: Path, target: Path, architecture: str, *, sign: int = 1) -> Path:
    """The folder as another architecture, with q_proj as query_proj and the head times `sign`."""
    for file in source.glob("*.json"):
        shutil.copy(file, target)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = sign * tensors["lm_head.weight"]
    changed = {name.replace(".q_proj.", ".query_proj."): x for name, x in tensors.items()}
    safetensors.numpy.save_file(changed, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("architecture", "sign"), [("FinQwenForCausalLM", 1), ("OwnForCausalLM", -1)]
)
def test_a_plugins_architecture_is_served(
    qwen: Path,
    site: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: str,
    architecture: str,
    sign: int,
) -> None:
    """OwnForCausalLM turns the logits' sign, as its checkpoint does the head's."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{site}")
    (tmp_path / "model").mkdir()
    folder = renamed(qwen, tmp_path / "model", architecture, sign=sign)
    server = ServerProcess(tmp_path / "log", "--model", str(folder), *FLAGS)
    try:
        body = {"model": "m", "prompt": PROMPT, "temperature": 0, "max_tokens": LENGTH}
        body |= {"ignore_eos": True}
        reply = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    finally:
        server.stop()
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"] == expected


@pytest.fixture(scope="module")
def expected(qwen: Path) -> str:
    """What the same weights answer under their own names."""
    llm = LLM(str(qwen), dtype="float32", num_gpu_blocks_override=16, **SIZES)
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


def test_without_the_plugin_the_server_says_how_to_register(qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = renamed(qwen, tmp_path / "model", "FinQwenForCausalLM")
    server = ServerProcess(tmp_path / "log", "--model", str(folder), *FLAGS, wait=False)
    try:
        assert server.wait_exit(60) == 1
    finally:
        server.stop()
    assert "FinQwenForCausalLM is not supported" in server.output
    assert 'register_model("FinQwenForCausalLM", model="Qwen' in server.output
    assert "entry point of the group jaxllm.models" in server.output
    assert "Traceback" not in server.output
