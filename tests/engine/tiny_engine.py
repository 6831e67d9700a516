"""A tiny random Llama, an engine with odd limits for it, and a loop that runs requests."""

from pathlib import Path
from typing import Any

import torch
import transformers

from jaxllm import EngineConfig, SamplingParams
from jaxllm.engine.local_engine import LocalEngine
from jaxllm.outputs import RequestOutput

VOCAB = 160


def save_tiny_llama(folder: Path, **changes: Any) -> transformers.LlamaForCausalLM:
    """A random Llama with weights large enough that its greedy text varies."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
        }
        | changes
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def make_engine(folder: Path, **changes: Any) -> LocalEngine:
    options = {
        "dtype": "float32",
        "block_size": 8,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 317,
        "max_model_len": 400,
        "skip_tokenizer_init": True,
        "compilation_cache_dir": "",
    }
    return LocalEngine(EngineConfig(model=str(folder), **(options | changes)))


def run_all(
    engine: LocalEngine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[RequestOutput]:
    """Runs the prompts together; checks the scheduler's integrity after each step."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    for i, (prompt, param) in enumerate(zip(prompts, each, strict=True)):
        engine.add_request(f"run-{i}", prompt, param)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
        engine.engine.scheduler.check_integrity()
    return [outputs[f"run-{i}"] for i in range(len(prompts))]
