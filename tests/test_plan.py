"""The plan: from config.json alone, and what the engine itself would decide."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxllm import EngineConfig, plan
from jaxllm.converters.checkpoint import DEMO_PACKAGE
from jaxllm.engine.fit import GIB, make_request
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.plan import memory_size
from jaxllm.runner.estimate import Parallel, shard_bytes

ROOT = Path(__file__).resolve().parents[1]
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "num_key_value_heads": 8,
}
LLAMA_8B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLAMA_70B = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
TINY = LLAMA | {
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_70b_on_two_devices_gets_a_length_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(tmp_path, LLAMA_70B)
    command = [model, "--tensor-parallel-size", "2", "--gpu-memory", "80GB"]
    assert plan.main(command) == 1
    out = capsys.readouterr().out
    found = re.search(r"Any one of these would fit:\n  --max-model-len (\d+)\n", out)
    assert found is not None
    assert 4096 < int(found[1]) < 131072
    assert plan.main([*command, "--max-model-len", found[1]]) == 0
    assert f"longest context that fits: {found[1]} tokens" in capsys.readouterr().out
    assert plan.main([*command, "--max-model-len", str(int(found[1]) + 1)]) == 1


def test_every_named_change_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path, LLAMA_8B)
    command = [model, "--gpu-memory", "32GiB", "--dtype", "float32", "--max-model-len", "8192"]
    assert plan.main(command) == 1
    changes = re.findall(r"^  (--\S+) (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert {"--dtype", "--tensor-parallel-size", "--pipeline-parallel-size"} <= dict(changes).keys()
    for flag, value in changes:
        assert plan.main([*command, flag, value]) == 0


def test_the_table_has_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([write(tmp_path, LLAMA_8B), "--max-model-len", "4096"]) == 0
    out = capsys.readouterr().out
    for part in (
        "weights   14.958 GiB",
        "sampler state    0.306 GiB",
        "cache a token: 131072 bytes a device",
        "model.layers.{0..31}.self_attn.qkv_proj.weight  [4096, 8, 6, 128] (-, tp, -, -)",
        "model.layers.{0..31}.input_layernorm.weight  [4096] whole",
        "mixed[T=8192, B=256]",
        "It fits.",
    ):
        assert part in out


def test_block_count_is_near_what_the_engine_had_on_an_h200(tmp_path: Path) -> None:
    """Llama-3.1-8B, 256 requests, 8192 tokens a step: the engine made 57314 blocks."""
    config = EngineConfig(model=write(tmp_path, LLAMA_8B), max_model_len=4096)
    planned, _, _ = make_request(config, memory_size("139.80GiB"), Parallel()).plan()
    assert abs(planned.num_blocks - 57314) / 57314 < 0.02


def test_plan_and_engine_agree_also_where_the_config_has_nulls(tmp_path: Path) -> None:
    nulls = ("head_dim", "rope_scaling", "sliding_window", "pad_token_id")
    model = write(tmp_path, TINY | dict.fromkeys(nulls) | {"num_key_value_heads": None})
    config = EngineConfig(
        model=model,
        load_format="dummy",
        dtype="float32",
        kv_cache_memory_bytes=100_000,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        enforce_eager=True,
        compilation_cache_dir="",
    )
    planned, shape, _ = make_request(config, 8 * GIB, Parallel()).plan()
    engine = LLMEngine(config)
    assert shape.bytes_per_token == 2 * 2 * 4 * 8 * 4  # layers, k and v, heads, head_dim, float32
    assert planned.num_blocks == engine.memory.num_blocks > 0
    assert planned.cache == engine.memory.cache
    assert planned.holders.weights == engine.memory.holders.weights


def test_what_does_not_divide_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write(tmp_path, LLAMA_8B)
    assert plan.main([model, "--tensor-parallel-size", "6"]) == 1
    message = capsys.readouterr().err
    assert "--tensor-parallel-size 6 does not divide num_attention_heads = 32" in message
    assert "the mesh axis 'tp'. Sizes that work: 1, 2, 4, 8, 16, 32." in message
    assert plan.main([model, "--pipeline-parallel-size", "33"]) == 1
    assert "exceeds num_hidden_layers = 32" in capsys.readouterr().err


def test_stages_share_out_the_layers(tmp_path: Path) -> None:
    config = EngineConfig(model=write(tmp_path, LLAMA_8B), max_model_len=4096)
    request = make_request(config, 80 * GIB, Parallel(1, 2))
    planned, shape, stage = request.plan()
    assert (shape.num_layers, stage) == (16, 1)  # the last has head and sampler
    whole = sum(shard_bytes(leaf, 1) for leaf in request.shapes.values())
    norm = shard_bytes(request.shapes["model.norm.weight"], 1)
    assert planned.holders.weights == (whole + norm) // 2


def test_a_large_model_takes_less_than_two_seconds(tmp_path: Path) -> None:
    shutil.copy(ROOT / "scripts" / "shapes" / "llama-3.1-70b.json", tmp_path / "config.json")
    command = [sys.executable, "-m", "jaxllm.plan", str(tmp_path), "--tensor-parallel-size", "2"]

    def processor_seconds() -> float:  # what the wall's clock would say on a machine at rest
        before = os.times()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1, done.stderr
        assert re.search(r"--max-model-len \d{5} would fit", done.stdout)
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])

    assert any(processor_seconds() < 2 for _ in range(3))


def test_no_backend_is_started(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom jaxllm import plan\n"
        f"code = plan.main([{write(tmp_path, TINY)!r}])\n"
        "from jax._src import xla_bridge\n"
        "import jax\n"
        "assert jax.config.jax_platforms == 'cpu'\n"
        "assert not xla_bridge._backends\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(find_spec(DEMO_PACKAGE) is None, reason="needs the demo model")
def test_a_gguf_file_shows_its_types(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["demo"]) == 0
    assert re.search(r"tensors by type: .*\d+ F32", capsys.readouterr().out)


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([write(tmp_path, LLAMA_8B | {"architectures": ["NoSuchForCausalLM"]})]) == 1
    assert "NoSuchForCausalLM is not supported" in capsys.readouterr().err
    for flags in (["--gpu-memory", "80 apples"], ["--tensor-parallel-size", "0"]):
        with pytest.raises(SystemExit) as ended:
            plan.main(["demo", *flags])
        assert ended.value.code == 2
    assert "no size such as 80GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("80GB", 80 * 10**9), ("1.5g", 15 * 10**8), ("4096", 4096)],
)
def test_sizes(text: str, size: int) -> None:
    assert memory_size(text) == size


def test_shapes_only(tmp_path: Path) -> None:
    config = EngineConfig(model=write(tmp_path, TINY))
    shapes = make_request(config, GIB, Parallel()).shapes
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in shapes.values())
