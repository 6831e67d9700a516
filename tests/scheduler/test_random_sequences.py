"""Random sequences of arrivals, aborts, steps and late results, with the books checked at each."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jaxllm.request import Request
from tests.scheduler.paged_device import EOS, Loop, continuation


@dataclass
class Expected:
    """What becomes of a request when nothing disturbs it."""

    request: Request
    tokens: list[int]
    finish_reason: str


def expected_of(request: Request, room: int) -> Expected:
    params = request.sampling_params
    count = min(params.max_tokens or room, room)
    tokens = continuation(request.prompt_token_ids, count)
    if params.ignore_eos or EOS not in tokens:
        return Expected(request, tokens, "length")
    return Expected(request, tokens[: tokens.index(EOS) + 1], "stop")


class World:
    """A loop and all that is expected of it."""

    def __init__(self, **settings):
        self.loop = Loop(**settings)
        self.room = min(settings["max_model_len"], self.loop.pool.num_tokens)
        self.added: list[Expected] = []
        self.aborted: set[str] = set()
        self.poisoned: set[str] = set()

    def add(self, prompt: list[int], count: int, **params) -> None:
        """Adds `count` siblings."""
        group_id = f"group {len(self.added)}" if count > 1 else None
        for _ in range(count):
            name = str(len(self.added))
            if len(prompt) >= self.room:
                with pytest.raises(ValueError, match=r"at least one more|one token of output"):
                    self.loop.add(name, prompt, group_id=group_id, **params)
                return
            request = self.loop.add(name, prompt, group_id=group_id, **params)
            self.added.append(expected_of(request, self.room - len(prompt)))

    def abort(self, index: int) -> None:
        name = str(index % max(1, len(self.added)))
        if self.loop.scheduler.abort(name):
            self.aborted.add(name)
        self.loop.scheduler.check_integrity()

    def dispatch(self, poison: int | None = None) -> None:
        """A step; one whose number is given makes that request's logits non-finite."""
        name = str(poison % len(self.added)) if poison is not None and self.added else None

        def poisoned(request: Request) -> bool:
            if request.request_id != name:
                return False
            self.poisoned.add(request.request_id)
            return True

        self.loop.dispatch(poisoned)

    def finish(self) -> None:
        """Lets all end; everything must have been given back, and every output be right."""
        self.loop.run(most_steps=100 + 50 * len(self.added))
        stats = self.loop.scheduler.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_blocks == stats.num_blocks
        groups: dict[str, list[Request]] = {}
        if self.loop.depth == 0:
            # The error is known before the next step: nobody can find those blocks any more.
            assert self.loop.device.infected <= self.poisoned
        for index, expected in enumerate(self.added):
            name = str(index)
            if expected.request.group_id is not None:
                groups.setdefault(expected.request.group_id, []).append(expected.request)
            tokens = self.loop.tokens(name)
            assert tokens == expected.tokens[: len(tokens)]
            assert expected.request.num_inflight == 0
            if name in self.aborted:
                continue
            if self.loop.last(name).finish_reason == "error":
                assert name in self.poisoned | self.loop.device.infected
                continue
            last = self.loop.last(name)
            assert (tokens, last.finish_reason) == (expected.tokens, expected.finish_reason)
            self.check_prompt_logprobs(expected.request)
        disturbed = self.aborted | self.poisoned | self.loop.device.infected
        for siblings in groups.values():
            if not disturbed & {request.request_id for request in siblings}:
                self.check_one_delivers(siblings)

    def check_one_delivers(self, siblings: list[Request]) -> None:
        news = [self.loop.outputs[request.request_id] for request in siblings]
        delivering = [any(output.prompt_logprobs for output in outputs) for outputs in news]
        params, length = siblings[0].sampling_params, siblings[0].num_prompt_tokens
        assert sum(delivering) == (params.prompt_logprobs is not None and length > 1)

    def check_prompt_logprobs(self, request: Request) -> None:
        news = self.loop.outputs[request.request_id]
        entries = [e for o in news for e in o.prompt_logprobs or ()]
        wanted = request.sampling_params.prompt_logprobs is not None
        if not wanted or (request.group_id is not None and not entries):
            assert not entries
            return
        assert [e.token_ids[0] for e in entries] == request.prompt_token_ids[1:]
        assert [e.logprobs[0] for e in entries] == [-p for p in range(1, len(entries) + 1)]


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_thousands_of_random_sequences(depth: int):
    preemptions = hits = 0
    for seed in range(800):
        rng = random.Random(f"{seed} {depth}")
        seqs = rng.randint(1, 4)
        world = World(
            num_blocks=rng.randint(2, 14),
            block_size=rng.choice([1, 2, 4]),
            enable_prefix_caching=rng.random() < 0.6,
            max_num_seqs=seqs,
            max_num_batched_tokens=rng.randint(seqs, 12),
            max_model_len=rng.randint(4, 40),
            num_lanes=rng.choice([1, 1, 2, 4]),
            prefill_first=rng.random() < 0.3,
            depth=depth,
        )
        for _ in range(rng.randint(5, 40)):
            if rng.random() < 0.4:
                prompt = [rng.randrange(1, 3) for _ in range(rng.randint(1, 14))]
                world.add(
                    prompt,
                    rng.choice([1, 1, 1, 3]),
                    max_tokens=rng.choice([None, 1, 2, 8]),
                    ignore_eos=rng.random() < 0.5,
                    prompt_logprobs=rng.choice([None, None, 0]),
                    cache_salt=rng.choice([None, None, "salt"]),
                )
            if rng.random() < 0.1:
                world.abort(rng.randrange(100))
            world.dispatch(rng.randrange(100) if rng.random() < 0.05 else None)
            while len(world.loop.pending) > rng.randint(0, depth):
                world.loop.deliver()
        world.finish()
        stats = world.loop.scheduler.stats()
        preemptions += stats.num_preemptions
        hits += stats.prefix_cache_hits
    # The sequences must reach the corners they are made for.
    assert preemptions > 100
    assert hits > 1000


class SchedulerMachine(RuleBasedStateMachine):
    """The same, with sequences that shrink to the shortest failing one."""

    @initialize(
        num_blocks=st.integers(2, 10),
        block_size=st.sampled_from([1, 2, 4]),
        enable_prefix_caching=st.booleans(),
        max_num_seqs=st.integers(1, 4),
        extra=st.integers(0, 8),
        max_model_len=st.integers(3, 30),
        num_lanes=st.integers(1, 4),
        prefill_first=st.booleans(),
        depth=st.integers(0, 4),
    )
    def start(self, *, max_num_seqs: int, extra: int, **settings):
        self.world = World(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + extra, **settings
        )

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=12),
        count=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.sampled_from([None, 1, 2, 5, 9]),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 1]),
    )
    def add(self, prompt: list[int], count: int, **params):
        self.world.add(prompt, count, **params)

    @precondition(lambda self: self.world.added)
    @rule(index=st.integers(0, 30))
    def abort(self, index: int):
        self.world.abort(index)

    @precondition(lambda self: len(self.world.loop.pending) <= self.world.loop.depth)
    @rule(poison=st.none() | st.integers(0, 30))
    def dispatch(self, poison: int | None):
        self.world.dispatch(poison)

    @precondition(lambda self: self.world.loop.pending)
    @rule()
    def deliver(self):
        self.world.loop.deliver()

    @invariant()
    def books_are_right(self):
        if hasattr(self, "world"):
            self.world.loop.scheduler.check_integrity()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
