"""Blocks that requests share: cached prefixes, siblings, and prompts whose logprobs are asked."""

import pytest

from jaxllm.outputs import SchedulerOutput
from tests.scheduler.paged_device import VOCAB_SIZE, Loop, continuation

PROMPT = [5, 1, 2, 3, 4, 0, 6, 2, 1, 3]  # two blocks of four and a half


def admitted(step: SchedulerOutput | None) -> list[str]:
    return [r.request.request_id for r in step.requests if r.admitted] if step else []


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("max_tokens", [1, 20])
@pytest.mark.parametrize(
    ("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (34, 32)]
)
def test_the_same_prompt_again(length: int, cached: int, max_tokens: int, depth: int):
    loop = Loop(block_size=16, max_num_batched_tokens=64, depth=depth)
    for name in "abc":
        request = loop.add(name, length, max_tokens=max_tokens)
        loop.run()
        assert request.num_cached_tokens == (0 if name == "a" else cached)
        assert loop.last(name).num_cached_tokens == request.num_cached_tokens
    expected = continuation([i % VOCAB_SIZE for i in range(length)], max_tokens)
    assert [loop.tokens(name) for name in "abc"] == [expected] * 3


def test_equal_prompts_in_one_step_share_nothing():
    loop = Loop(max_num_batched_tokens=64)
    first = loop.add("a", PROMPT, max_tokens=3)
    second = loop.add("b", PROMPT, max_tokens=3)
    assert admitted(loop.dispatch()) == ["a", "b"]
    assert not set(first.block_ids) & set(second.block_ids)
    loop.run()
    assert loop.tokens("a") == loop.tokens("b") == continuation(PROMPT, 3)


def test_blocks_are_found_as_soon_as_their_step_is_scheduled():
    loop = Loop(max_num_batched_tokens=64, depth=1)
    first = loop.add("a", PROMPT, max_tokens=3)
    loop.dispatch()
    second = loop.add("b", PROMPT, max_tokens=3)
    loop.dispatch()  # while the first step is under way
    assert second.num_cached_tokens == 8
    assert second.block_ids[:2] == first.block_ids[:2]
    loop.run()
    assert loop.tokens("b") == continuation(PROMPT, 3)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_generated_blocks_are_found_too(depth: int):
    loop = Loop(depth=depth)
    loop.add("a", PROMPT, max_tokens=11)
    loop.run()
    conversation = [*PROMPT, *loop.tokens("a"), 1]
    request = loop.add("b", conversation, max_tokens=3)
    loop.run()
    # 10 of the prompt, 10 of the output: the last token was never computed.
    assert request.num_cached_tokens == 20
    assert loop.tokens("b") == continuation(conversation, 3)


def test_generated_blocks_are_found_while_their_request_runs():
    loop = Loop()
    running = loop.add("a", PROMPT, max_tokens=20)
    for _ in range(8):
        loop.step()
    request = loop.add("b", [*running.token_ids, 1], max_tokens=3)
    loop.step()
    assert request.num_cached_tokens == 16
    loop.run()


def test_salts_keep_prompts_apart():
    loop = Loop()
    loop.add("a", PROMPT, cache_salt="x")
    loop.run()
    other = loop.add("b", PROMPT, cache_salt="y")
    same = loop.add("c", PROMPT, cache_salt="x")
    loop.run()
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 8)


def test_without_prefix_caching_nothing_is_found():
    loop = Loop(enable_prefix_caching=False)
    for name in "ab":
        request = loop.add(name, PROMPT, max_tokens=3)
        loop.run()
        assert request.num_cached_tokens == 0
        assert loop.tokens(name) == continuation(PROMPT, 3)


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_a_preempted_request_finds_its_own_blocks(prompt_logprobs: int | None):
    loop = Loop(num_blocks=6, block_size=2, max_num_seqs=2)
    loop.add("a", [1, 1], max_tokens=8)
    request = loop.add("b", [2, 2], max_tokens=8, prompt_logprobs=prompt_logprobs)
    steps = []
    while loop.scheduler.has_unfinished():
        steps.append(loop.step().get("b"))
    assert request.num_preemptions == 1
    assert request.num_cached_tokens == 0  # that is told of the first admission
    assert loop.tokens("b") == continuation([2, 2], 8)
    # Computed anew is not all of it, but what its own cached blocks lack.
    resumed = steps[steps.index(None) :]
    assert next(start for start, _ in filter(None, resumed)) > 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_siblings_share_the_prompt(enable_prefix_caching: bool, depth: int):
    loop = Loop(enable_prefix_caching=enable_prefix_caching, max_num_batched_tokens=6, depth=depth)
    siblings = [loop.add(f"{i}", PROMPT, group_id="g", max_tokens=4) for i in range(3)]
    loop.add("other", [4], max_tokens=9)
    assert admitted(loop.dispatch()) == ["0"]
    # They wait for the rest of the prompt, but hold up nobody.
    assert admitted(loop.dispatch()) == ["other"]
    assert admitted(loop.dispatch()) == ["1", "2"]
    assert [s.num_cached_tokens for s in siblings] == [0, 8, 8]
    assert all(s.block_ids[:2] == siblings[0].block_ids[:2] for s in siblings)
    assert len({s.block_ids[2] for s in siblings}) == 3
    loop.run()
    assert all(loop.tokens(f"{i}") == continuation(PROMPT, 4) for i in range(3))


