"""Tensor parallelism on virtual devices: the same tokens, two sums a layer, equal shares."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxllm import EngineConfig, SamplingParams
from jaxllm.converters.architectures import name_map_for
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
from jaxllm.runner.weights import build_abstract, flatten

LAYERS, VOCAB, BLOCKS = 2, 97, 9
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,  # divides over no mesh: padded on every one
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 8},
    "llama-tied": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
}


def save(folder: Path, name: str) -> Path:
    """A random checkpoint, its tensors' shapes as the name map says."""
    config = SIZES | MODELS[name]
    model_class = resolve(config["architectures"])
    model_config = model_class.Config.from_hf(config)
    shapes = build_abstract(model_class, model_config, "float32", make_mesh()).shapes
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    for param, leaf in shapes.items():
        for rule in name_map_for(config["architectures"]).rules:
            names = rule.sources(param)
            shaped = zip(names, rule.op.tensor_shapes(leaf.shape), strict=True) if names else ()
            for tensor, shape in shaped:
                tensors[tensor] = rng.normal(0, 0.25, shape).astype(np.float32)
                if "norm" in tensor:
                    tensors[tensor] += 1
    folder.mkdir()
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", autouse=True)
def quick_compiles() -> Iterator[None]:
    """Compiling is most of these tests' time; the numbers do not depend on the code's speed."""
    with pytest.MonkeyPatch.context() as patch:
        fast = {"xla_backend_optimization_level": 0}
        patch.setattr(StepPrograms, "_compiler_options", lambda *_: fast)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save(root / name, name) for name in MODELS}


def make_config(folder: Path, tp: int, **changes: Any) -> EngineConfig:
    options: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 8,
        "num_gpu_blocks_override": BLOCKS,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "max_model_len": 96,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "compilation_cache_dir": "",
        "tensor_parallel_size": tp,
    }
    return EngineConfig(model=str(folder), **(options | changes))


def generate(engine: LocalEngine) -> list[RequestOutput]:
    """Prompts longer than a step, two with one prefix, more than the cache holds at once."""
    rng = np.random.default_rng(1)
    first, second, third = (rng.integers(0, VOCAB, n).tolist() for n in (45, 9, 17))
    prompts = [first, second, third, first[:24] + second]
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    random = SamplingParams(
        temperature=0.8, seed=7, max_tokens=12, ignore_eos=True, top_k=20, frequency_penalty=0.5
    )
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    done: dict[str, RequestOutput] = {}
    for number, (prompt, each) in enumerate(
        zip(prompts, (params, greedy, random, greedy), strict=True)
    ):
        engine.add_request(str(number), prompt, each)
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step()}
        engine.engine.scheduler.check_integrity()
    return [done[str(number)] for number in range(len(prompts))]


def logprobs_of(output: RequestOutput) -> np.ndarray:
    """What each token, of the prompt and of the text, was given."""
    steps = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    tokens = [*(output.prompt_token_ids or [])[1:], *output.outputs[0].token_ids]
    return np.array([step[token].logprob for step, token in zip(steps, tokens, strict=True)])


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    for name, folder in folders.items():
        engine = LocalEngine(make_config(folder, 1))
        found[name] = generate(engine)
        assert engine.engine.stats().num_preemptions > 0
    return found


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
    for found, wanted in zip(generate(engine), expected[name], strict=True):
        assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
        if wanted.outputs[0].logprobs:
            np.testing.assert_allclose(logprobs_of(found), logprobs_of(wanted), atol=1e-4)
    if (name, tp) in (("qwen2", 2), ("qwen3", 4)):
        check_compiled(engine, tp)
    check_bytes(engine, folders[name], tp)


def check_compiled(engine: LocalEngine, tp: int) -> None:
    """Two sums a layer and one for the embedding; only results are gathered, never logits."""
    programs = engine.engine.runner.programs
    sums = {"all-reduce": 2 * LAYERS + 1, "all-gather": 1}
    for bucket in (Bucket(2, 2, True), Bucket(16, 2, False)):
        found = collectives(programs._lower(bucket, SamplingMode.GREEDY))
        assert Counter(kind for _, kind in found) == sums
        gathered = next(shape for shape, kind in found if kind == "all-gather")
        assert gathered.startswith(f"s32[2,{tp},2]")
    if tp == 2:
        return
    shared = sums | {"all-to-all": 1}
    columns = result_width(programs._options(None).max_logprobs)
    for mode in (SamplingMode.RANDOM, SamplingMode.FULL):
        found = collectives(programs._lower(Bucket(2, 2, True), mode))
        assert Counter(kind for _, kind in found) == shared
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
