"""How requests end: stops, lengths, refusals, aborts, non-finite logits."""

import pytest

from jaxllm.outputs import NO_TOKEN, ModelRunnerOutput
from jaxllm.request import RequestStatus
from jaxllm.scheduler.limits import NON_FINITE_ERROR
from tests.scheduler.paged_device import EOS, Loop, continuation

# It goes on with 3, 2, 1, 1, 4 …: see the first test.
PROMPT = [5, 1, 2]


def stopping_prompt(stop: int, index: int) -> list[int]:
    """A prompt whose continuation has `stop` first at `index`, and no end of sequence before."""
    for a in range(7):
        for b in range(7):
            for c in range(7):
                tokens = continuation([a, b, c], index + 6)
                if tokens[index] == stop and not {stop, EOS} & set(tokens[:index]):
                    return [a, b, c]
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("index", [0, 1, 4])
def test_eos_ends_a_request_and_surplus_tokens_are_dropped(depth: int, index: int):
    loop = Loop(depth=depth)
    prompt = stopping_prompt(EOS, index)
    request = loop.add("a", prompt, max_tokens=20, ignore_eos=False)
    loop.run()
    assert loop.tokens("a") == continuation(prompt, index + 1)
    last = loop.last("a")
    assert (last.finish_reason, last.stop_reason) == ("stop", None)
    assert request.num_inflight == 0
    assert loop.scheduler.stats().num_free_blocks == 100
    assert loop.scheduler.stats().generation_tokens == index + 1


def test_a_stop_gives_blocks_and_slot_back_at_once():
    loop = Loop(max_num_seqs=1, depth=1)
    prompt = stopping_prompt(EOS, 0)
    loop.add("a", prompt, max_tokens=20, ignore_eos=False)
    loop.add("b", PROMPT, max_tokens=3)
    loop.dispatch()
    loop.dispatch()
    loop.deliver()  # a has ended, with a surplus token under way
    assert loop.scheduler.stats().num_free_blocks == 100
    step = loop.dispatch()
    assert step is not None
    assert [(r.request.request_id, r.slot, r.admitted) for r in step.requests] == [("b", 0, True)]
    assert loop.deliver() == []
    loop.run()
    assert loop.tokens("b") == continuation(PROMPT, 3)


def test_eos_is_passed_over_on_request():
    loop = Loop()
    prompt = stopping_prompt(EOS, 1)
    loop.add("a", prompt, max_tokens=6, ignore_eos=True)
    loop.run()
    assert loop.tokens("a") == continuation(prompt, 6)
    assert loop.last("a").finish_reason == "length"


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("stop", [3, EOS])
def test_stop_ids_are_reported(stop: int, ignore_eos: bool):
    loop = Loop()
    prompt = stopping_prompt(stop, 2)
    params = {"stop_token_ids": [stop, 99], "ignore_eos": ignore_eos}
    loop.add("a", prompt, max_tokens=9, **params)
    loop.run()
    assert len(loop.tokens("a")) == 3
    as_eos = stop == EOS and not ignore_eos
    assert loop.last("a").stop_reason == (None if as_eos else stop)


def test_min_tokens_keeps_a_stop_from_ending():
    loop = Loop()
    prompt = stopping_prompt(EOS, 1)
    loop.add("a", prompt, max_tokens=6, min_tokens=3, ignore_eos=False)
    loop.run()
    assert len(loop.tokens("a")) >= 3


def test_a_stop_on_the_last_token_is_a_stop():
    loop = Loop()
    loop.add("a", stopping_prompt(EOS, 3), max_tokens=4, ignore_eos=False)
    loop.run()
    assert loop.last("a").finish_reason == "stop"


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_lengths_are_foreseen_exactly(depth: int, max_tokens: int):
    loop = Loop(depth=depth)
    loop.add("a", 5, max_tokens=max_tokens)
    computed = 0
    while loop.scheduler.has_unfinished():
        computed += sum(count for _, count in loop.step().values())
    assert computed == 5 + max_tokens - 1
    assert len(loop.tokens("a")) == max_tokens
    assert loop.last("a").finish_reason == "length"


@pytest.mark.parametrize(("asked", "given"), [(None, 14), (100, 14), (14, 14), (13, 13)])
def test_the_context_bounds_the_output(asked: int | None, given: int):
    loop = Loop(max_model_len=20)
    request = loop.add("a", 6, max_tokens=asked)
    loop.run()
    assert request.max_tokens == len(loop.tokens("a")) == given
    assert loop.last("a").finish_reason == "length"


def test_a_prompt_that_fills_the_context_is_refused():
    loop = Loop(max_model_len=20)
    with pytest.raises(ValueError, match=r"context length is 20 tokens\. However, .* 20 tokens"):
        loop.add("a", 20)
    loop.add("b", 19)
    loop.run()
    assert len(loop.tokens("b")) == 1


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="the prompt is empty"):
        Loop().add("a", [])


