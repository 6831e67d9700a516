"""How the processes of one group end, with scripted engines that have joined through JAX."""

import contextlib
import os
import queue
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm import SamplingParams
from jaxllm.engine.distributed.group import Follower, Leader
from jaxllm.engine.distributed.join import check_devices
from jaxllm.engine.distributed.links import Link
from jaxllm.engine.engine_process import EngineProcess
from jaxllm.engine.messages import AddRequest, Failed, Outputs, Ready, Shutdown
from jaxllm.request import Request
from tests.engine.distributed.processes import configs, stop, tcp_pair
from tests.engine.scripted_engine import CRASH, ScriptedEngine, without_model


@contextlib.contextmanager
def two_processes(**options: Any) -> Iterator[list[EngineProcess]]:
    """Engine processes that have joined, JAX too; each sees the eight devices of the tests."""
    made = [
        EngineProcess(config, ScriptedEngine)
        for config in configs(tensor_parallel_size=16, join_timeout=60, **options)
    ]
    try:
        yield made
    finally:
        for process in made:
            process.process.kill()
            process.close()


def wait_for(process: EngineProcess, kind: type) -> Any:
    """The next message of a kind; what comes before it is dropped."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for message in process.receive():
            if isinstance(message, kind):
                return message
        time.sleep(0.02)
    raise AssertionError(f"no {kind.__name__} came: {process.exit_message()}")


def add(kind: int) -> AddRequest:
    params = SamplingParams(max_tokens=10**6)
    return AddRequest.of([Request("r", [kind], params)])


def test_the_others_hear_why_process_0_failed():
    with two_processes() as processes:
        leader, follower = processes
        for process in processes:
            wait_for(process, Ready)
        leader.send(add(CRASH))
        assert "the device is gone" in wait_for(leader, Failed).message
        # It crashed alike; either way it is the cause that is told.
        assert "the device is gone" in wait_for(follower, Failed).message
        for process in processes:
            process.process.join(10)
            assert process.process.exitcode == 1


def test_a_stop_ends_all_well_in_the_midst_of_a_request():
    with two_processes() as processes:
        leader, follower = processes
        for process in processes:
            wait_for(process, Ready)
        leader.send(add(50))
        wait_for(leader, Outputs)
        leader.send(Shutdown())
        for process in (follower, leader):
            process.process.join(10)
            assert process.process.exitcode == 0


def test_devices_without_a_part_are_refused():
    with pytest.raises(ValueError, match="have 8 devices together, but --tensor-parallel-size 4"):
        check_devices(configs(tensor_parallel_size=4)[0])


def test_a_model_that_only_one_process_finds_ends_both():
    first, second = configs(tensor_parallel_size=16, join_timeout=60)
    made = [EngineProcess(first, ScriptedEngine), EngineProcess(second, without_model)]
    for process in made:
        assert "no model on this host" in wait_for(process, Failed).message
    for process in made:
        process.close()


@pytest.mark.parametrize("process_id", [0, 1])
def test_an_end_by_jax_is_told_as_the_loss_that_it_means(process_id: int):
    process = EngineProcess(configs()[process_id], ScriptedEngine)
    assert process.pid
    os.kill(process.pid, signal.SIGABRT)
    said = process.exit_message()
    assert "process 0 of 2 (127.0.0.1:" in said
    assert ("was lost" if process_id else "another process was lost") in said
    process.close()


def test_process_1_hears_that_process_2_was_lost():
    (to_1, one), (to_2, two) = tcp_pair(), tcp_pair()
    said: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def fail_in(process_id: int) -> Any:
        return lambda why: stop(said.put((process_id, why)))

    Leader({1: Link(to_1, "process 1"), 2: Link(to_2, "process 2 of 3 (host)")}, fail_in(0))
    Follower(Link(one, "process 0"), fail_in(1), leave=stop)
    two.close()
    ends = dict(said.get(timeout=10) for _ in range(2))
    assert sorted(ends) == [0, 1]
    assert ends[0] == ends[1]
    assert ends[0].startswith("Process 2 of 3 (host) was lost")
