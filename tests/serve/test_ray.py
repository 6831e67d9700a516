"""Two replicas behind one address: what a client sees when they are lost or replaced."""

import json
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray itself, when it is imported
    pytest.importorskip("ray.serve", reason="needs the extra `ray`")
    import ray
    from ray import serve

from jaxllm.serve.ray import app
from tests.serve.load import Load
from tests.serve.server_process import CACHE

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's threads warn when they please

REPLICA = "x-jaxllm-replica"
LONG = {"max_tokens": 180, "ignore_eos": True}
SHORT: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0}
SHORT_OPENAI: dict[str, Any] = {"max_tokens": 24, "temperature": 0}
MANY = 64
"""Sequences of a stream, that it may last some seconds."""
GRACE_S = 0.2
"""Within which a death is noticed: what is sent meanwhile may still reach the dead."""
SETTINGS = {
    "served_model_name": "tiny",
    "num_replicas": 2,
    "num_gpus": 0,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 128,
    "compilation_cache_dir": str(CACHE),
    "max_body_bytes": 100_000,
    "affinity_chars": 64,
    "affinity_slack": 2,
}


@pytest.fixture(scope="module")
def settings(tiny_model: Path) -> dict[str, Any]:
    return {**SETTINGS, "model": str(tiny_model)}


@pytest.fixture(scope="module")
def url(settings: dict[str, Any]) -> Iterator[str]:
    """One cluster for all tests of the file."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "RAY_USAGE_STATS_ENABLED": "0"}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in variables.items():
            patch.setenv(name, value)
        ray.init(
            "local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            deploy(settings)
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def deploy(settings: dict[str, Any]) -> None:
    serve.run(app(settings))


def metric(http: httpx.Client, name: str) -> dict[str, float]:
    """The metric's value at each replica that answers."""
    found = {}
    for line in http.get("/metrics").text.splitlines():
        if line.startswith(f'jaxllm:{name}{{replica="'):
            found[line.split('"')[1]] = float(line.rsplit(" ", 1)[1])
    return found


def wait_until(condition: Callable[[], Any], within_s: float) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def wait_for_two(http: httpx.Client) -> None:
    wait_until(lambda: list(metric(http, "engine_up").values()) == [1, 1], within_s=90)


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in listed for child in path.read_text().split()]


def replica_pids() -> list[int]:
    """Of the processes that hold a replica, among our descendants."""
    found, seen = [], [os.getpid()]
    for pid in seen:
        seen += children(pid)
        if (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .startswith(b"ray::ServeReplica:default:Replica")
        ):
            found.append(pid)
    return found


def engine_pid(replica: int) -> int:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(replica)}
    return next(pid for pid, command in commands.items() if b"spawn_main" in command)


@contextmanager
def stream(http: httpx.Client, prompt: str) -> Iterator[tuple[str, Iterator[str]]]:
    """A long stream under way: its replica and its lines but the first."""
    body = {**LONG, "prompt": prompt, "stream": True, "n": MANY}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield response.headers[REPLICA], lines


@contextmanager
def streams_on_both(http: httpx.Client) -> Iterator[list[tuple[str, Iterator[str]]]]:
    """A stream on each of the replicas."""
    homes = {}
    for beginning in "abcdefgh":
        body = {**SHORT, "prompt": beginning * 64}
        homes[http.post("/v1/completions", json=body).headers[REPLICA]] = body["prompt"]
    with ExitStack() as stack:
        streams = [stack.enter_context(stream(http, prompt)) for prompt in homes.values()]
        assert len({replica for replica, _ in streams}) == 2
        yield streams


def last_events(lines: Iterator[str]) -> tuple[dict[str, Any], str]:
    *_, event, done = [line for line in lines if line]
    return json.loads(event.removeprefix("data: ")), done


