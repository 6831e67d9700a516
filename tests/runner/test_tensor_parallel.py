"""Tensor parallelism on virtual devices: the same tokens, two sums a layer, equal shares."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxllm.engine.fit import GIB, make_request
from jaxllm.engine.local_engine import LocalEngine
from jaxllm.models.registry import resolve
from jaxllm.outputs import RequestOutput
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.estimate import Parallel
from jaxllm.runner.memory import device_bytes
from jaxllm.runner.mesh import make_mesh
from jaxllm.runner.programs import StepPrograms
from jaxllm.runner.sampler import SamplingMode, result_width
from jaxllm.runner.weights import flatten
from tests.runner.parallel_models import (
    BLOCKS,
    LAYERS,
    MODELS,
    SIZES,
    VOCAB,
    check_same,
    generate,
    make_config,
)

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("llama", 8),
        ("llama-tied", 4),
        ("qwen2", 2),
        ("qwen3", 4),
        ("qwen3", 8),
    ],
)
def test_tokens_and_logprobs_are_those_of_one_device(
    folders: dict[str, Path], expected: dict[str, list[RequestOutput]], name: str, tp: int
) -> None:
    engine = LocalEngine(make_config(folders[name], tp))
    check_same(generate(engine), expected[name])
    if (name, tp) in (("qwen2", 2), ("qwen3", 4)):
        check_compiled(engine, tp)
    check_bytes(engine, folders[name], tp)


def check_compiled(engine: LocalEngine, tp: int) -> None:
    """Two sums a layer and one for the embedding; only results are gathered, never logits."""
    programs = engine.engine.runner.programs
    assert isinstance(programs, StepPrograms)
    for bucket in (Bucket(2, 2, True), Bucket(16, 2, False)):
        found = collectives(programs._lower(bucket))
        assert Counter(kind for _, kind in found) == {"all-reduce": 2 * LAYERS + 1}
        [(gathered, kind)] = collectives(programs._lower_sampler(2, SamplingMode.GREEDY))
        assert kind == "all-gather"
        assert gathered.startswith(f"s32[2,{tp},2]")
    if tp == 2:
        return
    columns = result_width(programs._common.step(None).max_logprobs)
    for mode in (SamplingMode.RANDOM, SamplingMode.FULL):
        found = collectives(programs._lower_sampler(2, mode))
        assert Counter(kind for _, kind in found) == {"all-to-all": 1, "all-gather": 1}
        gathered = next(shape for shape, kind in found if kind == "all-gather")
        assert gathered.startswith(f"s32[{tp},{columns}]")
    found = collectives(programs._lower_logprobs(Bucket(16, 2, False)))
    assert Counter(kind for _, kind in found) == {"all-to-all": 1, "all-gather": 1}
    gathered = next(shape for shape, kind in found if kind == "all-gather")
    assert gathered.startswith(f"s32[16,{columns - 1}]")


def collectives(lowered: Any) -> list[tuple[str, str]]:
    """The shape and kind of each operation between devices."""
    return re.findall(
        r"= (.+?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
        r"(?:-start)?\(",
        lowered.compile().as_text(),
    )


def check_bytes(engine: LocalEngine, folder: Path, tp: int) -> None:
    """What is really on each device, what the engine's table says, and the plan's."""
    runner, memory = engine.engine.runner, engine.engine.memory
    request = make_request(make_config(folder, tp), GIB, Parallel(tp))
    planned, shape, _ = request.plan()
    weights = [
        sum(shard.data.nbytes for leaf in leaves for shard in [leaf.addressable_shards[device]])
        for leaves in [flatten(runner.params).values()]
        for device in range(tp)
    ]
    assert weights == [planned.holders.weights] * tp
    assert memory.holders.weights == planned.holders.weights
    cache = runner._state.kv_cache
    each = [sum(array.addressable_shards[d].data.nbytes for array in cache) for d in range(tp)]
    assert each == [planned.cache] * tp
    assert planned.cache == memory.cache == BLOCKS * shape.bytes_per_block
    assert sum(map(device_bytes, cache)) == memory.cache


def test_kv_heads_are_repeated_only_where_there_are_fewer_than_devices() -> None:
    config = resolve(["LlamaForCausalLM"]).Config.from_hf(SIZES)
    for tp, heads, replicas in ((1, 2, 1), (2, 2, 1), (4, 4, 2), (8, 8, 4)):
        shared = config.with_tensor_parallel(tp)
        assert (shared.num_key_value_heads, shared.kv_replicas) == (heads, replicas)
        assert shared.vocab_size == VOCAB
        assert shared.padded_vocab_size % tp == 0


@pytest.mark.parametrize(
    ("tp", "changes", "named", "works"),
    [
        (3, {}, "num_attention_heads = 8", "1, 2, 4, 8"),
        (8, {"intermediate_size": 36}, "intermediate_size = 36", "1, 2, 4"),
        (
            4,
            {"num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 72},
            "num_key_value_heads = 6",
            "1, 2, 3, 6, 12",
        ),
    ],
)
def test_what_does_not_divide_is_refused_before_anything_is_read(
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tp: int,
    changes: dict[str, Any],
    named: str,
    works: str,
) -> None:
    source = folders["llama"]
    (tmp_path / "config.json").write_text(json.dumps(SIZES | MODELS["llama-tied"] | changes))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    monkeypatch.setattr("jaxllm.engine.startup.load_params", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        LocalEngine(make_config(tmp_path, tp))
    message = str(caught.value)
    assert f"--tensor-parallel-size {tp} does not divide" in message
    assert "axis 'tp'" in message
    assert f"Sizes that work: {works}." in message


def test_too_many_devices_are_refused() -> None:
    sizes = SIZES | {"num_attention_heads": 16, "head_dim": 4}
    config = resolve(["LlamaForCausalLM"]).Config.from_hf(sizes).with_tensor_parallel(16)
    assert config.num_key_value_heads == 16
    with pytest.raises(ValueError, match="--tensor-parallel-size 16 needs 16 devices, but JAX"):
        make_mesh(jax.devices()[:8], tensor_parallel_size=16)
