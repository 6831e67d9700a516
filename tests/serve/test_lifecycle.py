"""How a server starts, fails, dies and stops."""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.server_process import COMMON_FLAGS, ServerProcess, alive

LONG = {"prompt": "abc", "max_tokens": 250, "ignore_eos": True}


@contextlib.contextmanager
def running(log: Path, *arguments: str, wait: bool = True) -> Iterator[ServerProcess]:
    server = ServerProcess(log, *arguments, wait=wait)
    try:
        yield server
    finally:
        server.stop()


def wait_until(condition, within_s: float) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@contextlib.contextmanager
def slow_stream(server: ServerProcess, **headers: str) -> Iterator[Iterator[str]]:
    """A stream under way: its first line has come, many are to follow."""
    body = {**LONG, "stream": True, "n": 64}
    with (
        httpx.Client(base_url=server.url, timeout=30, headers=headers) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def last_error(lines: Iterator[str]) -> dict:
    """The error event, which is followed by [DONE] only."""
    *_, error, done = [line for line in lines if line]
    assert done == "data: [DONE]"
    return json.loads(error.removeprefix("data: "))["error"]


def test_a_taken_port_is_told_before_anything_is_loaded(tiny_model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = (str(tiny_model), "--host", "127.0.0.1", "--port", port)
        with running(tmp_path / "log", *arguments, wait=False) as server:
            assert server.wait_exit() == 1
    assert f"Port {port} on 127.0.0.1 is taken" in server.output
    assert len(server.output.splitlines()) == 1


def test_a_host_that_is_not_ours(tiny_model, tmp_path):
    arguments = (str(tiny_model), "--host", "203.0.113.7", "--port", "0")
    with running(tmp_path / "log", *arguments, wait=False) as server:
        assert server.wait_exit() == 1
    assert "--host 203.0.113.7" in server.output
    assert "Traceback" not in server.output


@pytest.mark.parametrize("broken", ["missing", "no-config", "no-memory"])
def test_a_failed_start_is_one_message_and_exit_code_1(broken, tiny_model, tmp_path):
    arguments = [str(tiny_model)]
    if broken == "missing":
        arguments, said = [str(tmp_path / "nowhere")], "nowhere"
    elif broken == "no-config":
        arguments, said = [str(tmp_path)], "config.json"
        (tmp_path / "tokenizer.json").write_text("{}")
    else:
        arguments, said = [str(tiny_model), "--kv-cache-memory-bytes", "100"], "memory"
    log = tmp_path.parent / f"{tmp_path.name}.log"
    with running(log, *arguments, wait=False) as server:
        assert server.wait_exit(60) == 1
    errors = [line for line in server.output.splitlines() if line.startswith("ERROR")]
    assert len(errors) == 1
    assert said in server.output[server.output.index("ERROR") :]
    assert "Traceback" not in server.output


def test_a_killed_engine_is_reported_at_once_and_ends_the_server(tiny_model, tmp_path):
    arguments = (str(tiny_model), *COMMON_FLAGS, "--stall-timeout", "0.5")
    with running(tmp_path / "log", *arguments) as server:
        engine = server.engine_pid()
        health = server.url + "/health"
        assert httpx.get(health).status_code == 200

        # A stopped engine is no dead one: /health tells, and turns well again.
        os.kill(engine, signal.SIGSTOP)
        wait_until(lambda: httpx.get(health).status_code == 503, within_s=10)
        assert httpx.get(health).json()["status"] == "stalled"
        os.kill(engine, signal.SIGCONT)
        wait_until(lambda: httpx.get(health).status_code == 200, within_s=10)

        with slow_stream(server) as lines:
            os.kill(engine, signal.SIGKILL)
            killed = time.monotonic()
            error = last_error(lines)
            assert time.monotonic() - killed < 2
        assert error["code"] == "engine_dead"
        assert "SIGKILL" in error["message"]
        response = httpx.get(health)
        assert response.status_code == 503
        assert response.json()["status"] == "dead"
        response = httpx.post(server.url + "/v1/completions", json=LONG)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_dead"
        assert server.wait_exit() == 1
        assert "SIGKILL" in server.output
        assert "Traceback" not in server.output


def test_keys_and_ctrl_c_while_a_stream_runs(tiny_model, tmp_path):
    arguments = (str(tiny_model), *COMMON_FLAGS, "--api-key", "one", "--api-key", "two")
    with running(tmp_path / "log", *arguments) as server:
        for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "one"}):
            response = httpx.get(server.url + "/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.get(server.url + "/v1/models", headers=headers).status_code == 200
        for path in ("/health", "/metrics", "/version"):
            assert httpx.get(server.url + path).status_code == 200

        engine = server.engine_pid()
        with slow_stream(server, authorization="Bearer one") as lines:
            server.process.send_signal(signal.SIGINT)
            sent = time.monotonic()
            assert last_error(lines)["code"] == "service_unavailable"
        assert server.wait_exit() == 0
        assert time.monotonic() - sent < 5
        assert not alive(engine)
    assert "Traceback" not in server.output
    assert "Warning" not in server.output


def test_while_it_loads_it_answers_503_and_sigterm_ends_it(tiny_model, tmp_path):
    with running(tmp_path / "log", str(tiny_model), wait=False) as server:
        server.wait_for("Started server process")
        url = "http://127.0.0.1:" + server.wait_for(r"Listening at http://\S+:(\d+)")
        health = httpx.get(url + "/health")
        assert (health.status_code, health.json()["status"]) == (503, "starting")
        response = httpx.post(url + "/v1/completions", json=LONG)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "model_loading"
        engine = server.engine_pid()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit(5) == 0
        assert not alive(engine)
    assert "Traceback" not in server.output


def test_an_engine_does_not_outlive_a_killed_server(tiny_model, tmp_path):
    with running(tmp_path / "log", str(tiny_model), wait=False) as server:
        server.wait_for("find the checkpoint")
        engine = server.engine_pid()
        server.process.kill()
        server.wait_exit()
        wait_until(lambda: not alive(engine), within_s=5)
