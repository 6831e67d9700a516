"""Which tokens go into a step: batching, chunks, slots, preemption, fairness."""

import pytest

from jaxllm.request import RequestStatus
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.scheduler import Scheduler
from tests.scheduler.paged_device import Loop, continuation


def names(loop: Loop) -> list[str]:
    return list(loop.step())


def test_nothing_to_do():
    loop = Loop()
    assert loop.scheduler.schedule() is None
    assert not loop.scheduler.has_unfinished()


def test_a_request_is_prefilled_and_decoded():
    loop = Loop()
    loop.add("a", 10, max_tokens=3)
    assert loop.step() == {"a": (0, 10)}
    assert loop.step() == {"a": (10, 1)}
    assert loop.step() == {"a": (11, 1)}
    assert not loop.scheduler.has_unfinished()
    assert loop.tokens("a") == continuation([i % 7 for i in range(10)], 3)


def test_a_long_prompt_is_computed_in_chunks():
    loop = Loop(max_num_batched_tokens=16)
    loop.add("a", 40, max_tokens=2)
    steps = []
    while (step := loop.dispatch()) is not None:
        steps += [(r.start, r.num_new_tokens, r.samples, r.admitted) for r in step.requests]
        loop.deliver()
    assert steps == [
        (0, 16, False, True),
        (16, 16, False, False),
        (32, 8, True, False),
        (40, 1, True, False),
    ]


def test_decodes_come_first_then_running_prefills_then_waiting_ones():
    loop = Loop(max_num_batched_tokens=16, enable_prefix_caching=False)
    loop.add("decoding", 4, max_tokens=9)
    loop.step()
    loop.add("long", 25, max_tokens=9)
    loop.add("next", 10, max_tokens=9)
    assert loop.step() == {"decoding": (4, 1), "long": (0, 15)}
    assert loop.step() == {"decoding": (5, 1), "long": (15, 10), "next": (0, 5)}
    assert loop.step() == {"decoding": (6, 1), "long": (25, 1), "next": (5, 5)}


def test_prefill_first_lets_decodes_wait_while_prompts_fill_steps():
    loop = Loop(max_num_batched_tokens=16, enable_prefix_caching=False, prefill_first=True)
    loop.add("decoding", 4, max_tokens=9)
    loop.step()
    loop.add("long", 25, max_tokens=9)
    loop.add("next", 10, max_tokens=9)
    assert loop.step() == {"long": (0, 16)}
    assert loop.step() == {"long": (16, 9), "next": (0, 7)}
    assert loop.step() == {"decoding": (4, 1), "long": (25, 1), "next": (7, 3)}


def test_prefill_first_counts_only_prompts_that_can_begin():
    loop = Loop(
        max_num_seqs=2, max_num_batched_tokens=16, enable_prefix_caching=False, prefill_first=True
    )
    for name in ("a", "b"):
        loop.add(name, 4, max_tokens=9)
    loop.step()
    loop.add("no slot", 30, max_tokens=9)
    assert loop.step() == {"a": (4, 1), "b": (4, 1)}


def test_chunks_of_one_token_stand_first():
    loop = Loop()
    loop.add("two", [1, 2], max_tokens=2)
    loop.add("one", [3], max_tokens=2)
    assert names(loop) == ["one", "two"]


def test_the_budget_may_cut_a_chunk_to_one_token():
    loop = Loop(max_num_batched_tokens=5)
    loop.add("a", 4, max_tokens=2)
    loop.add("b", 3, max_tokens=2)
    step = loop.dispatch()
    assert step is not None
    assert [(r.request.request_id, r.num_new_tokens, r.samples) for r in step.requests] == [
        ("b", 1, False),
        ("a", 4, True),
    ]
    loop.run()
    assert loop.tokens("b") == continuation([0, 1, 2], 2)


def test_slots_bound_the_running_requests_and_are_reused():
    loop = Loop(max_num_seqs=2)
    requests = [loop.add(name, 3, max_tokens=2) for name in "abcd"]
    assert names(loop) == ["a", "b"]
    assert {r.slot for r in requests[:2]} == {0, 1}
    assert requests[2].slot == -1
    loop.step()
    assert names(loop) == ["c", "d"]
    assert {r.slot for r in requests[2:]} == {0, 1}
    assert requests[0].slot == -1


def test_admitted_marks_the_first_step_in_a_slot():
    loop = Loop(num_blocks=5, block_size=2, max_num_batched_tokens=2, max_num_seqs=2)
    loop.add("a", 4, max_tokens=5)
    loop.add("b", 1, max_tokens=6)
    seen: dict[str, list[bool]] = {"a": [], "b": []}
    while (step := loop.dispatch()) is not None:
        for scheduled in step.requests:
            seen[scheduled.request.request_id].append(scheduled.admitted)
        loop.deliver()
    assert seen["a"] == [True] + [False] * 5
    assert seen["b"].count(True) == 2
    assert loop.scheduler.stats().num_preemptions == 1


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_request_admitted_last_is_preempted_first(depth: int):
    loop = Loop(num_blocks=6, block_size=2, depth=depth)
    requests = [loop.add(name, [i, i], max_tokens=8) for i, name in enumerate("abc")]
    order = []
    while loop.scheduler.has_unfinished():
        loop.step()
        order += [
            r.request_id
            for r in requests
            if r.status is RequestStatus.PREEMPTED and r.request_id not in order
        ]
    assert order == ["c", "b"]
    assert [r.num_preemptions > 0 for r in requests] == [False, True, True]
    assert [loop.tokens(name) for name in "abc"] == [continuation([i, i], 8) for i in range(3)]