def test_siblings_of_a_short_prompt_do_not_wait():
    loop = Loop(block_size=4)
    for i in range(3):
        loop.add(f"{i}", [1, 2, 3, 4], group_id="g", max_tokens=4)
    assert admitted(loop.dispatch()) == ["0", "1", "2"]


@pytest.mark.parametrize("steps", [0, 1])
def test_the_next_sibling_leads_if_the_first_is_aborted(steps: int):
    loop = Loop(max_num_batched_tokens=6)
    for i in range(3):
        loop.add(f"{i}", PROMPT, group_id="g", max_tokens=4)
    for _ in range(steps):
        loop.step()
    loop.scheduler.abort("0")
    loop.scheduler.check_integrity()
    assert admitted(loop.dispatch()) == ["1"]
    loop.run()
    assert [loop.tokens(f"{i}") for i in range(3)] == [[]] + [continuation(PROMPT, 4)] * 2


def test_waiting_siblings_can_be_aborted():
    loop = Loop(max_num_batched_tokens=6)
    for i in range(3):
        loop.add(f"{i}", PROMPT, group_id="g", max_tokens=4)
    loop.step()
    assert loop.scheduler.abort("1")
    assert loop.scheduler.stats().num_waiting == 1
    loop.run()
    assert loop.tokens("2") == continuation(PROMPT, 4)
    assert not loop.tokens("1")


def prompt_positions(loop: Loop, name: str) -> list[int]:
    entries = [e for o in loop.outputs[name] for e in o.prompt_logprobs or ()]
    return [-int(e.logprobs[0]) for e in entries]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prompt_logprobs_come_once_for_every_position(depth: int):
    loop = Loop(max_num_batched_tokens=4, depth=depth)
    for name in "ab":
        request = loop.add(name, PROMPT, max_tokens=3, prompt_logprobs=0)
        loop.run()
        assert prompt_positions(loop, name) == list(range(1, 10))
        # They come from computing: the cache is not read.
        assert request.num_cached_tokens == 0
        assert loop.tokens(name) == continuation(PROMPT, 3)
    assert loop.scheduler.stats().prefix_cache_queries == 0


def test_the_first_chunks_bring_prompt_logprobs_only():
    loop = Loop(max_num_batched_tokens=4)
    loop.add("a", PROMPT, max_tokens=1, prompt_logprobs=0)
    loop.run()
    assert [(len(o.prompt_logprobs or ()), len(o.new_token_ids)) for o in loop.outputs["a"]] == [
        (4, 0),
        (4, 0),
        (1, 1),
    ]


def test_one_sibling_delivers_the_prompt_logprobs():
    loop = Loop()
    siblings = [
        loop.add(f"{i}", PROMPT, group_id="g", max_tokens=2, prompt_logprobs=0) for i in range(3)
    ]
    loop.run()
    assert [prompt_positions(loop, f"{i}") for i in range(3)] == [list(range(1, 10)), [], []]
    assert [s.num_cached_tokens for s in siblings] == [0, 8, 8]


@pytest.mark.parametrize("budget", [2, 3, 16])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_preemption_repeats_no_prompt_logprobs(budget: int, depth: int):
    loop = Loop(
        num_blocks=5, block_size=2, max_num_seqs=2, max_num_batched_tokens=budget, depth=depth
    )
    loop.add("a", [1], max_tokens=9)
    request = loop.add("b", PROMPT[:7], max_tokens=3, prompt_logprobs=0)
    loop.run()
    assert request.num_preemptions >= 1
    assert prompt_positions(loop, "b") == list(range(1, 7))
    assert loop.tokens("b") == continuation(PROMPT[:7], 3)
