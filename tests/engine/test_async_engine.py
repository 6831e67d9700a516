"""AsyncEngine and the engine process, with an engine that can be told to misbehave."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.engine.errors import (
    EngineDeadError,
    EngineError,
    EngineStartError,
    EngineStoppedError,
    RequestRejectedError,
)
from jaxllm.engine.inputs import ContextLengthError, GenerationInput
from jaxllm.engine.request_times import Observer
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from tests.engine import scripted_engine
from tests.engine.scripted_engine import BUG, CRASH, EXIT, FAIL, HANG, REFUSE, ScriptedEngine


def make(**kwargs: Any) -> AsyncEngine:
    return AsyncEngine(
        EngineConfig(model=kwargs.pop("model", "scripted")), make_engine=ScriptedEngine, **kwargs
    )


@asynccontextmanager
async def engine_running(**kwargs: Any) -> AsyncIterator[AsyncEngine]:
    engine = make(**kwargs)
    try:
        await asyncio.wait_for(engine.wait_ready(), 30)
        engine.open(None)
        yield engine
    finally:
        await engine.close()


def request(request_id: str, kind: int = 50, **params: Any) -> GenerationInput:
    params = {"max_tokens": 5, "detokenize": False, **params}
    return GenerationInput(
        request_id=request_id,
        prompt_token_ids=[kind, 51],
        sampling_params=SamplingParams(**params),
        kind="final",
    )


async def collect(engine: AsyncEngine, *requests: GenerationInput) -> list[RequestOutput]:
    return [output async for output in engine.generate(*requests)]


async def until(condition: Callable[[], bool], within_s: float = 5) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.01)


async def test_many_requests_at_once_each_get_their_own():
    async with engine_running() as engine:
        assert engine.generation_config == {"top_k": 7}
        assert engine.max_model_len == scripted_engine.CONTEXT
        results = await asyncio.gather(
            *(collect(engine, request(f"r{i}", max_tokens=i + 1, n=1 + i % 3)) for i in range(20))
        )
        for i, (output,) in enumerate(results):
            assert output.finished
            expected = list(range(1, i + 2))
            assert [c.token_ids for c in output.outputs] == [expected] * (1 + i % 3)
        assert engine.num_unfinished == 0
        assert (await engine.stats()).num_running == 0


async def test_several_requests_share_one_stream():
    async with engine_running() as engine:
        outputs = await collect(engine, request("a", max_tokens=3), request("b", max_tokens=7))
        assert [(o.request_id, len(o.outputs[0].token_ids)) for o in outputs] == [
            ("a", 3),
            ("b", 7),
        ]


async def test_a_slow_consumer_gets_larger_deltas_and_misses_nothing():
    async with engine_running() as engine:
        deltas = replace(request("a", max_tokens=40), kind="delta")
        outputs = []
        async for output in engine.generate(deltas):
            outputs.append(output)
            await asyncio.sleep(0.03)
        tokens = [token for output in outputs for token in output.outputs[0].token_ids]
        assert tokens == list(range(1, 41))
        assert len(outputs) < 20
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]


async def test_leaving_early_aborts_in_the_engine():
    async with engine_running() as engine:
        async with aclosing(engine.generate(request("a", max_tokens=60, n=3))) as outputs:
            task = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(0.02)
            assert (await engine.stats()).num_running == 3
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert (await engine.stats()).num_running == 0
        assert engine.num_unfinished == 0
        # Its id is free again.
        assert (await collect(engine, request("a")))[0].finished


async def test_a_refused_request_is_refused_alone_and_wholly():
    async with engine_running() as engine:
        neighbour = asyncio.ensure_future(collect(engine, request("n", max_tokens=50)))
        with pytest.raises(RequestRejectedError, match="9 blocks"):
            await collect(engine, request("bad", REFUSE, n=3))
        with pytest.raises(ContextLengthError, match="64 tokens"):
            await collect(engine, request("long", max_tokens=63))
        with pytest.raises(ValueError, match="already in use"):
            await collect(engine, request("n"))
        assert (await neighbour)[0].outputs[0].token_ids == list(range(1, 51))
        assert (await engine.stats()).num_running == 0
        assert engine.num_unfinished == 0


async def test_a_bug_in_adding_a_request_ends_that_request_only():
    async with engine_running() as engine:
        with pytest.raises(EngineError, match="a bug"):
            await collect(engine, request("bad", BUG))
        assert (await collect(engine, request("good")))[0].finished


async def test_a_failed_request_says_why_and_harms_no_other():
    async with engine_running() as engine:
        good, (bad,) = await asyncio.gather(
            collect(engine, request("good")), collect(engine, request("bad", FAIL))
        )
        assert bad.error == "the logits are not finite"
        assert bad.outputs[0].finish_reason == "error"
        assert good[0].error is None


@pytest.mark.parametrize(
    ("kind", "said"), [(CRASH, "the device is gone"), (EXIT, "exit code 7")], ids=["crash", "exit"]
)
async def test_a_dead_engine_fails_all_requests_at_once(kind, said):
    async with engine_running() as engine:
        waiting = asyncio.ensure_future(collect(engine, request("a", max_tokens=60)))
        await asyncio.sleep(0.02)
        with pytest.raises(EngineDeadError, match=said):
            await asyncio.wait_for(collect(engine, request("b", kind)), 2)
        with pytest.raises(EngineDeadError, match=said):
            await asyncio.wait_for(waiting, 1)
        assert engine.died.is_set()
        assert engine.state == "dead"
        with pytest.raises(EngineDeadError):
            await collect(engine, request("c"))
        assert engine.num_unfinished == 0


async def test_an_idle_engine_that_is_killed_is_noticed():
    async with engine_running() as engine:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await asyncio.wait_for(engine.died.wait(), 2)
        assert "SIGKILL" in engine.error


async def test_a_hanging_step_counts_as_a_stall_and_shows_its_stacks(capfd):
    async with engine_running(stall_after_s=0.3) as engine:
        assert not engine.stalled
        task = asyncio.ensure_future(collect(engine, request("a", HANG)))
        await until(lambda: engine.stalled)
        await until(lambda: "scripted_engine.py" in capfd.readouterr().err)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_idleness_is_no_stall():
    async with engine_running(stall_after_s=1.5) as engine:
        await asyncio.sleep(2.5)
        assert not engine.stalled
        assert engine.silence_s < 1.5


@pytest.mark.parametrize(
    ("model", "said"), [("no-such-model", "^no model at 'no-such-model'$"), ("bug", "KeyError")]
)
async def test_a_failed_start_gives_the_message(model, said):
    engine = make(model=model)
    with pytest.raises(EngineStartError, match=said):
        await asyncio.wait_for(engine.wait_ready(), 30)
    await engine.close()


async def test_closing_while_it_starts_is_quick():
    engine = make(model="slow")
    waiting = asyncio.ensure_future(engine.wait_ready())
    await asyncio.sleep(0.1)
    start = time.monotonic()
    await engine.close()
    assert time.monotonic() - start < 2
    with pytest.raises(EngineStartError, match="interrupted"):
        await waiting


async def test_stopping_ends_requests_and_takes_no_more():
    async with engine_running() as engine:
        waiting = asyncio.ensure_future(collect(engine, request("a", max_tokens=60)))
        await asyncio.sleep(0.02)
        engine.stop()
        with pytest.raises(EngineStoppedError):
            await waiting
        with pytest.raises(EngineStoppedError):
            await collect(engine, request("b"))


async def test_draining_lets_requests_end_and_takes_no_more():
    async with engine_running() as engine:
        waiting = asyncio.ensure_future(collect(engine, request("a", max_tokens=40)))
        await asyncio.sleep(0.02)
        engine.drain()
        with pytest.raises(EngineStoppedError):
            await collect(engine, request("b"))
        assert (await waiting)[0].finished


class Recorder(Observer):
    def __init__(self) -> None:
        self.events: list[str] = []

    def first_token(self, seconds: float) -> None:
        self.events.append("first")

    def inter_token(self, seconds: float) -> None:
        self.events.append("next")

    def finished(self, reason: str, seconds: float, prompt_tokens: int, generation_tokens: int):
        self.events.append(f"{reason} {prompt_tokens} {generation_tokens}")

    def aborted(self) -> None:
        self.events.append("aborted")


async def test_the_observer_hears_of_latencies_and_ends():
    recorder = Recorder()
    async with engine_running(observer=recorder) as engine:
        await collect(engine, request("a", max_tokens=3))
        assert recorder.events == ["first", "next", "next", "length 2 3"]
        async with aclosing(engine.generate(request("b", max_tokens=60, n=2))) as outputs:
            task = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert recorder.events[-2:] == ["aborted", "aborted"]


PARENT = """
import asyncio
from tests.engine.test_async_engine import make

async def main():
    engine = make()
    await engine.wait_ready()
    print(engine.pid, engine._process.folder, flush=True)
    await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_the_engine_ends_with_a_killed_parent_and_leaves_no_files(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")], stdout=subprocess.PIPE, env=environment
    )
    with parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().decode().split()
        assert os.path.isdir(folder)
        parent.kill()
    end = time.monotonic() + 5
    while os.path.exists(f"/proc/{pid}") or os.path.exists(folder):
        assert time.monotonic() < end, "the engine process is still there"
        time.sleep(0.02)
