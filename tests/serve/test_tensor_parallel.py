"""A server whose model two devices share answers as one with a single device does."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serve.conftest import NAME
from tests.serve.server_process import ServerProcess

SMALL = ("--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--num-gpu-blocks-override", "64")
PENALTIES: dict[str, Any] = {
    "seed": 11,
    "temperature": 0.9,
    "frequency_penalty": 0.7,
    "presence_penalty": 0.3,
    "logit_bias": {"70": 5},
    "extra_body": {"repetition_penalty": 1.2, "top_k": 30, "min_p": 0.01, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def two_devices(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    server = ServerProcess(
        tmp_path_factory.mktemp("server") / "log",
        *("--model", str(tiny_model), "--served-model-name", NAME, *SMALL, "--enforce-eager"),
        *("--tensor-parallel-size", "2"),
        devices=2,
    )
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client
    server.stop()


def ask(client: openai.OpenAI) -> tuple[list[str], list[str], list[float]]:
    """Two streams at once, one with penalties; then the tokens and logprobs of a greedy answer."""

    def stream(options: dict[str, Any]) -> str:
        chunks = client.completions.create(
            model=NAME, prompt="hello there", max_tokens=16, stream=True, **options
        )
        return "".join(chunk.choices[0].text for chunk in chunks)

    plain = {"seed": 12, "temperature": 1.0, "extra_body": {"top_k": -1, "ignore_eos": True}}
    with ThreadPoolExecutor() as pool:
        texts = list(pool.map(stream, [PENALTIES, plain]))
    answer = client.completions.create(
        model=NAME, prompt="hello " * 8, max_tokens=6, temperature=0, logprobs=3, echo=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    return texts, logprobs.tokens, logprobs.token_logprobs[1:]


def test_answers_are_those_of_one_device(two_devices: openai.OpenAI, client: openai.OpenAI) -> None:
    texts, tokens, logprobs = ask(two_devices)
    expected = ask(client)
    assert (texts, tokens) == expected[:2]
    assert len(set(texts)) == 2
    assert logprobs == pytest.approx(expected[2], abs=1e-4)


def test_a_size_that_does_not_divide_ends_the_server_with_those_that_do(
    tiny_model: Path, tmp_path: Path
) -> None:
    arguments = ("--model", str(tiny_model), "--tensor-parallel-size", "3")
    server = ServerProcess(tmp_path / "log", *arguments, wait=False, devices=3)
    assert server.wait_exit() == 1
    assert (
        "--tensor-parallel-size 3 does not divide num_attention_heads = 4 over the mesh axis "
        "'tp'. Sizes that work: 1, 2, 4."
    ) in server.output
    assert "load the weights" not in server.output