def test_an_id_in_use_is_refused_and_free_once_it_ends():
    loop = Loop()
    loop.add("a", 3)
    with pytest.raises(ValueError, match="'a' is still in use"):
        loop.add("a", 3)
    loop.scheduler.abort("a")
    loop.add("a", PROMPT, max_tokens=2)
    loop.run()
    assert loop.tokens("a") == continuation(PROMPT, 2)


@pytest.mark.parametrize("length", [111, 112, 113, 127])
def test_a_request_that_just_fits_is_served(length: int):
    loop = Loop(num_blocks=8, block_size=16, max_model_len=1024, max_num_batched_tokens=50)
    request = loop.add("long", length, max_tokens=500)
    loop.add("short", PROMPT, max_tokens=4)
    loop.run()
    assert request.max_tokens == len(loop.tokens("long")) == 128 - length
    assert loop.last("long").finish_reason == "length"
    assert loop.tokens("short") == continuation(PROMPT, 4)
    assert request.num_preemptions == 0


@pytest.mark.parametrize("length", [128, 129, 600])
def test_a_request_that_can_never_fit_is_refused_at_once(length: int):
    loop = Loop(num_blocks=8, block_size=16, max_model_len=1024)
    with pytest.raises(ValueError, match=rf"needs {length + 1} tokens .* only 128 are available"):
        loop.add("long", length)
    loop.add("short", PROMPT, max_tokens=4)
    loop.run()
    assert loop.tokens("short") == continuation(PROMPT, 4)


def test_growth_ends_where_the_cache_does():
    loop = Loop(num_blocks=8, block_size=16, max_model_len=1024, max_num_batched_tokens=64)
    loop.add("growing", 100, max_tokens=500)
    loop.add("short", PROMPT, max_tokens=4)
    loop.run()
    assert len(loop.tokens("growing")) == 28
    assert loop.last("growing").finish_reason == "length"
    assert loop.tokens("short") == continuation(PROMPT, 4)


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_abort_gives_everything_back(steps: int, depth: int):
    loop = Loop(max_num_seqs=2, max_num_batched_tokens=8, depth=depth)
    loop.add("neighbour", PROMPT, max_tokens=12)
    request = loop.add("a", 20, max_tokens=20)
    for _ in range(steps):
        loop.step()
    assert loop.scheduler.abort("a")
    loop.scheduler.check_integrity()
    assert request.status is RequestStatus.FINISHED
    assert (request.slot, request.block_ids) == (-1, [])
    told = len(loop.tokens("a"))
    loop.run()
    assert len(loop.tokens("a")) == told
    assert request.num_inflight == 0
    assert loop.tokens("neighbour") == continuation(PROMPT, 12)
    assert loop.scheduler.stats().num_free_blocks == 100


def test_aborting_what_has_ended_is_no_error():
    loop = Loop()
    loop.add("a", 3, max_tokens=1)
    loop.run()
    assert not loop.scheduler.abort("a")
    assert not loop.scheduler.abort("never there")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_non_finite_logits_end_one_request_only(depth: int):
    loop = Loop(depth=depth)
    loop.add("good", PROMPT, max_tokens=8)
    loop.add("bad", 9, max_tokens=8)
    loop.step()
    loop.step(lambda request: request.request_id == "bad")
    loop.run()
    last = loop.last("bad")
    assert (last.finish_reason, last.error, last.new_token_ids) == ("error", NON_FINITE_ERROR, [])
    assert "--dtype bfloat16" in NON_FINITE_ERROR
    assert loop.tokens("good") == continuation(PROMPT, 8)
    # What it computed must not be found by the next one.
    again = loop.add("again", 9, max_tokens=2)
    loop.run()
    assert again.num_cached_tokens == 0


def test_a_block_filled_by_a_non_finite_step_is_not_found():
    loop = Loop()
    request = loop.add("bad", 7, max_tokens=8)
    loop.step()
    loop.step(lambda request: True)  # computes the eighth token
    conversation = [*request.token_ids, 1]
    for name, cached in (("again", 0), ("once more", 8)):
        other = loop.add(name, conversation, max_tokens=2)
        loop.run()
        assert other.num_cached_tokens == cached
        assert loop.tokens(name) == continuation(conversation, 2)


def test_a_token_that_is_missing_is_an_error():
    loop = Loop()
    loop.add("a", 3)
    step = loop.scheduler.schedule()
    assert step is not None
    with pytest.raises(RuntimeError, match="no token for request a"):
        loop.scheduler.update(step, ModelRunnerOutput([NO_TOKEN], [None]))
