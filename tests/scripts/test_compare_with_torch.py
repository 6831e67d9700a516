"""scripts/compare_with_torch.py: agrees with transformers, and notices when it should not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny_engine import save_tiny_llama

ROOT = Path(__file__).parents[2]


def compare(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(ROOT), XLA_FLAGS="")
    command = [sys.executable, str(ROOT / "scripts" / "compare_with_torch.py"), str(folder)]
    return subprocess.run(
        [*command, "--num-tokens", "6", "--chunk", "32", *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare")
    save_tiny_llama(path, max_position_embeddings=128)
    return path


def test_a_model_agrees_and_the_figures_are_written(folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = compare(folder, "--layers", "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    prompts = json.loads(report.read_text())["prompts"]
    assert len(prompts) == 8
    for prompt in prompts:
        assert prompt["greedy"] == 1.0
        for path in ("prefill", "decode"):
            assert prompt[path]["max_abs"] <= 1e-3
            assert prompt[path]["max_kl"] <= 1e-6
            assert prompt[path]["top1"] == 1.0
        assert [row["name"] for row in prompt["layers"]] == ["embedding", "layer 0", "final norm"]


def test_a_broken_limit_is_named_and_the_exit_code_is_one(folder: Path) -> None:
    done = compare(folder, "--atol", "0", "--max-kl", "0")
    assert done.returncode == 1
    assert "prompt 0, prefill: max_abs" in done.stdout


def test_the_demo_model_agrees_from_its_gguf(tmp_path: Path) -> None:
    """Short, for time; the script's own prompts are longer and more."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The capital of France is\n")
    done = compare(Path("demo"), "--prompts", str(prompts))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "demo: all 1 prompts agree" in done.stdout
