"""Tiny random models of every architecture, and what one device makes of them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from jaxllm import EngineConfig, SamplingParams
from jaxllm.converters.architectures import name_map_for
from jaxllm.engine.local_engine import LocalEngine
from jaxllm.models.registry import resolve
from jaxllm.outputs import RequestOutput
from jaxllm.runner.compiler import Compiler
from jaxllm.runner.mesh import make_mesh
from jaxllm.runner.weights import build_abstract

LAYERS, VOCAB, BLOCKS = 4, 97, 9
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


@contextmanager
def quickly_compiled() -> Iterator[None]:
    """Compiling is most of these tests' time; the numbers do not depend on the code's speed."""
    with pytest.MonkeyPatch.context() as patch:
        fast = {"xla_backend_optimization_level": 0}
        patch.setattr(Compiler, "_compiler_options", lambda *_: fast)
        yield


def make_config(folder: Path, tp: int, pp: int = 1, **changes: Any) -> EngineConfig:
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
        "pipeline_parallel_size": pp,
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


def check_same(found: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    """Equal tokens, and logprobs within 1e-4."""
    for one, other in zip(found, wanted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        if other.outputs[0].logprobs:
            np.testing.assert_allclose(logprobs_of(one), logprobs_of(other), atol=1e-4)
