"""What the engine refuses at start because the cache would be too small."""

from typing import Any

import pytest

from jaxllm import SamplingParams
from tests.engine.tiny_engine import make_engine, run_all


def test_no_memory_for_one_block_names_what_would_work(tiny_llama: Any) -> None:
    with pytest.raises(ValueError, match="--kv-cache-memory-bytes 2048 would fit"):
        make_engine(tiny_llama[0], num_gpu_blocks_override=None, kv_cache_memory_bytes=100)


def test_a_cache_too_small_for_one_full_request_is_refused_at_start(tiny_llama: Any) -> None:
    """A block of 8 tokens takes 8 * 2 layers * 2 * 2 heads * 8 * 4 B = 2048 bytes."""
    message = r"--max-model-len 400 .*--max-model-len 64 would fit.*--kv-cache-memory-bytes 102400 "
    with pytest.raises(ValueError, match=message):
        make_engine(tiny_llama[0], num_gpu_blocks_override=None, kv_cache_memory_bytes=8 * 2048)


def test_the_length_that_the_refusal_names_fits(tiny_llama: Any) -> None:
    engine = make_engine(
        tiny_llama[0],
        num_gpu_blocks_override=None,
        kv_cache_memory_bytes=8 * 2048,
        max_model_len=64,
        enforce_eager=True,
    )
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    [output] = run_all(engine, [[5, 6, 7, 8]], params)
    assert len(output.outputs[0].token_ids) == 60
