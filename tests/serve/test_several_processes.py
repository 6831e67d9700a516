"""Two processes, a device each, joined by jax.distributed: one server, and the end of either."""

import concurrent.futures
import contextlib
import os
import signal
import socket
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.server_process import ServerProcess

FLAGS = (
    *("--served-model-name", "tiny", "--tensor-parallel-size", "2", "--num-processes", "2"),
    *("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--num-gpu-blocks-override", "128"),
)
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 24, "logprobs": 1, "ignore_eos": True}
LONG = {"model": "tiny", "prompt": "abc", "max_tokens": 240, "ignore_eos": True, "stream": True}


@contextlib.contextmanager
def two(model: Path, folder: Path, *arguments: str) -> Iterator[tuple[ServerProcess, ...]]:
    """Process 0, ready to serve, and the one that follows it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = (str(model), *FLAGS, "--coordinator-address", address, *arguments)
    made = [
        ServerProcess(folder / f"log{i}", *flags, "--process-id", str(i), wait=False)
        for i in (1, 0)
    ]
    follower, leader = made
    try:
        leader.url = leader.wait_for(r"Ready: .* at (http://\S+)")
        follower.wait_for("Ready: process 1 of 2 follows process 0")
        yield leader, follower
    finally:
        for server in made:
            server.process.kill()
            server.process.wait()


def complete(url: str, prompt: str, **options) -> dict:
    response = httpx.post(
        url + "/v1/completions", json=GREEDY | {"prompt": prompt} | options, timeout=120
    )
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def events(url: str) -> Generator[str]:
    """The lines of a long stream."""
    with httpx.stream("POST", url + "/v1/completions", json=LONG, timeout=120) as response:
        assert response.status_code == 200
        yield from filter(None, response.iter_lines())


def test_two_processes_answer_as_one_and_a_lost_follower_ends_the_server(
    tiny_model, server, tmp_path
):
    prompts = ["The first of two prompts, longer than a step.", "and the other"]
    alone = [complete(server.url, prompt) for prompt in prompts]
    with two(tiny_model, tmp_path) as (leader, follower):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda prompt: complete(leader.url, prompt), prompts))
        for one, other in zip(alone, both, strict=True):
            assert one["text"] == other["text"]
            assert one["logprobs"]["token_logprobs"] == pytest.approx(
                other["logprobs"]["token_logprobs"], abs=1e-4
            )
        for options in ({"prompt_logprobs": 1}, {"temperature": 1.0, "frequency_penalty": 1.0}):
            complete(leader.url, prompts[0], **options)

        lines = events(leader.url)  # a client that goes away in the midst
        assert next(lines).startswith("data: ")
        lines.close()
        assert complete(leader.url, prompts[1])["text"] == alone[1]["text"]
        assert leader.metric("num_requests_running") == 0

        lines = events(leader.url)
        assert next(lines).startswith("data: ")
        follower.process.kill()
        killed = time.monotonic()
        *_, error, done = lines
        assert done == "data: [DONE]"
        assert '"engine_dead"' in error
        assert "Process 1 of 2" in error
        assert leader.wait_exit(30) == 1
        assert time.monotonic() - killed < 30
    assert "was lost: its connection closed" in leader.output
    assert "Traceback" not in leader.output


def test_a_lost_leader_ends_the_followers(tiny_model, tmp_path):
    with two(tiny_model, tmp_path, "--enforce-eager") as (leader, follower):
        lines = events(leader.url)
        assert next(lines).startswith("data: ")
        engine = leader.engine_pid()
        leader.process.kill()
        killed = time.monotonic()
        with pytest.raises(httpx.HTTPError):
            list(lines)
        assert follower.wait_exit(30) == 1
        assert time.monotonic() - killed < 30
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)
    assert "ERROR" in follower.output
    assert "Process 1 ends: Process 0 of 2 (127.0.0.1:" in follower.output
    assert "was lost" in follower.output


def test_sigterm_to_all_ends_all_well(tiny_model, tmp_path):
    with two(tiny_model, tmp_path, "--enforce-eager") as (leader, follower):
        follower.process.send_signal(signal.SIGTERM)
        follower.wait_for("Told to stop")
        leader.process.send_signal(signal.SIGTERM)
        assert leader.wait_exit() == 0
        assert follower.wait_exit() == 0
    for server in (leader, follower):
        assert "ERROR" not in server.output
        assert "Traceback" not in server.output
