"""Closed-loop load over HTTP: `python scripts/bench_serving.py --model M --concurrency 1,8,32`.

Starts a server (or takes --url), keeps that many clients busy with streamed completions of random
token ids, and prints throughput, latency, time to first token and inter-token latency.
"""

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from bench_offline import model_folder
from record import record


@dataclass
class Samples:
    """Seconds, one entry a request (inter_token: one a token after the first)."""

    latency: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    inter_token: list[float] = field(default_factory=list)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


async def one_request(client: httpx.AsyncClient, body: dict, samples: Samples) -> None:
    start = last = time.perf_counter()
    tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.perf_counter()
            if json.loads(line[6:])["choices"]:
                (samples.inter_token if tokens else samples.first_token).append(now - last)
                last, tokens = now, tokens + 1
    assert tokens, "the server sent no token"
    samples.latency.append(time.perf_counter() - start)


async def closed_loop(url: str, model: str, concurrency: int, args: argparse.Namespace) -> Samples:
    """`concurrency` clients, each sending its next request when the last one has ended."""
    rng = random.Random(0)
    left = iter(range(max(args.requests, 2 * concurrency)))
    samples = Samples()
    limits = httpx.Limits(max_connections=concurrency)

    async def client_loop(client: httpx.AsyncClient) -> None:
        for _ in left:
            prompt = [rng.randint(1000, 30000) for _ in range(args.input_len)]
            body = {"model": model, "prompt": prompt, "max_tokens": args.output_len}
            body |= {"temperature": 0, "ignore_eos": True, "stream": True}
            await one_request(client, body, samples)

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await asyncio.gather(*(client_loop(client) for _ in range(concurrency)))
    return samples


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_server(model: str, args: argparse.Namespace) -> tuple[subprocess.Popen[bytes], str]:
    """A server process and its URL, once it answers /health."""
    port = free_port()
    command = [sys.executable, "-m", "jaxllm.serve", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--load-format", args.load_format, *args.server_args]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    while process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return process, url
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the server ended with code {process.returncode} before it was ready")


def report(concurrency: int, seconds: float, samples: Samples, args: argparse.Namespace) -> None:
    count = len(samples.latency)
    figures = [
        ("throughput", count / seconds, "req/s"),
        ("output", count * args.output_len / seconds, "tok/s"),
    ]
    for name in ("latency", "first_token", "inter_token"):
        values = getattr(samples, name)
        for share in (0.5, 0.95):
            figures.append((f"{name} p{share * 100:.0f}", 1e3 * percentile(values, share), "ms"))
    print(f"concurrency {concurrency}: {count} requests")
    for name, value, unit in figures:
        print(f"  {name:<18} {value:10.2f} {unit}", flush=True)
        if args.record:
            workload = f"{args.model}: HTTP closed loop {concurrency}, {name}"
            record(workload, value, unit, engine="jaxllm.serve", dtype="auto")


def main() -> None:
    parser = argparse.ArgumentParser(description="closed-loop load over HTTP")
    parser.add_argument("--model", default="demo", help="a model, or a name in scripts/shapes")
    parser.add_argument("--url", help="take a running server instead of starting one")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument(
        "--requests", type=int, default=100, help="requests a concurrency, at least"
    )
    parser.add_argument("--input-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=150)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/h200.json")
    parser.add_argument("server_args", nargs="*", help="further flags for the server, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as stack:
        process = None
        if args.url is None:
            process, args.url = start_server(model_folder(args.model, Path(stack)), args)
        try:
            models = httpx.get(f"{args.url}/v1/models", timeout=10).json()
            model = models["data"][0]["id"]
            for concurrency in map(int, args.concurrency.split(",")):
                start = time.perf_counter()
                samples = asyncio.run(closed_loop(args.url, model, concurrency, args))
                report(concurrency, time.perf_counter() - start, samples, args)
        finally:
            if process is not None:
                process.terminate()
                process.wait(30)


if __name__ == "__main__":
    main()