def test_clients_see_one_server(http: httpx.Client, url: str) -> None:
    with closing(openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)) as client:
        whole = client.completions.create(model="tiny", prompt="abc", **SHORT_OPENAI)
        parts = client.completions.create(model="tiny", prompt="abc", stream=True, **SHORT_OPENAI)
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=4
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens <= 4
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="other", prompt="abc")
    assert http.get("/health").json()["status"] == "ready"
    assert http.get("/nowhere").status_code == 404
    assert http.post("/v1/completions", content=b"{").status_code == 400
    large = http.post("/v1/completions", json={"prompt": "a" * 100_000})
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")


def test_prompts_that_begin_alike_meet_their_cache(http: httpx.Client) -> None:
    replicas = set()
    for beginning in "abcdefgh":
        answers = [
            http.post("/v1/completions", json={**SHORT, "prompt": beginning * 100 + str(i)})
            for i in range(3)
        ]
        (replica,) = {answer.headers[REPLICA] for answer in answers}
        replicas.add(replica)
        cached = [a.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
        assert cached[0] == 0
        assert min(cached[1:]) >= 64
    assert len(replicas) == 2


def test_a_busy_replica_shares_its_prompts(http: httpx.Client) -> None:
    body = {**LONG, "prompt": "x" * 70, "n": 16}
    with ThreadPoolExecutor(12) as pool:
        send = partial(http.post, "/v1/completions", json=body)
        answers = [each.result() for each in [pool.submit(send) for _ in range(12)]]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers[REPLICA] for answer in answers}) == 2


def test_nothing_is_generated_for_a_client_that_left(http: httpx.Client) -> None:
    before = sum(metric(http, "generation_tokens_total").values())
    with stream(http, "x"):
        assert sum(metric(http, "num_requests_running").values())
    wait_until(lambda: not any(metric(http, "num_requests_running").values()), within_s=5)
    generated = sum(metric(http, "generation_tokens_total").values()) - before
    assert 0 < generated < MANY * LONG["max_tokens"] / 2


@pytest.mark.parametrize("killed", ["engine", "replica"])
def test_a_lost_replica_costs_its_own_requests_only(
    killed: str, http: httpx.Client, url: str
) -> None:
    code = {"engine": "engine_dead", "replica": "replica_lost"}[killed]
    wait_for_two(http)
    load = Load(url)
    with streams_on_both(http) as streams, load.running():
        time.sleep(0.1)
        pid = replica_pids()[0]
        os.kill(engine_pid(pid) if killed == "engine" else pid, signal.SIGKILL)
        at = time.monotonic()
        ends = [(replica, *last_events(lines)) for replica, lines in streams]
        wait_until(lambda: sum(start > at for start, _ in load.answers) > 20, within_s=30)
    lost = {replica for replica, event, _ in ends if "error" in event}
    assert len(lost) == 1
    for replica, event, done in ends:
        assert done == "data: [DONE]"
        assert ("error" in event) == (replica in lost)
        assert event.get("error", {}).get("code", code) == code
    # What was in flight there may be sent again; all that came later was served.
    for started, answer in load.failed():
        assert started < at + GRACE_S
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "2"
        assert answer.json()["error"]["code"] == code
    wait_until(lambda: not lost & set(metric(http, "engine_up")), within_s=60)


def test_a_rolling_restart_loses_no_request(
    http: httpx.Client, url: str, settings: dict[str, Any]
) -> None:
    wait_for_two(http)
    before = set(metric(http, "engine_up"))
    load = Load(url, pause_s=0.05)  # leaves the cores to the engines that start
    with load.running(), stream(http, "begun before") as (replica, lines):
        deploy(settings | {"max_logprobs": 21})
        assert replica in before
        event, _ = last_events(lines)
        assert "error" not in event
        wait_until(lambda: not before & set(metric(http, "engine_up")), within_s=60)
    assert not load.failed()
    served = {answer.headers[REPLICA] for _, answer in load.answers}
    assert served & before
    assert len(served - before) == 2
