"""A follower does what the leader does, and stops when it gets something else."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from jaxllm import EngineConfig, SamplingParams
from jaxllm.engine.distributed.group import Follower, Leader
from jaxllm.engine.distributed.links import Link
from jaxllm.engine.distributed.lockstep import LeadingEngine, follow
from jaxllm.request import Request
from tests.engine.distributed.processes import stop, tcp_pair
from tests.engine.scripted_engine import ScriptedEngine
from tests.engine.tiny_engine import make_engine

TINY = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 9,
    "max_model_len": 64,
    "enforce_eager": True,
}


def test_a_follower_does_what_the_leader_does(tiny_llama):
    """Two engines of the real kind: sampled tokens, seeds that the engine draws, refusals."""
    led, following = (make_engine(tiny_llama[0], **TINY).engine for _ in range(2))
    here, there = tcp_pair()
    ended = threading.Event()
    group = Leader({1: Link(here, "process 1")}, fail=stop)
    follower = Follower(Link(there, "process 0"), fail=stop, leave=lambda: stop(ended))
    thread = threading.Thread(target=follow, args=(following, follower), daemon=True)
    thread.start()
    engine = LeadingEngine(led, group)
    for i in range(6):
        params = SamplingParams(temperature=1.0, max_tokens=8 + 4 * i, ignore_eos=True)
        engine.add_request(Request(f"r{i}", [3 + i] * (5 + 7 * i), params))
        if i == 4:
            with pytest.raises(ValueError, match="context length"):
                engine.add_request(Request("bad", [3] * 1000, params))
        engine.step()
    engine.abort("r5")
    while engine.has_unfinished():
        engine.step()
    engine.add_request(Request("last", [5], SamplingParams(max_tokens=2)))
    while engine.has_unfinished():
        engine.step()
    group.end()
    assert ended.wait(10)
    deadline = time.monotonic() + 20
    while following.has_unfinished() and time.monotonic() < deadline:
        time.sleep(0.01)
    ours, theirs = led.stats(), following.stats()
    assert ours.num_preemptions > 0
    assert ours.generation_tokens > 60
    assert replace(ours, last_step_time=0.0) == replace(theirs, last_step_time=0.0)
    assert thread.is_alive()  # no step differed


def test_a_follower_whose_tokens_differ_stops():
    here, there = tcp_pair()
    group = Leader({1: Link(here, "process 1")}, fail=stop)
    follower = Follower(Link(there, "process 0"), fail=stop, leave=stop)
    engine = LeadingEngine(ScriptedEngine(EngineConfig()), group)
    other = ScriptedEngine(EngineConfig())
    advance = other._advance

    def off_by_one(request: Request) -> Any:
        output = advance(request)
        output.new_token_ids = [token + 1 for token in output.new_token_ids]
        return output

    other._advance = off_by_one
    engine.add_request(Request("r", [1], SamplingParams(max_tokens=5)))
    engine.step()
    engine.step()
    with pytest.raises(RuntimeError, match="other tokens than in process 0"):
        follow(other, follower)