def test_a_preempted_request_keeps_its_tokens_in_flight():
    loop = Loop(num_blocks=4, block_size=2, max_num_seqs=2, depth=1)
    loop.add("a", [1, 1, 1], max_tokens=5)
    victim = loop.add("b", [2, 2, 2], max_tokens=5)
    loop.dispatch()
    loop.dispatch()
    loop.dispatch()  # both want a third block
    assert victim.status is RequestStatus.PREEMPTED
    assert victim.num_inflight == 2
    assert (victim.block_ids, victim.slot, victim.num_computed_tokens) == ([], -1, 0)
    loop.deliver()
    loop.scheduler.abort("a")
    # There is room again, but one of its tokens is still unknown.
    assert loop.dispatch() is None
    loop.deliver()
    assert victim.num_inflight == 0
    loop.run()
    assert loop.tokens("b") == continuation([2, 2, 2], 5)


def test_a_preempted_request_may_end_with_its_tokens_in_flight():
    loop = Loop(num_blocks=4, block_size=2, max_num_seqs=2, depth=1)
    loop.add("a", [1, 1, 1], max_tokens=5)
    victim = loop.add("b", [2, 2, 2], max_tokens=2)
    for _ in range(3):
        loop.dispatch()
    assert victim.status is RequestStatus.PREEMPTED
    loop.run()
    assert victim.num_preemptions == 1
    assert loop.tokens("b") == continuation([2, 2, 2], 2)


def test_a_preempted_request_goes_before_later_arrivals():
    loop = Loop(num_blocks=6, block_size=2, max_num_seqs=2)
    loop.add("a", [1, 1], max_tokens=9)
    loop.add("b", [2, 2], max_tokens=9)
    for i in range(5):
        loop.add(f"later {i}", [3], max_tokens=1)
    ends: list[str] = []
    while loop.scheduler.has_unfinished():
        before = set(loop.outputs)
        loop.step()
        ends += sorted(set(loop.outputs) - before)
    assert loop.scheduler.stats().num_preemptions >= 1
    assert ends.index("b") < ends.index("later 0")


def test_a_big_head_of_the_queue_is_not_overtaken():
    loop = Loop(num_blocks=8, block_size=2, max_num_seqs=8)
    loop.add("running", 6, max_tokens=4)
    loop.step()
    loop.add("big", 12, max_tokens=2)
    for i in range(20):
        loop.add(f"small {i}", 1, max_tokens=1)
    while "big" not in loop.outputs:
        loop.step()
        assert "small 0" not in loop.outputs or "big" in loop.outputs
    loop.run()
    assert len(loop.outputs) == 22


def test_steady_arrivals_starve_nobody():
    loop = Loop(num_blocks=8, block_size=2, max_num_seqs=3, max_num_batched_tokens=4)
    loop.add("big", 13, max_tokens=3)
    for i in range(60):
        loop.add(f"small {i}", [i % 7], max_tokens=2)
        loop.step()
        if loop.outputs.get("big") and loop.last("big").finished:
            break
    else:
        raise AssertionError("the big request never ended")
    loop.run()


def test_newcomers_leave_spare_blocks_for_those_who_run():
    loop = Loop(num_blocks=200, block_size=1, max_num_batched_tokens=200, max_model_len=200)
    loop.add("a", 100, max_tokens=50)
    loop.step()
    loop.add("b", [3] * 99, max_tokens=1)
    loop.add("c", [4] * 199, max_tokens=1)
    assert names(loop) == ["a"]
    loop.scheduler.abort("a")
    assert names(loop) == ["b"]
    # Alone, a request may take them all.
    assert names(loop) == ["c"]


def test_the_token_budget_must_cover_the_slots():
    with pytest.raises(ValueError, match="max_num_batched_tokens=7 must be at least max_num_seqs="):
        Scheduler(BlockPool(8, 4), max_num_seqs=8, max_num_batched_tokens=7, max_model_len=9)


def test_a_context_beyond_the_cache_is_warned_about(caplog: pytest.LogCaptureFixture):
    Loop(num_blocks=8, block_size=16, max_model_len=128)
    assert not caplog.records
    Loop(num_blocks=8, block_size=16, max_model_len=129)
    assert "holds 128 tokens, fewer than max_model_len=129" in caplog.text


def test_stats_count():
    loop = Loop(num_blocks=10, block_size=4, max_num_seqs=1)
    loop.add("a", 9, max_tokens=2)
    loop.add("b", 9, max_tokens=2)
    loop.step()
    stats = loop.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_cached_blocks) == (10, 7, 0)
    loop.run()
    stats = loop.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert (stats.num_free_blocks, stats.num_cached_blocks) == (10, 2)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.num_steps) == (18, 4, 4)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 8)
    assert stats.last_step_time > 0
